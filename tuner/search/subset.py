"""Subset of many trials that the surrogates learn from: a Gaussian process costs the cube of its observations.

Surrogates learn from all candidates up to MAX_OBSERVATIONS. Of more, they take half of that number from the fastest,
among which the best must be told apart. The other half is spread over the space, so that the surrogates see errors
wherever some were measured: each next one is the farthest from all that were chosen before (Gonzalez 1985, Clustering
to minimize the maximum intercluster distance). Of failures, which have no time, a quarter of that number is spread over
the space. The step time of a measured candidate is known whether or not it is in the subset.

Letters: n candidates, d features, t measured candidates.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from hardware.arrays import FloatArray, IntArray
from tuner.search.observations import Observations

MAX_OBSERVATIONS = 256
"""Number of measured candidates that a surrogate learns from: it takes two seconds to learn from them and draw
60,000."""

MAX_FAILURES = MAX_OBSERVATIONS // 4
"""Number of candidates that ran out of memory, that crashed, and that were cut off; so many of each."""


def select_subset(observations: Observations, features: FloatArray) -> Observations:
    """Return the observations that the surrogates learn from; the same object where there are few.

    Args:
        observations: Observations of the study.
        features: Features of the candidates [n, d].
    """
    if observations.num_ended <= MAX_OBSERVATIONS:
        return observations
    at = _select_measured(observations, features)
    kept = set(observations.measured[at].tolist())
    limited = _select_failed(observations.limits_s, features)  # failures have no time, so they are spread alone
    return replace(
        observations,
        measured=observations.measured[at],
        log_step_s=observations.log_step_s[at],
        variance=observations.variance[at],
        num_completed=observations.num_completed[at],
        limits_s={position: limit_s for position, limit_s in observations.limits_s.items() if position in limited},
        peaks_bytes={position: peak for position, peak in observations.peaks_bytes.items() if position in kept},
        misfits=_select_failed(observations.misfits, features),
        crashed=_select_failed(observations.crashed, features),
    )


def _select_measured(observations: Observations, features: FloatArray) -> IntArray:
    """Return the rows of the measured candidates to learn from, in their order [at most MAX_OBSERVATIONS]."""
    count = len(observations.measured)
    if count <= MAX_OBSERVATIONS:
        return np.arange(count)
    # half exploits: the best is told apart among the fastest; the other half covers the space
    fastest = np.argsort(observations.log_step_s, kind="stable")[: MAX_OBSERVATIONS // 2]
    return np.sort(_choose_spread(features[observations.measured], fastest, MAX_OBSERVATIONS))


def _select_failed(failed: Collection[int], features: FloatArray) -> frozenset[int]:
    """Return at most MAX_FAILURES of these candidates."""
    positions = np.array(sorted(failed), dtype=np.int64)
    if len(positions) <= MAX_FAILURES:
        return frozenset(positions.tolist())
    return frozenset(positions[_choose_spread(features[positions], np.zeros(1, dtype=np.int64), MAX_FAILURES)].tolist())


def _choose_spread(features: FloatArray, first: IntArray, count: int) -> IntArray:
    """Return `first` and further rows of `features` [t, d], each the farthest from those before it [count]."""
    chosen = first.tolist()
    nearest = np.min([_squared_distances(features, features[at]) for at in chosen], axis=0)
    # Gonzalez 1985: the next row is the farthest from its nearest chosen one
    while len(chosen) < count:
        chosen.append(int(np.argmax(nearest)))
        np.minimum(nearest, _squared_distances(features, features[chosen[-1]]), out=nearest)
    return np.array(chosen, dtype=np.int64)


def _squared_distances(features: FloatArray, point: FloatArray) -> FloatArray:
    """Return the squared distances of rows [t, d] from a point [d] -> [t]."""
    return np.asarray(((features - point) ** 2).sum(axis=1))
