"""The benchmark that disturbs ranks: its faults, what it counts, and a study that is disturbed."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.endurance import rank_faults
from trials.backend import Status

CHILD = """
print("ready", flush=True)
input()
try:
    bytearray(2**28)
    print("has memory")
except MemoryError:
    print("has none")
"""


@pytest.fixture
def child():
    """A process that waits for a line, and then wants 256 MiB."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets others change a limit")
def test_memory_is_taken_away(child):
    """A disturbed process cannot have the next large piece of memory; it is not killed."""
    rank_faults._disturb_rank(child.pid, "memory")

    assert child.communicate("\n")[0] == "has none\n"


def test_a_kill_kills(child):
    """The signal is the one that nobody can catch."""
    rank_faults._disturb_rank(child.pid, "kill")

    assert child.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(("best_s", "is_fastest"), [(1.0, True), (2.0, False), (None, False)])
def test_the_answer_must_be_the_fastest_trial(best_s, is_fastest):
    """Any other answer is a violation, and so is none where a trial has ended well."""
    well = [SimpleNamespace(step_time_s=seconds) for seconds in (2.0, 1.0)]
    best = SimpleNamespace(step_time_s=best_s) if best_s else None

    assert rank_faults._is_fastest(best, well) == is_fastest
    assert rank_faults._is_fastest(None, [])


def test_a_disturbed_study_keeps_its_promises(answered, monkeypatch):
    """Whatever hits the ranks of two trials, each ends with a status, the answer follows from them, and all end."""
    pytest.importorskip("torch", reason="the study trains")
    monkeypatch.setattr(rank_faults, "PAUSE_S", (0.5, 1.5))
    monkeypatch.setattr(rank_faults, "STUDY", rank_faults.STUDY.replace("hang_limit_s: 6", "hang_limit_s: 3"))

    told = answered(rank_faults, "--trials", "2")

    assert set(told) == {
        "trials", "by_status", "retried", "faults", "best_s", "stop_reason", "violations",
    }  # fmt: skip
    assert told["violations"] == []
    assert told["trials"] == sum(told["by_status"].values()) == 2
    assert set(told["by_status"]) <= set(Status)
    assert set(told["faults"]) <= set(rank_faults.FAULTS)
    assert (told["best_s"] is None) == ("ok" not in told["by_status"])
