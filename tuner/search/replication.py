"""Replication of the fastest candidates, where measured step times are too close to tell apart.

A measured step time has an error, and the fastest of many measured candidates owes its place in part to luck. So when a
search has nothing left to try, it measures again the candidates that may be faster than the best by more than the
tolerance. They take turns with the best, so that slow changes of a machine hit all of them alike.
"""

from __future__ import annotations

import math

import numpy as np

from tuner.search.observations import Observations

NUM_FINALISTS = 3
"""Largest number of candidates that are measured again, the best included."""

DEVIATIONS = 2.0
"""Number of standard deviations of a difference that tell two candidates apart."""


def finalists(observations: Observations, tolerance: float) -> tuple[int, ...]:
    """Return the candidates that are too close to the best, the fastest first; none where the best is clear.

    Args:
        observations: Observations of the study.
        tolerance: Relative gain over the best that is not worth a trial.
    """
    well = np.flatnonzero(observations.num_completed)
    if len(well) < 2:
        return ()
    well = well[np.argsort(observations.log_step_s[well], kind="stable")]
    best, others = well[0], well[1:]
    # a lower bound of the difference of logs below -log(1 + tolerance): the other may be faster by more than that
    behind = observations.log_step_s[others] - observations.log_step_s[best]
    deviation = np.sqrt(observations.variance[others] + observations.variance[best])
    close = others[behind - DEVIATIONS * deviation < -math.log1p(tolerance)]
    return tuple(observations.measured[[best, *close[: NUM_FINALISTS - 1]]].tolist()) if len(close) else ()


def next_replication(observations: Observations, tolerance: float, repeats: int) -> int | None:
    """Return the candidate to measure again next: the finalist with the fewest trials, the fastest of equals.

    Args:
        observations: Observations of the study.
        tolerance: Relative gain over the best that is not worth a trial.
        repeats: Number of trials of each finalist after its first.

    Returns:
        Position of the candidate; None where nothing is close, or the finalists have had their trials.
    """
    having = [
        (observations.num_trials[position], order, position)
        for order, position in enumerate(finalists(observations, tolerance))
    ]
    num_trials, _, position = min(having, default=(0, 0, None))
    return position if num_trials <= repeats else None
