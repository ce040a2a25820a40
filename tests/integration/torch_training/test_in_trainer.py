"""Planned models of transformers train on real ranks in its Trainer and in loops of Accelerate."""

import json

import pytest

pytest.importorskip("transformers", reason="models of transformers: pip install it")
pytest.importorskip("accelerate", reason="Trainer needs accelerate: make frameworks")

from safetensors.torch import load_file

from tests.support.programs import trainer_ranks
from tests.support.torch_examples import run_example


@pytest.mark.parametrize(
    ("mesh", "cases"),
    [({"data": 2}, [("llama", None, 1), ("gpt2", 1, 2)]), ({"data": 2, "model": 2}, [("llama", 2, 1)])],
    ids=["two ranks", "four ranks"],
)
def test_trainer_trains_as_planned(on_ranks, tmp_path, mesh, cases):
    """Losses, norms of gradients and losses of evaluations that Trainer logs, and the weights that it saves, are those
    of one process without a plan to 1e-5, with dropout and with micro-batches whose numbers of labels differ, too.
    Ranks send what the planner's plan counts, and what brings the parts of the batch to its layouts. Only evaluation is
    planned again.
    """
    ranks = 2 ** len(mesh)
    (plain,) = on_ranks(1, trainer_ranks.train, str(tmp_path), None, cases)
    told = on_ranks(ranks, trainer_ranks.train, str(tmp_path), mesh, cases)

    for rank in told:
        for one, found, (_, seed, _) in zip(plain, rank, cases, strict=True):
            assert len(found["logged"]) == 10
            assert found["logged"] == pytest.approx(one["logged"], rel=1e-5)
            assert ["eval; it was planned" in each for each in found["again"]] == [True]
            if seed is None:
                assert found["sent"] == [found["expected"]] * 3
    for name, _, _ in cases:
        saved, own = (load_file(tmp_path / f"{name}-{count}" / "model.safetensors") for count in (1, ranks))
        # transformers saves tied weights of sharded models under both names
        tied = {"lm_head.weight": "transformer.wte.weight"}
        assert saved.keys() <= own.keys()
        for key, value in own.items():
            assert float((value - saved[key if key in saved else tied[key]]).abs().max()) < 1e-5


def test_loops_of_accelerate_train_as_planned(on_ranks):
    """A loop with Accelerate's loaders has the losses of one process; parts of other lengths, other numbers of items on
    other ranks, and modules of other libraries are refused by name.
    """
    for (found,) in on_ranks(2, trainer_ranks.loop):
        assert len(found["found"]) == 6
        assert found["found"] == pytest.approx(found["expected"], rel=1e-5)
        lengths, numbers, module = found["refused"]
        assert "have other shapes, or other numbers, on other ranks" in lengths
        assert "pad the parts to one length" in lengths
        assert "have other shapes, or other numbers, on other ranks" in numbers
        assert "module = 'Sequential': is no model of transformers" in module


def test_documented_example(tmp_path):
    """The example of the documentation trains on two ranks as it stands there, and saves a model that can be loaded."""
    told = run_example("### In transformers' Trainer", tmp_path / "finetune.py")

    assert "planned again" not in told
    logged = json.loads((tmp_path / "trained" / "trainer_state.json").read_text())["log_history"]
    assert logged[-2]["loss"] < logged[0]["loss"]
    assert load_file(tmp_path / "trained" / "model.safetensors")["lm_head.weight"].shape == (256, 64)
