"""Vision towers against transformers' own models: parameters on the meta device, and FLOPs of real passes."""

import json
import math

import pytest

pytest.importorskip("torch", reason="the comparison needs torch: pip install 'meshtune[torch]'")
pytest.importorskip("transformers", reason="the comparison needs transformers")

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from costmodels.blocks.operator import Family, Phase
from costmodels.job.hugging_face.reader import model_from_hugging_face
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.tower import TowerWork
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import step_operators
from tests.support.settings.multimodal import ANY_SIZE, SMALL
from tests.support.settings.random_settings import grid_of

pytestmark = pytest.mark.slow

SIDE = 16
"""Patches along each side of an image of any size."""

WHOLE = {
    **{
        name: {}
        for name in ("gemma3", "internvl", "kimi_k25", "llava", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
    },
    # the default of the class cannot be built: its projection expects another width
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096, "image_size": 336}},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
}
INTERNVL = {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": True, "use_mean_pooling": False}
CHANGED = [
    ("gemma3", {"vision_config": {"vision_use_head": False, "image_size": 896, "patch_size": 14}}),
    ("internvl", {"vision_config": {**INTERNVL, "use_absolute_position_embeddings": False}}),
    ("glm4v_moe", {"text_config": {"head_dim": 128}, "vision_config": {"attention_bias": True, "depth": 3}}),
    ("mistral3", {"multimodal_projector_bias": True, "spatial_merge_size": 4}),
    ("qwen2_5_vl", {"vision_config": {"hidden_size": 1280, "window_size": 224, "depth": 5}}),
    ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [3], "temporal_patch_size": 1}}),
]


def read(model_type, config, *, images=2):
    """Our model of a configuration of transformers, with its tower."""
    patches = SIDE**2 if model_type in ANY_SIZE else None
    work = TowerWork(images=images, patches=patches, trained=True)
    mapping = json.loads(config.to_json_string(use_diff=False))
    return model_from_hugging_face(mapping, name=model_type, file="config.json", towers={"vision": work})


@pytest.mark.parametrize(("model_type", "change"), [*WHOLE.items(), *SMALL.items(), *CHANGED])
def test_the_whole_model_has_the_parameters_of_transformers(model_type, change):
    """Language model, tower and projection together are those of the class, to the last parameter."""
    config = CONFIG_MAPPING[model_type](**change)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    buffers = sum(one.numel() for name, one in model.named_buffers() if "e_score_correction_bias" in name)

    ours = read(model_type, config).num_parameters
    assert ours in (model.num_parameters(), model.num_parameters() + buffers)


def pixels(model_type, config, images):
    """What the class wants of so many images of noise."""
    vision = config.vision_config
    if model_type == "mistral3":
        side = SIDE * vision.patch_size
        return {
            "pixel_values": torch.randn(images, 3, side, side),
            "image_sizes": torch.tensor([[side, side]] * images),
        }
    if model_type not in ANY_SIZE:
        side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        return {"pixel_values": torch.randn(images, 3, side, side)}
    shape = (3, vision.patch_size, vision.patch_size)
    if model_type != "kimi_k25":  # patches are flat, and hold two frames
        shape = (math.prod(shape) * vision.temporal_patch_size,)
    grid = torch.tensor([[1, SIDE, SIDE]] * images)
    return {"pixel_values": torch.randn(images * SIDE**2, *shape), "image_grid_thw": grid}


@pytest.mark.parametrize("model_type", SMALL)
def test_a_pass_has_the_flops_of_transformers(model_type):
    """Products and attention of the forward pass of two images are those that torch counts, within 0.01%.

    Pixtral's eager attention computes the whole square over all images of a batch, so it gets one.
    """
    torch.manual_seed(0)
    images = 1 if model_type == "mistral3" else 2
    config = CONFIG_MAPPING[model_type](**SMALL[model_type])
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        inner = getattr(model, "model", model)
        found = inner.get_image_features(**pixels(model_type, config, images))
        if model_type == "llama4":  # its features are projected outside of that method
            model.multi_modal_projector(found.last_hidden_state.flatten(0, -2))

    spec = read(model_type, config, images=images)
    job = TrainingJob(model=spec, sequence_length=1024, global_batch_size=1)
    number = dict(zip(spec.block_names, spec.blocks_of_piece[spec.tower_pieces[0]], strict=True))
    operators = step_operators(job, find_runtime("megatron-core"), grid_of(ParallelConfig()))
    forward = [one for one in operators if one.family is Family.TOWER and one.phase == Phase.FORWARD]
    flops = sum(number[one.block] * one.flop[0] for one in forward)

    assert flops == pytest.approx(counted.get_total_flops(), rel=1e-4)
