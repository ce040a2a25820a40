"""Measures of the quality of a sequence of trials: trials needed, regret, and the quality of the stop.

Letters: n candidates, t trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hardware.arrays import FloatArray

STOPPED_ON_BEST = 0.02
"""Largest slowdown at which a tried candidate still counts as the best at a stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trials:
    """One run of a sampler on one group.

    Attributes:
        order: Positions of the candidates in the order in which they were tried, without repetition [t].
        num_at_stop: Number of trials after which the sampler would have stopped; None if it never stops by itself.
        sampler_s: Wall time of the sampler itself over all trials [s].
    """

    order: tuple[int, ...]
    num_at_stop: int | None
    sampler_s: float


def trials_to(order: Sequence[int], step_time_s: FloatArray, slowdown: float) -> float:
    """Count the trials until one is at most `slowdown` slower than the fastest; infinite if none is.

    Args:
        order: Positions of the trials [t].
        step_time_s: Step time of each candidate [n], infinite if it fails [s].
        slowdown: Allowed slowdown; 0.05 is 5%.
    """
    good = step_time_s <= (1 + slowdown) * step_time_s.min()
    return next((float(number) for number, position in enumerate(order, start=1) if good[position]), math.inf)


def regret_at(order: Sequence[int], step_time_s: FloatArray, num_trials: int) -> float:
    """Return the slowdown of the best candidate after `num_trials` trials, or after all if there are fewer.

    As long as nothing has been timed, it is the slowdown of the slowest candidate: a user who must train now may have
    to take any configuration that runs.
    """
    # Failed trials cost a trial but offer no configuration to train with.
    timed = [float(step_time_s[position]) for position in order[:num_trials] if math.isfinite(step_time_s[position])]
    slowest = float(step_time_s[np.isfinite(step_time_s)].max())
    return min(timed, default=slowest) / float(step_time_s.min()) - 1


def is_stopped_on_best(trials: Trials, step_time_s: FloatArray) -> float | None:
    """Return whether a candidate within STOPPED_ON_BEST of the best was tried before the stop; None without a stop."""
    if trials.num_at_stop is None:
        return None
    return float(trials_to(trials.order, step_time_s, STOPPED_ON_BEST) <= trials.num_at_stop)


def share_explored(trials: Trials, step_time_s: FloatArray, *, of_feasible: bool) -> float | None:
    """Return the share of all candidates, or of the feasible ones, tried before the stop; None without a stop."""
    if trials.num_at_stop is None:
        return None
    counted = np.isfinite(step_time_s) if of_feasible else np.ones(len(step_time_s), dtype=np.bool_)
    return float(counted[list(trials.order[: trials.num_at_stop])].sum() / counted.sum())


def quantile(values: Sequence[float], share: float) -> float:
    """Compute a quantile of values that may be infinite, interpolated between neighbours as in numpy."""
    ordered = sorted(values)
    # Equal neighbours return at once: the difference of two infinities would be NaN.
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low if low == high else low + (place - math.floor(place)) * (high - low)
