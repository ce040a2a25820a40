"""What a step computes and sends under the plans of every planner; the program runs it on eight virtual devices."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from costmodels.job.model_catalog import load_model
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.step.memory.peak import estimate_memory
from tests.support.programs.small_backends import cluster_of

ROOT = Path(__file__).parents[3]
CASES = (
    "gpt by hand, dp=8",
    "gpt by hand, dp=2, tp=4",
    "gpt by hand, dp=4, tp=2, no sequence parallelism, no ZeRO",
    "llama by hand, dp=2, cp=2, tp=2",
    "llama by hand, dp=2, up=2, tp=2",
    "experts by hand, dp=8, ep=2",
    "gpt by hand, dp=2, tp=4, mbs=1",
    "gpt pinned, dp=2, tp=4, mbs=1",
    "experts pinned to tp, dp=2, tp=4, mbs=2",
    "llama by hand, dp=2, cp=2, tp=2, bf16",
    "experts by hand, dp=2, cp=2, tp=2, ep=2, mbs=2",
    "experts by hand, dp=2, cp=2, tp=2, ep=2, mbs=2, bf16",
    "gpt by hand, dp=4, tp=2, mbs=1, sharded parameters",
    "gpt by D-Rec",
    "llama by descent",
    "gpt by TOAST",
)


@cache
def found():
    """Run the program once for all cases."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.programs.planned_steps", *CASES],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_a_plan_changes_no_loss(case):
    """Three steps on the mesh have the losses of three steps of the whole batch on one device, and the model learns; in
    bfloat16 they are those of float32 to a tenth of its precision, because losses are means over tokens.
    """
    losses, plain = found()[case]["losses"], found()[case]["plain"]
    tolerance = {"rel": 2**-8 / 10} if "bf16" in case else {"abs": 1e-5}

    assert losses == pytest.approx(plain, **tolerance)
    assert losses[2] < losses[1] < losses[0]


def test_small_micro_batches_and_narrow_types_need_less_memory():
    """By XLA's analysis of the compiled step, a device needs less for a step of four micro-batches than for one of one,
    and less in bfloat16 than in float32.
    """

    def memory_bytes(case):
        return found()[case]["memory_bytes"]

    llama = "llama by hand, dp=2, cp=2, tp=2"
    assert memory_bytes("gpt by hand, dp=2, tp=4, mbs=1") < 0.5 * memory_bytes("gpt by hand, dp=2, tp=4")
    assert memory_bytes(f"{llama}, bf16") < 0.9 * memory_bytes(llama)


@pytest.mark.parametrize("mbs", [1, 4])
def test_predicted_memory_follows_micro_batches(mbs):
    """Predicted memory is at most 1.5 times below XLA's, and not above it, for one micro-batch and for four: it lacks
    the copies that XLA's backend for CPUs makes.
    """
    model = load_model("gpt-tiny.yaml", ROOT / "configs" / "models").changed(num_layers=1)
    job = TrainingJob(model=model, sequence_length=64, global_batch_size=8, precision="fp32")
    setting = Setting(job=job, cluster=cluster_of(8), runtime=find_runtime("jax-reference"))
    grid = ConfigGrid.from_configs([ParallelConfig(dp=2, tp=4, mbs=mbs)])
    measured_bytes = found()[f"gpt by hand, dp=2, tp=4{'' if mbs == 4 else ', mbs=1'}"]["memory_bytes"]

    assert measured_bytes / 1.5 < estimate_memory(setting, grid).peak_bytes[0] < measured_bytes


def test_gradients_are_added_up_over_replicas_once_a_step():
    """Four micro-batches send over dp what one does, and over tp as much in all: the same tokens in more messages."""
    four, one = (found()[case]["compiled"] for case in ("gpt by hand, dp=2, tp=4, mbs=1", "gpt by hand, dp=2, tp=4"))

    assert four["gathered dp"] == one["gathered dp"]
    # each micro-batch adds up its loss, which is a number
    assert 0 <= four["reduced dp"] - one["reduced dp"] < 100
    assert four["gathered tp"] == one["gathered tp"]


@pytest.mark.parametrize("case", CASES)
def test_the_compiled_program_sends_what_the_plan_says(case):
    """XLA's collectives agree with the plan's list in the bytes of every kind along every group of axes."""
    one = found()[case]

    assert one["violations"] == []
    assert one["compiled"] == pytest.approx(one["planned"], rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_share_of_a_device_has_all_of_its_products_and_sends_nothing(case):
    """What the virtual clock times is the compiled step's own work on one device, and no collective is left in it."""
    one = found()[case]

    assert one["flop"] > 0
    assert one["alone"] == {"flop": one["flop"], "sent": {}}


def test_a_pin_changes_what_is_sent():
    """The pinned plan is another one than that by hand, so that its agreement is a claim of its own."""
    assert found()["gpt pinned, dp=2, tp=4, mbs=1"]["planned"] != found()["gpt by hand, dp=2, tp=4, mbs=1"]["planned"]
