"""A study of a multimodal model says which of its parts no prediction counts."""

from __future__ import annotations

import json
from pathlib import Path

from tuner.study_file.config import load_study

TEXT = {
    "model_type": "gemma3_text",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "vocab_size": 1024,
}


def _notes(folder: Path, config: dict[str, object]) -> tuple[str, ...]:
    (folder / "config.json").write_text(json.dumps(config))
    study = folder / "study.yaml"
    study.write_text(
        "name: s\nmodel: config.json\ncluster: {name: dgx-h100, hosts: 1}\nruntime: megatron-core\n"
        "job: {sequence_length: 512, global_batch_size: 64}\n"
    )
    return load_study(study).notes


def test_towers_are_told(tmp_path: Path) -> None:
    notes = _notes(tmp_path, {"model_type": "gemma3", "text_config": TEXT, "vision_config": {"hidden_size": 64}})
    assert any(note.startswith("vision tower of the model: left out") for note in notes)


def test_a_language_model_has_none(tmp_path: Path) -> None:
    assert not any("left out" in note for note in _notes(tmp_path, TEXT))
