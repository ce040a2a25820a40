"""Wall clock of a trial by its parts: the queue, the start of the program, its first steps, and the measured steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

from trials.backend import Observation
from tuner.storage.record import TrialRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialParts:
    """Wall clock of a trial by its parts, each None where it is not known [s].

    Attributes:
        queued_s: Time in the queue, which is no part of the trial's own time.
        start_s: Time from the start of the program to its first step: imports, groups of ranks, weights, data.
        warmup_s: Time of compiling and of the steps before the measured ones, in which many programs compile.
        steps_s: Time from the first measured step to the trial's end.
    """

    queued_s: float | None = None
    start_s: float | None = None
    warmup_s: float | None = None
    steps_s: float | None = None


_IN_WORDS = {
    "queued_s": "in the queue",
    "start_s": "to start",
    "warmup_s": "to compile and warm up",
    "steps_s": "in measured steps",
}


def parts_of(observation: Observation | None) -> TrialParts:
    """Return the parts of a trial, as far as its observation has them."""
    if observation is None or observation.taken_from:
        return TrialParts()
    told = dict(observation.conditions)
    before_s, elapsed_s = observation.measured_after_s, observation.elapsed_s
    warmup_s = told["warmup_s"] + told.get("compile_s", 0.0) if "warmup_s" in told else None
    start_s = told.get("start_s")
    if start_s is None and before_s is not None and warmup_s is not None:
        start_s = max(before_s - warmup_s, 0.0)
    return TrialParts(
        queued_s=told.get("queued_s"),
        start_s=start_s,
        warmup_s=warmup_s,
        steps_s=None if before_s is None or elapsed_s is None else max(elapsed_s - before_s, 0.0),
    )


def parts_in_words(records: Sequence[TrialRecord]) -> str:
    """Return a sentence on the medians of the parts of trials that have ended; empty where no part is known."""
    parts = [parts_of(record.observation) for record in records if record.finished]
    told = []
    for field in fields(TrialParts):
        known = [seconds for each in parts if (seconds := getattr(each, field.name)) is not None]
        if known and field.name in _IN_WORDS:
            told.append(f"{statistics.median(known):.3g} s {_IN_WORDS[field.name]}")
    return f"A trial took, each in the median: {', '.join(told)}." if len(told) > 1 else ""
