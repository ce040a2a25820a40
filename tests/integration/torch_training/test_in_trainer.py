"""Planned models of transformers train in its Trainer on real ranks as without a plan in one process."""

import pytest

pytest.importorskip("transformers", reason="models of transformers: pip install it")
pytest.importorskip("accelerate", reason="Trainer needs accelerate: make frameworks")

from safetensors.torch import load_file

from tests.support.programs import trainer_ranks

CASES = [("llama", None, 1), ("llama", 1, 2)]


@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 2, "model": 2}], ids=["two ranks", "four ranks"])
def test_a_planned_model_trains_in_trainer(on_ranks, tmp_path, mesh):
    """x"""
    (expected,) = on_ranks(1, trainer_ranks.train, str(tmp_path), None, CASES)
    told = on_ranks(2 ** len(mesh), trainer_ranks.train, str(tmp_path), mesh, CASES)
    for rank in told:
        for one, found in zip(expected, rank, strict=True):
            print(one["logged"], found["logged"])
            print(found["planned"])
            print(found["sent"])
            assert found["logged"] == pytest.approx(one["logged"], rel=1e-5)
