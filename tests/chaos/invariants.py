"""What must hold after a study was disturbed: pure functions that tell what does not, a sentence each.

They judge the ledger that trials keep, the rows of the storage, what the drivers said, and what is left on the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.chaos.ledger import Entry
from tests.chaos.left_behind import NOTHING_HELD, Held
from tests.chaos.stored import EMPTY, Stored, StoredTrial

CLOSE = 1e-9
"""Relative; a step time goes through a log line and a float column, and comes out as it was."""

WENT_WELL = 0

IN_ORDER = (75, 130)
"""Statuses of drivers that were told to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How one driver ended.

    Attributes:
        status: Its exit status; a signal that killed it is negative.
        allowed: Statuses that the faults of its life excuse, beside 0.
        faults: Their names.
        told: Its stderr.
        left: What the storage held when it had ended.
    """

    status: int
    allowed: frozenset[int] = frozenset()
    faults: tuple[str, ...] = ()
    told: str = ""
    left: Stored = EMPTY


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbed:
    """All that is known of one study from outside.

    Attributes:
        budget: Its trials.
        ledger: What its trials wrote; empty where they run no program.
        moments: What the storage held after each fault, in their order.
        stored: What it holds at the end.
        answer: What the last driver printed.
        ends: Of all its drivers.
        undisturbed: What the same study recorded that nobody disturbed; None where trials run side by side, or are
            too few of a kind to be compared.
        before: What the machine held before.
        used: What the study's processes were seen to hold.
        after: What the machine holds after.
        harmed: The user's files that captures beside it have changed.
    """

    budget: int = 0
    ledger: tuple[Entry, ...] = ()
    moments: tuple[Stored, ...] = ()
    stored: Stored = EMPTY
    answer: Mapping[str, Any] | None = None
    ends: tuple[End, ...] = ()
    undisturbed: tuple[tuple[str, str, float | None], ...] | None = None
    before: Held = NOTHING_HELD
    used: Held = NOTHING_HELD
    after: Held = NOTHING_HELD
    harmed: tuple[str, ...] = ()


def spends_its_budget(study: Disturbed) -> list[str]:
    """Every trial has ended with a status, and there are as many as the budget has."""
    tried = [trial for trial in study.stored.trials if trial.configuration]
    told = [f"{len(tried)} trials were tried, of a budget of {study.budget}"] if len(tried) != study.budget else []
    told += [f"trial {t.number} is {t.state}" for t in study.stored.trials if not t.has_ended]
    return told + [f"trial {t.number} has ended without a status" for t in tried if t.has_ended and not t.status]


def records_each_once(study: Disturbed) -> list[str]:
    """Each trial that has ended is recorded once: its end, its row for later studies, and its configuration.

    An incident says nothing of its configuration, which may be tried again.
    """
    numbers = Counter(trial.number for trial in study.stored.trials)
    rows = Counter(study.stored.kept)
    configurations = Counter(trial.configuration for trial in study.stored.trials if _tells(trial))
    ended = {trial.number for trial in study.stored.trials if trial.has_ended and trial.configuration}
    unknown = {entry.trial for entry in study.ledger} - numbers.keys()
    return [
        *(f"trial {number} is recorded {count} times" for number, count in numbers.items() if count > 1),
        *(f"{count} rows are kept of trial {number}" for number, count in rows.items() if count > 1),
        *(f"no row is kept of trial {number}" for number in sorted(ended - rows.keys())),
        *(f"a row is kept of trial {number}, which has not ended" for number in sorted(rows.keys() - ended)),
        *(f"{count} trials are of {text}" for text, count in configurations.items() if count > 1),
        *(f"trial {number} ran and is not recorded" for number in sorted(unknown)),
    ]


def _tells(trial: StoredTrial) -> bool:
    return bool(trial.configuration) and trial.status not in {"incident", "cancelled"}


def loses_nothing(study: Disturbed) -> list[str]:
    """What was recorded as ended, or as measured, at any moment stays as it was."""
    told = []
    for before, after in pairwise((*study.moments, study.stored)):
        later = {trial.number: trial for trial in after.trials}
        for trial in before.trials:
            now = later.get(trial.number)
            if now is None:
                told.append(f"trial {trial.number} was lost")
            elif trial.has_ended and now != trial:
                told.append(f"trial {trial.number} had ended as {trial} and is {now}")
            elif trial.status and (now.status, now.reason) != (trial.status, trial.reason):
                told.append(f"trial {trial.number} was {trial.status} and is {now.status}")
            elif trial.configuration != now.configuration:
                told.append(f"trial {trial.number} was of {trial.configuration} and is of {now.configuration}")
    return told


def runs_none_after_its_end(study: Disturbed) -> list[str]:
    """No trial begins after its end is recorded, nor another one with its configuration."""
    ended = {trial.number: trial for trial in study.stored.trials if trial.ended_s is not None}
    by_configuration = {trial.configuration: trial for trial in ended.values() if _tells(trial)}
    told = []
    for entry in study.ledger:
        trial = ended.get(entry.trial) or by_configuration.get(entry.configuration)
        if entry.event == "begin" and trial is not None and entry.time_s > (trial.ended_s or 0.0):
            told.append(f"trial {trial.number} ran again {entry.time_s - (trial.ended_s or 0.0):.2f} s after its end")
    return told


def records_what_was_measured(study: Disturbed) -> list[str]:
    """A trial's recorded step time and configuration are those that its own program told."""
    ends = {entry.trial: entry for entry in study.ledger if entry.event == "end"}
    begins = {entry.trial: entry for entry in study.ledger if entry.event == "begin"}
    told = []
    for trial in study.stored.trials if study.ledger else ():
        begun, end = begins.get(trial.number), ends.get(trial.number)
        if begun is not None and begun.configuration != trial.configuration:
            told.append(f"trial {trial.number} ran {begun.configuration} and is recorded as {trial.configuration}")
        if trial.value is None:
            continue
        if end is None or end.step_s is None:
            told.append(f"trial {trial.number} is recorded with {trial.value} s and never came to its end")
        elif abs(trial.value - end.step_s) > CLOSE * end.step_s:
            told.append(f"trial {trial.number} took {end.step_s} s and is recorded with {trial.value} s")
    return told


def answers_with_the_best(study: Disturbed) -> list[str]:
    """The answer is the fastest of the trials that completed, and its configuration is that trial's."""
    completed = [trial for trial in study.stored.trials if trial.value is not None]
    if study.answer is None:
        return ["no driver has answered"]
    told_s, told = study.answer["step_time_s"], study.answer["best"]
    if not completed:
        return [] if told_s is None else [f"the answer is {told_s} s, and no trial completed"]
    best = min(completed, key=lambda trial: (trial.value or 0.0, trial.number))
    if told_s is None or best.value is None or abs(told_s - best.value) > CLOSE * best.value:
        return [f"the answer is {told_s} s, and trial {best.number} took {best.value} s"]
    fastest = {trial.configuration for trial in completed if trial.value == best.value}
    if not any(_is_of(told, text) for text in fastest):
        return [f"the answer is {told}, and the fastest trial was of {best.configuration}"]
    return []


def _is_of(told: Mapping[str, Any] | None, configuration: str) -> bool:
    values = dict(pair.split("=") for pair in configuration.split())
    return told is not None and all(str(told[name]) == value for name, value in values.items() if name in told)


def ends_as_undisturbed(study: Disturbed) -> list[str]:
    """The same trials in the same order with the same results, and so the same best, as a study without faults.

    From the first trial on that two deaths made an incident, the studies know different things and may differ.
    """
    if study.undisturbed is None:
        return []
    for trial, wanted in zip(study.stored.trials, study.undisturbed, strict=False):
        if trial.status == "incident" and wanted[1] != "incident":
            return []
        if outcome(trial) != wanted:
            return [f"trial {trial.number} is {outcome(trial)}, and undisturbed {wanted}"]
    return []


def outcome(trial: StoredTrial) -> tuple[str, str, float | None]:
    """What two runs of one study have in common: configuration, status, step time."""
    return trial.configuration, trial.status, trial.value


def tells_of_memory(study: Disturbed) -> list[str]:
    """A trial whose memory was taken away is told as out of memory or as an incident, or was measured after all."""
    limited = {entry.trial for entry in study.ledger if entry.event == "limited"}
    return [
        f"trial {trial.number} lacked memory and is told as {trial.status}: {trial.reason}"
        for trial in study.stored.trials
        if trial.number in limited and trial.status not in {"out_of_memory", "incident", "ok"}
    ]


def drivers_end_well(study: Disturbed) -> list[str]:
    """A driver ends with 0 or as its faults excuse, without a traceback, and where it gives up with one message."""
    told = []
    for end in study.ends:
        after = f"after {', '.join(end.faults) or 'no fault'}"
        if end.status != WENT_WELL and end.status not in end.allowed:
            told.append(f"a driver ended with {end.status} {after}: {end.told[-1500:]}")
        elif "Traceback" in end.told:
            told.append(f"a driver printed a traceback {after}: {end.told[-1500:]}")
        elif end.status == 2 and end.told.count("meshtune: ") != 1:
            told.append(f"a driver gave up {after} without one message: {end.told[-1500:]}")
    if not study.ends or study.ends[-1].status != WENT_WELL:
        told.append("the study did not come to its end")
    return told


def gives_its_study_up(study: Disturbed) -> list[str]:
    """A driver that ends because it was told to leaves no claim and no running trial."""
    ends = [end for end in study.ends if end.status in IN_ORDER]
    return [
        *(f"a driver ended with {end.status} and left its claim: {end.left.claim}" for end in ends if end.left.claim),
        *(
            f"a driver ended with {end.status} and left trial {trial.number} running"
            for end in ends
            for trial in end.left.trials
            if trial.state == "RUNNING"
        ),
    ]


def leaves_nothing(study: Disturbed) -> list[str]:
    """No process, job, shared memory or port that the study held is held after it."""
    after, used, before = study.after, study.used, study.before
    return [
        *(f"process {process} is left" for process, _ in sorted(after.processes)),
        *(f"job {number} is left" for number in sorted(after.jobs)),
        *(f"shared memory {name} is left" for name in sorted(after.segments & used.segments - before.segments)),
        *(f"port {port} is left" for port, _ in sorted(after.ports & used.ports - before.ports)),
    ]


def captures_harm_nothing(study: Disturbed) -> list[str]:
    """A script that is captured beside a study changes no file of the user's, and starts nothing."""
    return [f"a capture has changed {name}" for name in study.harmed]


INVARIANTS: tuple[Callable[[Disturbed], list[str]], ...] = (
    spends_its_budget,
    records_each_once,
    loses_nothing,
    runs_none_after_its_end,
    records_what_was_measured,
    answers_with_the_best,
    ends_as_undisturbed,
    tells_of_memory,
    drivers_end_well,
    gives_its_study_up,
    leaves_nothing,
    captures_harm_nothing,
)


def violations(study: Disturbed, invariants: Sequence[Callable[[Disturbed], list[str]]] = INVARIANTS) -> list[str]:
    """All that does not hold, each with the name of its invariant."""
    return [f"{invariant.__name__}: {sentence}" for invariant in invariants for sentence in invariant(study)]
