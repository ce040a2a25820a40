"""Modules that `TorchPlan.parallelize` returns train on real ranks as one process does."""

import importlib.util
import math
import re

import pytest

from tests.support.programs import parallel_ranks
from tests.support.torch_examples import run_example

OF_TRANSFORMERS = [("llama", None), ("llama", 1), ("gpt2", 1), ("bert", 1)]
OF_TWO_RANKS = [("mixtral", None), ("qwen3_moe", 2), ("t5", 1)]


def check(told, cases):
    """Check that each rank tells the losses of one process for each case."""
    for found in told:
        assert [each["case"] for each in found] == cases
        for each in found:
            assert each["found"] == pytest.approx(each["expected"], rel=1e-5), each["case"]
            assert each["expected"][-1] < each["expected"][0]
            assert each["buffers"] < 1e-5
            assert each["cut"] > 0.4
            assert each["names"]


@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        ({"data": 2}, [("convolutions", None), ("perceptron", 1), ("attention", None)]),
        ({"data": 2, "model": 2}, [("convolutions", 2), ("perceptron", 3), ("attention", 4)]),
    ],
    ids=["two ranks", "four ranks"],
)
def test_losses_are_those_of_one_process(on_ranks, mesh, cases):
    """Over three steps of AdamW with clipped gradients, losses and running statistics are those of one process to 1e-5,
    under the planner's plans and under any others: with dropout, BatchNorm and recomputation, whatever seeds ranks but
    the first have.
    """
    check(on_ranks(math.prod(mesh.values()), parallel_ranks.train, mesh, cases), cases)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="models of transformers: pip install it")
def test_models_of_transformers_train_alike(on_ranks):
    """Llama, and GPT-2 and BERT with dropout, have the losses of one process to 1e-5 over three steps of AdamW."""
    check(on_ranks(4, parallel_ranks.train, {"data": 2, "model": 2}, OF_TRANSFORMERS), OF_TRANSFORMERS)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="models of transformers: pip install it")
def test_experts_and_two_stacks_train_alike(on_ranks):
    """Mixtral and Qwen3-MoE, whose experts are products of groups, and T5 have the losses of one process."""
    check(on_ranks(2, parallel_ranks.train, {"data": 2}, OF_TWO_RANKS), OF_TWO_RANKS)


def test_every_operator_runs_on_parts(on_ranks):
    """Each operator with a rule, in all variants, gives loss and gradients of the whole step under a random plan."""
    for (found,) in on_ranks(4, parallel_ranks.try_variants, {"data": 2, "model": 2}, 5):
        assert found["wrong"] == []
        assert found["primitives"] > 90


def test_states_are_saved_and_loaded(on_ranks, tmp_path):
    """A checkpoint of module and optimizer goes on alike in a module under another plan, in one made on `meta`, and in
    one under FSDP2, whose own checkpoint goes on under a plan.
    """
    for (found,) in on_ranks(2, parallel_ranks.save_and_load, str(tmp_path / "state")):
        assert found["kinds"] == ["DTensor"]
        assert found["planned"] == pytest.approx(found["same"], rel=1e-5)
        assert found["from meta"] == pytest.approx(found["same"], rel=1e-5)
        assert found["fsdp"] == pytest.approx(found["same"], rel=1e-5)
        assert found["from fsdp"] == pytest.approx(found["then"], rel=1e-5)
        assert found["then"] < found["same"][1] < found["same"][0]


def test_other_calls_compute_the_same(on_ranks):
    """Other shapes and modes are planned again, once, with a warning; inputs may be dealt out, the loss scaled, and
    parameters frozen; a second backward pass is refused.
    """
    for (found,) in on_ranks(2, parallel_ranks.other_calls):
        for key in ("no grad", "dealt", "fewer", "eval"):
            assert found[key][0] == pytest.approx(found[key][1], rel=1e-5), key
        assert found["frozen"]
        assert found["gradient"] < 1e-6
        assert "keeps nothing for a second backward pass" in found["second"]
        (warning,) = found["warnings"]
        assert "Sequential is planned again: with inputs[0]: torch.float32 (4, 4, 8, 8)" in warning


def test_values_that_the_code_reads_are_compared(on_ranks):
    """A length that the code reads from its inputs is told with its line and read in each call: another one is planned
    once, and after eight the module is refused with a way out.
    """
    for (found,) in on_ranks(2, parallel_ranks.read_values):
        for own, expected in found["losses"]:
            assert own == pytest.approx(expected, rel=1e-5)
        told = [each for each in found["warnings"] if " reads " in each and "planned again" not in each]
        again = [each for each in found["warnings"] if "planned again" in each]
        assert re.search(r"line \d+ of parallel_ranks.py reads 4; line \d+ of parallel_ranks.py reads True", told[0])
        assert len(again) == 1
        assert re.search(r"line \d+ of parallel_ranks.py reads 6; it was planned with 4", again[0])
        assert "8 plans are kept; compute with masks" in found["refused"]


def test_autocast_holds_and_other_steps_are_refused(on_ranks):
    """Under autocast, loss and gradients are those of one process to a hundredth, and parameters keep their precision;
    what can't run as in one process is refused by name.
    """
    for (found,) in on_ranks(2, parallel_ranks.cast_and_refused):
        assert found["autocast"][0] == pytest.approx(found["autocast"][1], rel=1e-2)
        assert found["autocast gradient"] < 2e-2
        assert found["kept"] == "torch.float32"
        first, second, third = found["refused"]
        assert "bernoulli" in first
        assert "draws other random numbers in the backward pass than in the forward pass" in first
        assert "module = 'module: eval': is not in the mode in which it was planned" in second
        assert "inputs: are not the same on all ranks" in third


def test_gradients_are_added_up_together(on_ranks):
    """Gradients of 20 layers are one message beside that of the loss, and the plan's price says so."""
    for (found,) in on_ranks(2, parallel_ranks.count_sums, 20):
        assert found["planned"] >= 40
        assert found["calls"] <= 4
        assert found["priced_s"] < 3 * found["together_s"] < found["alone_s"] / 4


def test_documented_example(tmp_path):
    """The torch example of the documentation runs on two ranks as it stands there."""
    run_example("## torch", tmp_path / "train.py")

    assert (tmp_path / "checkpoint" / ".metadata").is_file()
