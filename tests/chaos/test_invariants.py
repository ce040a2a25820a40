"""The checkers: each tells a forged violation, and nothing of a study in which all holds."""

from dataclasses import replace

import pytest

from tests.chaos.invariants import (
    INVARIANTS,
    Disturbed,
    End,
    answers_with_the_best,
    captures_harm_nothing,
    drivers_end_well,
    ends_as_undisturbed,
    gives_its_study_up,
    leaves_nothing,
    loses_nothing,
    outcome,
    records_each_once,
    records_what_was_measured,
    runs_none_after_its_end,
    spends_its_budget,
    tells_of_memory,
    violations,
)
from tests.chaos.ledger import Entry
from tests.chaos.left_behind import Held
from tests.chaos.stored import Stored, StoredTrial

FIRST = StoredTrial(number=0, state="COMPLETE", configuration="tp=1 dp=2", value=0.3, status="ok", ended_s=10.0)
SECOND = StoredTrial(number=1, state="COMPLETE", configuration="tp=2 dp=1", value=0.2, status="ok", ended_s=20.0)
RUNNING = replace(SECOND, state="RUNNING", value=None, status="", ended_s=None)
LEDGER = (
    Entry(event="begin", trial=0, configuration="tp=1 dp=2", pid=1, time_s=1.0),
    Entry(event="end", trial=0, configuration="tp=1 dp=2", pid=1, time_s=9.0, step_s=0.3),
    Entry(event="begin", trial=1, configuration="tp=2 dp=1", pid=2, time_s=11.0),
    Entry(event="limited", trial=1, configuration="tp=2 dp=1", pid=2, time_s=12.0),
    Entry(event="begin", trial=1, configuration="tp=2 dp=1", pid=3, time_s=13.0),
    Entry(event="end", trial=1, configuration="tp=2 dp=1", pid=3, time_s=19.0, step_s=0.2),
)
WELL = Disturbed(
    budget=2,
    ledger=LEDGER,
    moments=(Stored(), Stored(trials=(FIRST, RUNNING), kept=(0,))),
    stored=Stored(trials=(FIRST, SECOND), kept=(0, 1)),
    answer={"step_time_s": 0.2, "best": {"tp": 2, "dp": 1}},
    ends=(End(status=-9, allowed=frozenset({-9}), faults=("kill driver",)), End(status=0)),
    undisturbed=(outcome(FIRST), outcome(SECOND)),
    before=Held(segments=frozenset({"theirs"}), ports=frozenset({(22, "a")})),
    used=Held(processes=frozenset({(5, "7")}), segments=frozenset({"ours"}), ports=frozenset({(6379, "b")})),
    after=Held(segments=frozenset({"theirs", "their next"}), ports=frozenset({(22, "a"), (6379, "c")})),
)


def stored(*trials, kept=(0, 1)):
    """The study with other rows."""
    return replace(WELL, stored=Stored(trials=trials, kept=kept))


def ledger(*entries):
    """The study with more in its ledger."""
    return replace(WELL, ledger=(*LEDGER, *entries))


def ended(**changes):
    """The study with another last driver."""
    return replace(WELL, ends=(WELL.ends[0], replace(WELL.ends[1], **changes)))


def test_all_holds_of_a_study_that_went_well():
    """A study that was killed, taken up and brought to its end violates nothing."""
    assert violations(WELL) == []


FORGED = {
    "a trial short": (spends_its_budget, stored(FIRST, kept=(0,)), "1 trials were tried, of a budget of 2"),
    "still running": (spends_its_budget, stored(FIRST, RUNNING, kept=(0,)), "trial 1 is RUNNING"),
    "no status": (spends_its_budget, stored(FIRST, replace(SECOND, status="")), "trial 1 has ended without a status"),
    "recorded twice": (records_each_once, stored(FIRST, FIRST, SECOND), "trial 0 is recorded 2 times"),
    "kept twice": (records_each_once, stored(FIRST, SECOND, kept=(0, 0, 1)), "2 rows are kept of trial 0"),
    "not kept": (records_each_once, stored(FIRST, SECOND, kept=(0,)), "no row is kept of trial 1"),
    "kept too early": (records_each_once, stored(FIRST, RUNNING), "a row is kept of trial 1, which has not ended"),
    "tried twice": (
        records_each_once,
        stored(FIRST, replace(SECOND, configuration=FIRST.configuration)),
        "2 trials are of tp=1 dp=2",
    ),
    "ran unrecorded": (
        records_each_once,
        ledger(Entry(event="begin", trial=7, configuration="tp=4", pid=9, time_s=5.0)),
        "trial 7 ran and is not recorded",
    ),
    "lost": (loses_nothing, stored(SECOND), "trial 0 was lost"),
    "measured anew": (loses_nothing, stored(replace(FIRST, value=0.4), SECOND), "trial 0 had ended as"),
    "observation lost": (
        loses_nothing,
        replace(WELL, moments=(Stored(trials=(FIRST, replace(RUNNING, status="out_of_memory"))),)),
        "trial 1 was out_of_memory and is ok",
    ),
    "another candidate": (
        loses_nothing,
        replace(WELL, moments=(Stored(trials=(FIRST, replace(RUNNING, configuration="tp=4"))),)),
        "trial 1 was of tp=4 and is of tp=2 dp=1",
    ),
    "ran again": (
        runs_none_after_its_end,
        ledger(replace(LEDGER[0], pid=8, time_s=10.5)),
        "trial 0 ran again 0.50 s after its end",
    ),
    "ran again by another number": (
        runs_none_after_its_end,
        ledger(replace(LEDGER[0], trial=5, pid=8, time_s=11.0)),
        "trial 0 ran again 1.00 s after its end",
    ),
    "another time": (
        records_what_was_measured,
        stored(FIRST, replace(SECOND, value=0.25)),
        "trial 1 took 0.2 s and is recorded with 0.25 s",
    ),
    "another configuration": (
        records_what_was_measured,
        stored(FIRST, replace(SECOND, configuration="tp=4")),
        "trial 1 ran tp=2 dp=1 and is recorded as tp=4",
    ),
    "invented": (
        records_what_was_measured,
        replace(WELL, ledger=LEDGER[:-1]),
        "trial 1 is recorded with 0.2 s and never came to its end",
    ),
    "not the best": (
        answers_with_the_best,
        replace(WELL, answer={"step_time_s": 0.3, "best": {"tp": 1, "dp": 2}}),
        "the answer is 0.3 s, and trial 1 took 0.2 s",
    ),
    "not its configuration": (
        answers_with_the_best,
        replace(WELL, answer={"step_time_s": 0.2, "best": {"tp": 1, "dp": 2}}),
        "and the fastest trial was of tp=2 dp=1",
    ),
    "no answer": (answers_with_the_best, replace(WELL, answer=None), "no driver has answered"),
    "answer of nothing": (
        answers_with_the_best,
        replace(stored(replace(FIRST, value=None)), answer={"step_time_s": 0.1, "best": {}}),
        "the answer is 0.1 s, and no trial completed",
    ),
    "another search": (
        ends_as_undisturbed,
        replace(WELL, undisturbed=(outcome(FIRST), ("tp=4", "ok", 0.2))),
        "trial 1 is ('tp=2 dp=1', 'ok', 0.2), and undisturbed ('tp=4', 'ok', 0.2)",
    ),
    "memory blamed on the program": (
        tells_of_memory,
        stored(FIRST, replace(SECOND, state="FAIL", value=None, status="crashed", reason="ended with status 1")),
        "trial 1 lacked memory and is told as crashed: ended with status 1",
    ),
    "bad status": (drivers_end_well, ended(status=1, told="boom"), "a driver ended with 1 after no fault: boom"),
    "unexcused kill": (
        drivers_end_well,
        replace(WELL, ends=(End(status=-9, faults=("kill worker",)), End(status=0))),
        "a driver ended with -9 after kill worker",
    ),
    "traceback": (drivers_end_well, ended(told="Traceback (most recent call last)"), "a driver printed a traceback"),
    "no message": (
        drivers_end_well,
        replace(WELL, ends=(End(status=2, allowed=frozenset({2}), faults=("fill disk",)), End(status=0))),
        "a driver gave up after fill disk without one message",
    ),
    "claim left": (
        gives_its_study_up,
        replace(WELL, ends=(End(status=75, left=Stored(claim="{}")), End(status=0))),
        "a driver ended with 75 and left its claim: {}",
    ),
    "trial left running": (
        gives_its_study_up,
        replace(WELL, ends=(End(status=130, left=Stored(trials=(FIRST, RUNNING))), End(status=0))),
        "a driver ended with 130 and left trial 1 running",
    ),
    "no end": (drivers_end_well, replace(WELL, ends=WELL.ends[:1]), "the study did not come to its end"),
    "file emptied": (captures_harm_nothing, replace(WELL, harmed=("kept",)), "a capture has changed kept"),
    "job left": (leaves_nothing, replace(WELL, after=Held(jobs=frozenset({"8"}))), "job 8 is left"),
    "process left": (leaves_nothing, replace(WELL, after=Held(processes=frozenset({(5, "7")}))), "process 5 is left"),
    "memory left": (
        leaves_nothing,
        replace(WELL, after=Held(segments=frozenset({"theirs", "ours"}))),
        "shared memory ours is left",
    ),
    "port left": (
        leaves_nothing,
        replace(WELL, after=Held(ports=frozenset({(22, "a"), (6379, "b")}))),
        "port 6379 is left",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_violation_is_told(case):
    """Each invariant tells what was forged to break it."""
    invariant, study, told = FORGED[case]

    found = invariant(study)

    assert any(told in sentence for sentence in found), found


def test_every_invariant_has_a_forgery():
    """No checker goes unchecked."""
    assert {invariant for invariant, _, _ in FORGED.values()} == set(INVARIANTS)


def test_incidents_excuse_another_search():
    """Where two deaths made an incident of a trial the search knows something else from there on, and may differ."""
    study = replace(stored(replace(FIRST, status="incident", value=None), SECOND), undisturbed=(outcome(FIRST),))

    assert ends_as_undisturbed(study) == []
