"""Small Gemma 4 models against transformers' own: FLOPs of a forward pass."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the comparison needs torch: pip install 'meshtune[torch]'")
pytest.importorskip("transformers", reason="the comparison needs transformers")

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from costmodels.blocks.operator import Phase
from costmodels.job.hugging_face.reader import model_from_hugging_face
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import step_operators
from tests.support.settings.random_settings import grid_of

pytestmark = pytest.mark.slow

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "vocab_size": 1024,
    "vocab_size_per_layer_input": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    # eager attention computes whole squares: a window that holds the sequence has as many products
    "sliding_window": 4096,
}


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        {"num_kv_shared_layers": 6, "hidden_size_per_layer_input": 64, "use_double_wide_mlp": True},
    ],
)
def test_a_pass_has_the_flops_of_transformers(change):
    """With and without shared keys and inputs of layers, within 0.01%; parameters are equal."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gemma4_text"](**SMALL, **change)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.zeros(2, 256, dtype=torch.long), use_cache=False)

    mapping = json.loads(config.to_json_string(use_diff=False))
    spec = model_from_hugging_face(mapping, name="gemma4", file="config.json")
    job = TrainingJob(model=spec, sequence_length=256, global_batch_size=2)
    held = np.bincount(spec.piece_of_layer, minlength=len(spec.pieces)).astype(np.float64)
    held[-2:] = 1.0
    number = dict(zip(spec.block_names, held @ spec.blocks_of_piece, strict=True))
    runtime = replace(find_runtime("megatron-core"), fused_attention=False, vocabulary_multiple=1)
    operators = step_operators(job, runtime, grid_of(ParallelConfig(mbs=2)))
    flops = sum(number[one.block] * one.flop[0] for one in operators if one.phase == Phase.FORWARD)

    assert spec.num_parameters == model.num_parameters()
    assert flops == pytest.approx(counted.get_total_flops(), rel=1e-4)
