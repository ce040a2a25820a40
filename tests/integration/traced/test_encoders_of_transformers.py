"""Encoders against transformers' own models: FLOPs of a pass on the meta device."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the comparison needs torch: pip install 'meshtune[torch]'")
pytest.importorskip("transformers", reason="the comparison needs transformers")

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageClassification, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from costmodels.blocks.operator import Phase
from costmodels.job.hugging_face.reader import model_from_hugging_face
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import step_operators
from tests.support.settings.random_settings import grid_of

pytestmark = pytest.mark.slow

KINDS = {"vit": AutoModelForImageClassification, "t5": AutoModelForSeq2SeqLM}
CASES = [
    ("bert", {}, 128),
    ("roberta", {"num_hidden_layers": 3}, 256),
    # eager attention computes whole squares: a window that holds the sequence has as many products
    ("modernbert", {"local_attention": 4096, "mlp_bias": True}, 128),
    ("t5", {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3}, 128),
    ("vit", {}, 197),
    ("vit", {"patch_size": 32, "num_labels": 1000}, 50),
]


@pytest.mark.parametrize(("model_type", "change", "length"), CASES)
def test_passes_have_the_flops_of_transformers(model_type, change, length):
    """Both passes of two sequences, within 0.1%: backward, twice the products, but for those of the pixels' gradient.

    Eager attention computes whole squares under a causal mask too, and so does ours without a fused kernel.
    """
    config = CONFIG_MAPPING[model_type](**change)
    with torch.device("meta"):
        kind = KINDS.get(model_type, AutoModelForMaskedLM)
        model = kind.from_config(config, attn_implementation="eager")
        batch = torch.zeros(2, 3, 224, 224) if model_type == "vit" else torch.zeros(2, length, dtype=torch.long)
    further = {"decoder_input_ids": batch} if model_type == "t5" else {}
    with FlopCounterMode(display=False) as forward:
        logits = model(batch, **further).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()

    mapping = json.loads(config.to_json_string(use_diff=False))
    spec = model_from_hugging_face(mapping, name=model_type, file="config.json")
    job = TrainingJob(model=spec, sequence_length=length, global_batch_size=2)
    held = np.bincount(spec.piece_of_layer, minlength=len(spec.pieces)).astype(np.float64)
    held[-2:] = 1.0
    number = dict(zip(spec.block_names, held @ spec.blocks_of_piece, strict=True))
    # attention whose scores pass through memory has the products of eager kernels
    runtime = replace(find_runtime("megatron-core"), fused_attention=False, vocabulary_multiple=1)
    found = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0}
    for one in step_operators(job, runtime, grid_of(ParallelConfig(mbs=2))):
        of_pixels = "projection.proj.data_gradient" in one.name
        found[one.phase] += 0.0 if of_pixels else number[one.block] * one.flop[0]

    assert found[Phase.FORWARD] == pytest.approx(forward.get_total_flops(), rel=1e-3)
    assert found[Phase.BACKWARD] == pytest.approx(backward.get_total_flops(), rel=1e-3)
