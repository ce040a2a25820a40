"""`job.towers` of a study."""

import json

import pytest

from hardware.io.errors import ConfigError
from tests.support.settings.multimodal import QWEN3_VL_8B
from tuner.study_file.config import load_study

STUDY = """
name: images
model: {model}
cluster: {{name: dgx-h100, hosts: 1}}
job: {{sequence_length: 8192, global_batch_size: 64{towers}}}
"""
WORK = "towers: {vision: {images: 2, patches: 2048, trained: false}}"


def load(folder, towers="", model="config.json"):
    """The study of a multimodal model in a folder."""
    (folder / "config.json").write_text(json.dumps(QWEN3_VL_8B))
    path = folder / "study.yaml"
    path.write_text(STUDY.format(model=model, towers=towers and f", {towers}"), encoding="utf-8")
    return load_study(path)


def test_a_tower_whose_images_are_known_is_part_of_the_model(tmp_path):
    """The model has it, and no note says that it is left out."""
    study = load(tmp_path, WORK)
    (tower,) = study.problem.setting.job.model.towers

    assert {(part.images, part.trained) for part in tower.parts[:-8]} == {(2.0, False)}
    assert not [note for note in study.notes if "left out" in note]


def test_without_images_a_note_says_what_counts_them(tmp_path):
    """The language model alone is priced, and the note names the key."""
    study = load(tmp_path)

    assert study.problem.setting.job.model.towers == ()
    assert "vision tower of the model: left out of all predictions; job.towers counts the vision tower" in study.notes


@pytest.mark.parametrize(
    ("towers", "model", "told"),
    [
        ("towers: {vision: {images: 2, patches: 2048}}", "config.json", "job.towers.vision.trained: is required"),
        ("towers: {vision: {images: 0, patches: 2048, trained: true}}", "config.json", "job.towers.vision.images"),
        ("towers: {vision: {images: 2, trained: true}}", "config.json", "job.towers.vision.patches: is required"),
        ("towers: {audio: {images: 2, trained: true}}", "config.json", "job.towers.audio: unknown key"),
        (WORK, "llama3-8b", "job.towers: needs a config.json of a multimodal model"),
        (WORK, "{transformers: config.json}", "job.towers: needs a model whose config.json is read"),
    ],
)
def test_what_a_study_does_not_say_is_refused(tmp_path, towers, model, told):
    """Missing and unknown keys, and models whose towers nobody reads."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, towers, model)

    assert told in str(caught.value)
