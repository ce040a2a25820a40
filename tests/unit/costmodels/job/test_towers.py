"""Vision towers: how they are read, what is refused, and how they are written down."""

import json

import pytest

from costmodels.blocks.tower_part import TowerPart
from costmodels.job.described_model import describe_model, described_model
from costmodels.job.hugging_face.reader import model_from_hugging_face
from costmodels.job.model_catalog import load_model
from costmodels.job.tower import TowerWork
from costmodels.job.training_job import TrainingJob
from hardware.io.errors import ConfigError
from tests.support.settings.multimodal import QWEN2_5_VL_7B, QWEN3_VL_8B, TEXT

WORK = TowerWork(images=2.0, patches=1024, trained=True)
CLIP = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
LLAVA = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {"model_type": "clip_vision_model", **CLIP, "image_size": 336, "patch_size": 14},
}


def read(mapping, work=WORK):
    """The model of a config.json, with its tower if its work is told."""
    towers = {} if work is None else {"vision": work}
    return model_from_hugging_face(mapping, name="some-model", file="some-model.json", towers=towers)


def refusal(mapping, work=WORK):
    """The text of the ConfigError that a config.json ends in."""
    with pytest.raises(ConfigError) as caught:
        read(mapping, work)
    return str(caught.value)


@pytest.mark.parametrize(
    ("mapping", "whole", "tower"),
    [(QWEN3_VL_8B, 8_767_123_696, 576_388_336), (QWEN2_5_VL_7B, 8_292_166_656, 676_550_144)],
    ids=["qwen3-vl-8b", "qwen2.5-vl-7b"],
)
def test_published_models_have_the_published_parameters(mapping, whole, tower):
    """Those of the checkpoints: 8.767 and 8.292 billion; the tower is what reading without it lacks."""
    model = read(mapping)

    assert (model.num_parameters, model.towers[0].parameters) == (whole, tower)
    assert read(mapping, None).num_parameters == whole - tower
    assert (model.left_out, read(mapping, None).left_out) == ((), ("vision tower",))


def test_a_tower_is_a_piece_of_its_own_with_the_tokens_of_its_images():
    """27 layers of patches, then four times as few tokens through three mergers beside the tower, and its own."""
    model = read(QWEN3_VL_8B)
    (at,) = model.tower_pieces
    parts = [model.blocks[block] for block in model.pieces[at].blocks]

    assert (model.pieces[at].name, model.pieces[at].is_layer) == ("vision tower", False)
    assert all(isinstance(part, TowerPart) for part in parts)
    assert [part.tokens for part in parts] == [1024] * (1 + 27 * 2) + [256] * 8
    assert {part.part.inputs for part in parts[-8:]} == {4 * 1152}
    assert model.piece_of_layer.tolist() == [0] * 36


def test_layers_of_qwen_2_5_attend_to_windows_but_for_four():
    """Windows of 112 pixels are 8 patches wide; layers 7, 15, 23 and 31 see whole images."""
    masks = [part.part.mask for part in read(QWEN2_5_VL_7B).towers[0].parts if hasattr(part.part, "mask")]

    assert [layer for layer, mask in enumerate(masks) if not mask.chunk] == [7, 15, 23, 31]
    assert {mask.chunk for mask in masks} == {0, 64}
    assert not any(mask.causal for mask in masks)


def test_only_the_projection_of_a_frozen_tower_is_trained():
    """What stands behind the tower's own layers gives tokens the model's width, and is trained in either case."""
    parts = read(QWEN3_VL_8B, TowerWork(images=1.0, patches=1024, trained=False)).towers[0].parts

    assert [part.trained for part in parts] == [False] * (1 + 27 * 2) + [True] * 8


def test_images_of_one_size_need_no_number_of_patches():
    """336 pixels are 24 patches of 14 in both directions, with one token for the whole image; another number is odd."""
    tokens = [part.tokens for part in read(LLAVA, TowerWork(images=1.0, trained=True)).towers[0].parts]

    assert tokens == [576] + [577] * 48 + [576] * 2
    assert read(LLAVA, TowerWork(images=1.0, patches=576, trained=True)).towers[0].parts[0].tokens == 576
    assert "job.towers.vision.patches = 1024: must be left out" in refusal(LLAVA)


@pytest.mark.parametrize(
    ("mapping", "work", "told"),
    [
        (QWEN3_VL_8B, TowerWork(images=1.0, trained=True), "job.towers.vision.patches: is required"),
        (QWEN3_VL_8B, TowerWork(images=1.0, patches=1023, trained=True), "must be a multiple of 4; nearest: 1024"),
        (QWEN3_VL_8B["text_config"], WORK, "job.towers.vision: is a tower that the model has not"),
        (
            {**LLAVA, "vision_config": {**LLAVA["vision_config"], "model_type": "dinov2"}},
            WORK,
            "vision_config.model_type = 'dinov2': is a tower that is not read; nearest: leave `job.towers` out",
        ),
        (
            {**QWEN3_VL_8B, "vision_config": {**QWEN3_VL_8B["vision_config"], "experts": 8}},
            WORK,
            "vision_config.experts = 8: may change the model",
        ),
        (
            {**LLAVA, "vision_config": {**LLAVA["vision_config"], "image_size": [336, 672]}},
            WORK,
            "squares alone are read",
        ),
        ({**LLAVA, "vision_feature_layer": [-2, -5]}, TowerWork(images=1.0, trained=True), "must be one layer"),
    ],
)
def test_what_is_not_known_of_a_tower_is_refused_by_name(mapping, work, told):
    """A missing number of patches, a tower that is not there or not read, a key that nothing reads."""
    assert told.replace("nearest: ", "") in refusal(mapping, work).replace("nearest: ", "")


def test_models_of_the_catalog_and_of_our_files_have_no_towers(tmp_path):
    """Only a config.json describes a tower."""
    (tmp_path / "own.yaml").write_text("hidden_size: 64\n")

    for name in ("llama3-8b", "own.yaml"):
        with pytest.raises(ConfigError, match=r"needs a config\.json of a multimodal model"):
            load_model(name, tmp_path, {"vision": WORK})


@pytest.mark.parametrize("mapping", [QWEN3_VL_8B, QWEN2_5_VL_7B, LLAVA])
def test_a_described_tower_is_the_tower(mapping):
    """A model with a tower comes back from JSON as it was, with the work of its tower."""
    model = read(mapping, TowerWork(images=1.5, patches=576, trained=False))

    assert described_model(json.loads(json.dumps(describe_model(model)))) == model


def test_model_flops_count_images_beside_tokens():
    """A step adds those of its sequences' images: three passes of a trained tower, one of a frozen one."""
    job = {"sequence_length": 4096, "global_batch_size": 8}
    without, frozen, trained = (
        TrainingJob(model=read(QWEN3_VL_8B, work), **job).model_flops_per_step
        for work in (None, TowerWork(images=2.0, patches=1024, trained=False), WORK)
    )
    parts = read(QWEN3_VL_8B).towers[0].parts
    once = [16 * part.tokens * (2 * part.active_parameters + part.part.mixing_flops(part.tokens)) for part in parts]

    assert trained - without == pytest.approx(3 * sum(once))
    assert frozen - without == pytest.approx(sum(once) + 2 * sum(once[-8:]))
