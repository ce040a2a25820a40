"""Comparison of a study's best with its reference: what is known of the reference, and how much is gained over it.

A reference that cannot run is compared with nothing: a training on it would never end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from costmodels.job.parallel_config import ParallelConfig
from hardware.rounding import measured, predicted
from trials.backend import Status
from tuner.answers.reference import Reference
from tuner.forecast.candidates import Candidates, predict_candidate
from tuner.search.gain import COVERED, GAIN_DRAWS, KnownGain, gain_in, gain_quantiles
from tuner.search.observations import EXPLORING, observations_of
from tuner.search.step_draws import StepDraws
from tuner.storage.record import TrialRecord
from tuner.subject.problem import Problem

GIB = 2.0**30

LUCK_WORTH_TELLING = 0.03
"""Smallest log ratio of the measured gain to the gain that is reported."""


DrawSteps = Callable[[Sequence[ParallelConfig], int], StepDraws | None]
"""Function that draws the log step times of configurations jointly [M, m]; None where no trial taught them."""


def draw_none(_chosen: Sequence[ParallelConfig], _num_draws: int) -> None:
    """Return None, for studies without trials."""


class Known(StrEnum):
    """State of a reference: measured, predicted or failed."""

    MEASURED = "measured"
    """A trial has measured its steps."""
    CUT_OFF = "cut_off"
    """A trial has measured some of its steps, and was stopped before it had all."""
    PREDICTED = "predicted"
    """No trial has measured it, and it is predicted to fit."""
    FAILED = "failed"
    """It ran out of memory, crashed, or reached the time limit before a step ended."""
    MISFIT = "predicted_not_to_fit"
    """No trial has measured it, and it is predicted not to fit in memory."""


RUNNING = (Known.MEASURED, Known.CUT_OFF, Known.PREDICTED)
"""What must be known of a reference to compare anything with it."""

_FAILED = {
    Status.OUT_OF_MEMORY: "ran out of memory",
    Status.CRASHED: "crashed",
    Status.TIMEOUT: "reached the time limit before a step ended",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Reference of a study, with its state and the gain of the best over it.

    Attributes:
        reference: Reference.
        known: What is known of it.
        reason: Reason why it is not compared with, in words; empty if it is.
        step_time_s: Its measured step time [s]; None if it has none.
        gain: Number of times that the best is as fast; None where nothing is compared.
        interval: Interval that holds the true gain with a probability of 90%; None where that is not known.
        measured_gain: Ratio of both measured step times; None without both.
    """

    reference: Reference
    known: Known
    reason: str = ""
    step_time_s: float | None = None
    gain: float | None = None
    interval: tuple[float, float] | None = None
    measured_gain: float | None = None

    @property
    def runs(self) -> bool:
        """Whether the reference runs, as far as is known."""
        return self.known in RUNNING

    @property
    def not_compared(self) -> str:
        """Sentence on why nothing is compared with the reference; empty if something is."""
        if not self.reason:
            return ""
        named = self.reference.in_words
        return f"{named[0].upper()}{named[1:]} {self.reason}: nothing is compared with it."

    @property
    def basis_in_words(self) -> str:
        """Step time of the reference, or how its step time is known."""
        if self.step_time_s is not None:
            return f"{measured(self.step_time_s)} s"
        return "stopped before it had measured all steps" if self.known is Known.CUT_OFF else "not measured"

    @property
    def gain_in_words(self) -> str:
        """Number of times that the best is as fast as the reference; empty where the two are not compared."""
        if self.gain is None:
            return ""
        return f"{self.gain:.3f}" if self.step_time_s else f"predicted {predicted(self.gain)}"

    @property
    def interval_in_words(self) -> str:
        """Interval of the gain; empty where it is not known."""
        if self.interval is None:
            return ""
        low, high = self.interval
        return f"{low:.3f}x to {high:.3f}x with probability {COVERED:.0%}"

    @property
    def luck_in_words(self) -> str:
        """Ratio of the measured step times, where it is another than the gain; empty where they agree."""
        if self.gain is None or self.measured_gain is None:
            return ""
        if abs(math.log(self.measured_gain / self.gain)) <= LUCK_WORTH_TELLING:
            return ""
        return f"the measured step times alone say {self.measured_gain:.3f}x, part of which is luck"

    def as_json(self) -> dict[str, Any]:
        """Return what is known of the reference, as an object."""
        return {
            "role": self.reference.role,
            "known": self.known.value,
            "reason": self.reason or None,
            "step_time_s": self.step_time_s,
        }


def compared_of(
    problem: Problem,
    reference: Reference | None,
    records: Sequence[TrialRecord],
    best: TrialRecord | None,
    gain: KnownGain | None,
) -> Compared | None:
    """Return the comparison of the best trial with the reference; None without a reference.

    Args:
        problem: Study.
        reference: Reference of the study.
        records: Trials of the study.
        best: Best of them; None before any has completed.
        gain: Gain that the study's driver has kept.
    """
    if reference is None:
        return None
    known, reason = _known_of(problem, reference, records)
    step_time_s = reference.step_time_s(records)
    best_s = best.step_time_s if best is not None else None
    if known not in RUNNING or best is None or not best_s:
        return Compared(reference=reference, known=known, reason=reason, step_time_s=step_time_s)
    measured_gain = step_time_s / best_s if step_time_s else None
    is_of_these = gain is not None and (gain.best, gain.reference) == (best.params, dict(reference.values))
    return Compared(
        reference=reference,
        known=known,
        step_time_s=step_time_s,
        gain=gain.median if gain is not None and is_of_these else measured_gain,
        interval=gain.interval if gain is not None and is_of_these else None,
        measured_gain=measured_gain,
    )


def compared_in(
    problem: Problem,
    reference: Reference | None,
    records: Sequence[TrialRecord],
    best: TrialRecord | None,
    attributes: Mapping[str, Any],
) -> Compared | None:
    """Return the comparison of the best trial of a stored study with these attributes; see `compared_of`."""
    return compared_of(problem, reference, records, best, gain_in(attributes))


def compared_by_prediction(
    problem: Problem,
    reference: Reference | None,
    records: Sequence[TrialRecord],
    candidates: Candidates,
    best: int,
    *,
    draw: DrawSteps = draw_none,
) -> Compared | None:
    """Return the comparison of the candidate at a position, which is expected to be fastest; None without a reference.

    The gain is that of the posterior after the trials where `draw` knows one, and else before any trial.
    """
    if reference is None:
        return None
    known, reason = _known_of(problem, reference, records)
    if known not in RUNNING:
        return Compared(reference=reference, known=known, reason=reason)
    grid = candidates.space.grid
    own = grid.positions().get(tuple(reference.config.values(grid.dimensions).values()))
    if own is None:  # the study's space has changed since it kept its baseline
        step_times_s = [
            predict_candidate(problem, each)["step_time_s"] for each in (reference.config, grid.config(best))
        ]
        return Compared(reference=reference, known=known, gain=step_times_s[0] / step_times_s[1])
    drawn = draw((reference.config, grid.config(best)), GAIN_DRAWS)
    if drawn is None:
        none = observations_of([], lambda _: None)
        at, rng = np.array([own, best], dtype=np.int64), np.random.default_rng(0)
        drawn = problem.subject.prior(grid, None).draw_steps_at(none, at, GAIN_DRAWS, rng)
    low, gain, high = gain_quantiles(drawn.log_step_s[:, 0] - drawn.log_step_s[:, 1])
    return Compared(reference=reference, known=known, gain=gain, interval=(low, high))


def gains(compared: Compared | None) -> dict[str, Any]:
    """Return the gain under the JSON keys of the reference's role; those of the other role are None."""
    found: dict[str, Any] = {}
    for role in ("current", "baseline"):
        own = compared if compared is not None and compared.reference.role == role else None
        found[f"gain_over_{role}"] = own and own.gain
        found[f"gain_over_{role}_interval"] = own and own.interval and list(own.interval)
    found["measured_gain"] = compared and compared.measured_gain
    found["reference"] = compared and compared.as_json()
    return found


def _known_of(problem: Problem, reference: Reference, records: Sequence[TrialRecord]) -> tuple[Known, str]:
    """Return what is known of a reference, and in words why nothing can be compared with it."""
    own = [record for record in records if record.params == reference.values and not record.is_proxy]
    if any(record.step_time_s is not None for record in own):
        return Known.MEASURED, ""
    ended = [record for record in own if record.finished]
    cut_off = [record.observation for record in ended if record.status in EXPLORING]
    if any(observation is not None and observation.step_times_s for observation in cut_off):
        return Known.CUT_OFF, ""
    failed = next((record for record in ended if record.status in _FAILED), None)
    if failed is not None and failed.status is not None:
        return Known.FAILED, f"does not run (it {_FAILED[failed.status]} in trial {failed.number})"
    predicted = predict_candidate(problem, reference.config)
    needed, capacity = predicted["peak_memory_bytes"], predicted["memory_capacity_bytes"]
    if needed > capacity:
        return Known.MISFIT, f"is predicted not to fit in memory ({needed / GIB:.1f} GiB of {capacity / GIB:.1f} GiB)"
    return Known.PREDICTED, ""
