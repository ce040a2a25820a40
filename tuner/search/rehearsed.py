"""What rehearsals tell a search: candidates that the framework refuses, and the memory that others need.

A rehearsal runs a candidate's own program without a device (tuner/rehearsal). It is no trial: it measures no step, and
counts against no budget. A refused candidate is not tried. The memory of an accepted one is nearly known: the bytes of
its tensors, and what the device adds to them. Trials of rehearsed candidates that report a peak tell the error of that.

    log(needed) = log(rehearsed) + offset + own

The offset is common to all candidates and has a normal prior; `own` is each candidate's, and the variance of it an
inverse gamma prior (Gelman et al. 2013, Bayesian Data Analysis, sections 2.5 and 2.6, one parameter after the other).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

SHARED_ERROR = 0.02
"""Standard deviation of the log factor by which all rehearsed needs err, before any trial: what the device adds is a
constant of the runtime's profile (assumed)."""

OWN_ERROR = 0.02
"""Standard deviation of the log of one candidate's need around that, before any trial (assumed)."""

OWN_WEIGHT = 4.0
"""Trials that the prior of `OWN_ERROR` counts for (assumed)."""

MOST_REFUSED = 20
"""Number of refused candidates, or half of all where these are fewer, from which on refusals are ignored while none was
accepted: a rehearsal that refuses everything says something of itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """Answers of rehearsals, by the positions of candidates.

    Attributes:
        refused: Candidates that the framework refused.
        accepted: Candidates that it accepted.
        needed_bytes: Memory that accepted candidates need, of those whose memory is known [bytes].
    """

    refused: frozenset[int] = frozenset()
    accepted: frozenset[int] = frozenset()
    needed_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedError:
    """Error of rehearsed memory, as far as trials have told it.

    Attributes:
        offset: Expected log factor of true over rehearsed need.
        deviation: Standard deviation of that of one candidate, around the offset.
        trials: Number of trials that told it.
    """

    offset: float = 0.0
    deviation: float = math.hypot(SHARED_ERROR, OWN_ERROR)
    trials: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """What rehearsals told at one moment of a search.

    Attributes:
        refused: Candidates that the framework refused, while refusals are believed.
        accepted: Candidates that it accepted.
        too_large: Accepted candidates that need more than the device has more likely than not.
        log_needed: Expected log of the memory that accepted candidates need, in bytes.
        deviation: Standard deviation of each of these.
    """

    refused: frozenset[int] = frozenset()
    accepted: frozenset[int] = frozenset()
    too_large: frozenset[int] = frozenset()
    log_needed: Mapping[int, float] = field(default_factory=dict)
    deviation: float = 0.0

    @property
    def ruled_out(self) -> frozenset[int]:
        """Candidates that are not tried."""
        return self.refused | self.too_large

    @property
    def key(self) -> tuple[object, ...]:
        """Key that is equal for equal answers."""
        return self.refused, self.accepted, tuple(sorted(self.log_needed.items())), self.deviation


NOTHING_REHEARSED = Rehearsed()
"""What is told without rehearsals."""


def believes_refusals(told: Told, ran: Collection[int], num_candidates: int) -> bool:
    """Return whether refusals count: no refused candidate ran, and not everything was refused.

    Args:
        told: Answers of rehearsals.
        ran: Candidates that ran in a trial.
        num_candidates: Number of candidates of the search.
    """
    few = len(told.refused) < min(MOST_REFUSED, num_candidates / 2)
    return not told.refused.intersection(ran) and (few or bool(told.accepted))


def memory_error(log_ratios: Sequence[float]) -> NeedError:
    """Return the error of rehearsed memory after some trials.

    Args:
        log_ratios: Logs of measured over rehearsed need, one for each trial.
    """
    count = len(log_ratios)
    # the offset, with the prior's own error as the error of each ratio
    shrunk = OWN_ERROR**2 / SHARED_ERROR**2
    offset = sum(log_ratios) / (count + shrunk)
    squares = sum((ratio - offset) ** 2 for ratio in log_ratios)
    own = (OWN_WEIGHT * OWN_ERROR**2 + squares) / (OWN_WEIGHT + count)
    return NeedError(offset=offset, deviation=math.sqrt(own + own / (count + shrunk)), trials=count)


def after_trials(
    told: Told,
    *,
    ran: Collection[int],
    measured_bytes: Mapping[int, float],
    capacity_bytes: Mapping[int, float],
    num_candidates: int,
) -> Rehearsed:
    """Return what rehearsals tell after the trials of a study.

    Args:
        told: Answers of rehearsals.
        ran: Candidates that ran in a trial.
        measured_bytes: Memory that candidates needed, of those whose trials measured it [bytes].
        capacity_bytes: Memory of the devices of each candidate with a rehearsed need [bytes].
        num_candidates: Number of candidates of the search.
    """
    both = sorted(told.needed_bytes.keys() & measured_bytes.keys())
    error = memory_error([math.log(measured_bytes[at] / told.needed_bytes[at]) for at in both])
    log_needed = {at: math.log(size) + error.offset for at, size in told.needed_bytes.items() if size > 0}
    return Rehearsed(
        refused=told.refused if believes_refusals(told, ran, num_candidates) else frozenset(),
        accepted=told.accepted,
        too_large=frozenset(at for at, log in log_needed.items() if log > math.log(capacity_bytes[at])),
        log_needed=log_needed,
        deviation=error.deviation,
    )
