"""What a step computes and sends under the plans of every planner; the program runs it on eight virtual devices."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = (
    "gpt by hand, one device",
    "gpt by hand, dp=8",
    "gpt by hand, dp=2, tp=4",
    "gpt by hand, dp=4, tp=2, no sequence parallelism, no ZeRO",
    "llama by hand, dp=2, cp=2, tp=2",
    "llama by hand, dp=2, up=2, tp=2",
    "experts by hand, dp=8, ep=2",
    "experts by hand, dp=2, cp=2, tp=2, ep=2",
    "gpt pinned, dp=2, tp=4",
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
    """Three steps on the mesh have the losses of three steps on one device, and the model learns."""
    losses, plain = found()[case]["losses"], found()[case]["plain"]

    assert losses == pytest.approx(plain, abs=1e-5)
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("case", CASES)
def test_the_compiled_program_sends_what_the_plan_says(case):
    """XLA's collectives agree with the plan's list in the bytes of every kind along every group of axes."""
    one = found()[case]

    assert one["violations"] == []
    assert one["compiled"] == pytest.approx(one["planned"], rel=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if case != "gpt by hand, one device"])
def test_the_share_of_a_device_has_all_of_its_products_and_sends_nothing(case):
    """What the virtual clock times is the compiled step's own work on one device, and no collective is left in it."""
    one = found()[case]

    assert one["flop"] > 0
    assert one["alone"] == {"flop": one["flop"], "sent": {}}


def test_a_pin_changes_what_is_sent():
    """The pinned plan is another one than that by hand, so that its agreement is a claim of its own."""
    assert found()["gpt pinned, dp=2, tp=4"]["planned"] != found()["gpt by hand, dp=2, tp=4"]["planned"]
