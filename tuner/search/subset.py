"""Subset of many trials that the surrogates learn from: a Gaussian process costs the cube of its observations.

Surrogates learn from all candidates up to MOST_TOLD. Of more, they take half of that number from the fastest, among
which the best must be told apart. The other half is spread over the space, so that the surrogates see errors wherever
some were measured: each next one is the farthest from all that were chosen before (Gonzalez 1985, Clustering to
minimize the maximum intercluster distance). Of failures, which have no time, a quarter of that number is spread over
the space. The step time of a measured candidate is known whether or not it is in the subset.

Letters: n candidates, d features, t measured candidates.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from hardware.arrays import FloatArray, IntArray
from tuner.search.observations import Evidence

MOST_TOLD = 256
"""Number of measured candidates that a surrogate learns from: it takes two seconds to learn from them and draw
60,000."""

MOST_FAILED = MOST_TOLD // 4
"""Number of candidates that ran out of memory, that crashed, and that were cut off; so many of each."""


def most_telling(evidence: Evidence, features: FloatArray) -> Evidence:
    """Return the observations that the surrogates learn from; the same object where there are few.

    Args:
        evidence: Observations of the study.
        features: Features of the candidates [n, d].
    """
    if evidence.num_ended <= MOST_TOLD:
        return evidence
    at = _select_measured(evidence, features)
    kept = set(evidence.measured[at].tolist())
    limited = _select_failed(evidence.limits_s, features)  # failures have no time, so they are spread alone
    return replace(
        evidence,
        measured=evidence.measured[at],
        log_step_s=evidence.log_step_s[at],
        variance=evidence.variance[at],
        num_completed=evidence.num_completed[at],
        limits_s={position: limit_s for position, limit_s in evidence.limits_s.items() if position in limited},
        peaks_bytes={position: peak for position, peak in evidence.peaks_bytes.items() if position in kept},
        misfits=_select_failed(evidence.misfits, features),
        crashed=_select_failed(evidence.crashed, features),
    )


def _select_measured(evidence: Evidence, features: FloatArray) -> IntArray:
    """Return the rows of the measured candidates to learn from, in their order [at most MOST_TOLD]."""
    count = len(evidence.measured)
    if count <= MOST_TOLD:
        return np.arange(count)
    # half exploits: the best is told apart among the fastest; the other half covers the space
    fastest = np.argsort(evidence.log_step_s, kind="stable")[: MOST_TOLD // 2]
    return np.sort(_choose_spread(features[evidence.measured], fastest, MOST_TOLD))


def _select_failed(failed: Collection[int], features: FloatArray) -> frozenset[int]:
    """Return at most MOST_FAILED of these candidates."""
    positions = np.array(sorted(failed), dtype=np.int64)
    if len(positions) <= MOST_FAILED:
        return frozenset(positions.tolist())
    return frozenset(positions[_choose_spread(features[positions], np.zeros(1, dtype=np.int64), MOST_FAILED)].tolist())


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
