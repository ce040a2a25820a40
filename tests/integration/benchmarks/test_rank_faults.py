"""The benchmark that disturbs ranks: its faults, what it counts, and a study that is disturbed."""

from types import SimpleNamespace

import pytest

from benchmarks.endurance import rank_faults
from trials.backend import Status


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
