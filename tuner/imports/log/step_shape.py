"""Shape of a series of step times: whether one number can stand for them.

Two shapes are told. Steps of two kinds, such as steps with and without a checkpoint, form two groups that lie far
apart for their widths. Drifting steps grow or shrink from the first to the last. The limits keep false alarms rare
on normal, skewed, heavy-tailed and correlated noise (test_step_shape.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hardware.arrays import FloatArray

FEWEST = 12
"""Smallest number of steps whose shape is looked at."""

FEWEST_OF_KIND = 3
"""Smallest number of steps of a kind."""

LEAST_SHARE = 0.04
"""Smallest share of the steps that a kind has, unless its steps come at regular intervals."""

APART, APART_OF_FEW = 4.5, 40.0
"""Smallest distance of the means of two kinds, over the root mean square of their deviations (Ashman et al. 1994, who
ask for 2 where the groups are known): APART + APART_OF_FEW / t for t steps. The halves of a uniform series are 3.5
apart whatever t, and the best split of a short series is further apart by chance."""

LEAST_CHANGE = 0.05
"""Smallest relative difference of two kinds, and smallest drift, that is told."""

CLEAR = 10.0
"""Drift over the standard deviation of the steps about it that no correlated noise reaches."""

SURE = 4.5
"""Smallest deviation of Kendall's tau from zero that is no chance, in standard deviations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoKinds:
    """Two kinds of steps.

    Attributes:
        usual_s: Median of the more frequent kind [s].
        other_s: Median of the other kind [s].
        usual: Number of steps of the more frequent kind.
        other: Number of steps of the other kind.
        every: Number of steps from one of the other kind to the next, where that is always the same; else None.
        since: Number of the step from which on all steps are of one kind, where the series changes once; else None.
        begins_usual: Whether the first step is of the more frequent kind.
    """

    usual_s: float
    other_s: float
    usual: int
    other: int
    every: int | None
    since: int | None
    begins_usual: bool = True

    @property
    def in_words(self) -> str:
        """Both kinds, in words."""
        usual, other = f"{self.usual:,} take {self.usual_s:.4g} s", f"{self.other:,} take {self.other_s:.4g} s"
        if self.since is not None:
            first, last = (usual, other) if self.begins_usual else (other, usual)
            return f"the steps change once: the first {first}, and the other {last}"
        every = f", at every interval of {self.every:,} steps" if self.every is not None else ""
        return f"the steps are of two kinds: {usual} and {other}{every}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """Drift of a series of steps.

    Attributes:
        first_s: Step time at the beginning, on the line through the series [s].
        last_s: Step time at its end, on the same line [s].
    """

    first_s: float
    last_s: float

    @property
    def in_words(self) -> str:
        """Drift, in words."""
        change = self.last_s / self.first_s - 1
        return f"the steps drift from {self.first_s:.4g} s to {self.last_s:.4g} s ({change:+.0%})"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """Shape of a series of steps.

    Attributes:
        mean_s: Mean of the steps, by which a training takes its time [s].
        two_kinds: Two kinds of steps; None if they are of one kind.
        drift: Drift of the steps; None without any.
    """

    mean_s: float
    two_kinds: TwoKinds | None
    drift: Drift | None

    @property
    def in_words(self) -> tuple[str, ...]:
        """Reasons why one number does not stand for the steps; none if it does."""
        return tuple(found.in_words for found in (self.two_kinds, self.drift) if found is not None)

    def as_json(self) -> dict[str, Any]:
        """Return the shape as an object."""
        return asdict(self)


def shape_of(times_s: Sequence[float]) -> StepShape:
    """Return the shape of step times in their order, at least one."""
    logs = np.log(np.asarray(times_s, dtype=np.float64))
    two_kinds = drift = None
    if len(logs) >= FEWEST:
        is_other = _split(logs)
        two_kinds = None if is_other is None else _describe(logs, is_other)
        if is_other is not None:  # what is left within the kinds may drift
            logs = np.where(is_other, logs - np.median(logs[is_other]), logs - np.median(logs[~is_other]))
            logs = logs + np.log(float(np.median(times_s)))
        drift = _find_drift(logs) if two_kinds is None or two_kinds.since is None else None
    return StepShape(mean_s=float(np.mean(times_s)), two_kinds=two_kinds, drift=drift)


def _split(logs: FloatArray) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Return which steps are of the rarer kind [t]; None if all are of one kind."""
    order = np.sort(logs)
    count = np.arange(1, len(logs))
    # the split with the least squares within both groups, by sums over the sorted series
    left, left_square = np.cumsum(order)[:-1], np.cumsum(order**2)[:-1]
    right, right_square = order.sum() - left, (order**2).sum() - left_square
    within = left_square - left**2 / count + right_square - right**2 / (len(logs) - count)
    allowed = (count >= FEWEST_OF_KIND) & (len(logs) - count >= FEWEST_OF_KIND)
    at = int(np.argmin(np.where(allowed, within, np.inf)))
    is_upper = logs > (order[at] + order[at + 1]) / 2
    is_other = is_upper if is_upper.sum() * 2 <= len(logs) else ~is_upper
    groups = logs[is_other], logs[~is_other]
    if min(map(len, groups)) < FEWEST_OF_KIND:
        return None
    distance = abs(float(groups[0].mean() - groups[1].mean()))
    width = float(np.sqrt((groups[0].var(ddof=1) + groups[1].var(ddof=1)) / 2))
    if distance < np.log1p(LEAST_CHANGE) or distance < (APART + APART_OF_FEW / len(logs)) * width:
        return None
    is_rare = is_other.sum() < LEAST_SHARE * len(logs)
    return None if is_rare and _interval(is_other) is None else is_other


def _describe(logs: FloatArray, is_other: np.ndarray[Any, np.dtype[np.bool_]]) -> TwoKinds:
    changes = np.flatnonzero(np.diff(is_other))
    return TwoKinds(
        usual_s=float(np.exp(np.median(logs[~is_other]))),
        other_s=float(np.exp(np.median(logs[is_other]))),
        usual=int((~is_other).sum()),
        other=int(is_other.sum()),
        every=_interval(is_other),
        since=int(changes[0]) + 2 if len(changes) == 1 else None,
        begins_usual=not is_other[0],
    )


def _interval(is_other: np.ndarray[Any, np.dtype[np.bool_]]) -> int | None:
    """Return the number of steps from one of the other kind to the next, if it is the same for all and above one."""
    intervals = set(np.diff(np.flatnonzero(is_other)).tolist())
    return intervals.pop() if len(intervals) == 1 and intervals != {1} else None


def _find_drift(logs: FloatArray) -> Drift | None:
    """Return the drift of a series, if it is no chance."""
    at = np.arange(len(logs))
    slope, middle, tau = _trend(logs)
    if abs(slope) * (len(logs) - 1) < np.log1p(LEAST_CHANGE):
        return None
    # steps that resemble the one before tell less: so many independent ones tell as much (Bayley and Hammersley 1946)
    rest = logs - middle - slope * at
    ranks = np.argsort(np.argsort(rest)).astype(np.float64)
    alike = float(np.clip(np.corrcoef(ranks[:-1], ranks[1:])[0, 1], 0.0, 0.99)) if np.ptp(rest) else 0.0
    independent = max(len(logs) * (1 - alike) / (1 + alike), 2.0)
    deviation = np.sqrt(2 * (2 * independent + 5) / (9 * independent * (independent - 1)))
    is_likely = abs(tau) >= SURE * deviation
    if not is_likely and abs(slope) * (len(logs) - 1) < CLEAR * rest.std():
        return None
    first, last = np.exp([middle, middle + slope * (len(logs) - 1)]).tolist()
    return Drift(first_s=first, last_s=last)


def _trend(logs: FloatArray) -> tuple[float, float, float]:
    """Return slope and intercept of the line through a series, and Kendall's tau-b of the series and its positions.

    The line is that of Theil and Sen: the median slope of all pairs, through the medians. Written out, because loading
    scipy.stats takes longer than all else that `meshtune init` does.
    """
    first, second = np.triu_indices(len(logs), 1)
    rise = logs[second] - logs[first]
    slope = float(np.median(rise / (second - first)))
    middle = float(np.median(logs)) - slope * (len(logs) - 1) / 2
    untied = float(np.count_nonzero(rise))
    tau = float(np.sign(rise).sum()) / np.sqrt(untied * len(rise)) if untied else 0.0
    return slope, middle, tau
