"""Which of the fastest candidates are too close to call, and which of them to measure once more.

A measured step time has an error, and the fastest of many measured ones owes its place in part to luck. So when a
search has nothing left to try, the candidates that may yet be faster than the best, by more than the tolerance, are
measured again, in turn with the best: what changes slowly on a machine hits all of them alike.
"""

from __future__ import annotations

import math

import numpy as np

from tuner.search.observations import Evidence

NUM_FINALISTS = 3
"""Candidates that are measured again at most, the best included."""

DEVIATIONS = 2.0
"""Standard deviations of a difference that tell two candidates apart."""


def finalists(evidence: Evidence, tolerance: float) -> tuple[int, ...]:
    """The candidates of a close call, the fastest first; none where the fastest is clear.

    Args:
        evidence: What a study knows.
        tolerance: A candidate that is faster than the best by less is none.
    """
    well = np.flatnonzero(evidence.num_completed)
    if len(well) < 2:
        return ()
    well = well[np.argsort(evidence.log_step_s[well], kind="stable")]
    best, others = well[0], well[1:]
    behind = evidence.log_step_s[others] - evidence.log_step_s[best]
    deviation = np.sqrt(evidence.variance[others] + evidence.variance[best])
    close = others[behind - DEVIATIONS * deviation < -math.log1p(tolerance)]
    return tuple(evidence.measured[[best, *close[: NUM_FINALISTS - 1]]].tolist()) if len(close) else ()


def to_repeat(evidence: Evidence, tolerance: float, repeats: int) -> int | None:
    """The candidate to measure again next: of the finalists the one with the fewest trials, the fastest of equals.

    Args:
        evidence: What a study knows.
        tolerance: See `finalists`.
        repeats: Trials of each after its first.

    Returns:
        The candidate's position; None where nothing is close, or the finalists have had their trials.
    """
    having = [
        (evidence.num_trials[position], order, position)
        for order, position in enumerate(finalists(evidence, tolerance))
    ]
    num_trials, _, position = min(having, default=(0, 0, None))
    return position if num_trials <= repeats else None
