"""Which of many trials the surrogates learn from: a Gaussian process costs the cube of its observations.

Up to MOST_TOLD candidates all are learned from. Of more, half of so many are the fastest, among which the best is to be
told apart. The other half is spread over the space, so that the surrogates see errors wherever some were measured: each
next one is the farthest from all that were chosen before (Gonzalez 1985, Clustering to minimize the maximum
intercluster distance). Of failures, which have no time, a quarter as many are spread. What a measured candidate takes
is known whether or not it is among them.

Letters: n candidates, d features, t measured ones.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from hardware.arrays import FloatArray, IntArray
from tuner.search.observations import Evidence

MOST_TOLD = 256
"""Measured candidates that a surrogate learns from: as many as it takes two seconds to learn from and draw 60,000."""

MOST_FAILED = MOST_TOLD // 4
"""Candidates that ran out of memory, that crashed, and that were cut off; so many of each."""


def most_telling(evidence: Evidence, features: FloatArray) -> Evidence:
    """The evidence as surrogates see it; the same where it is small.

    Args:
        evidence: What a study knows.
        features: Where the candidates stand for the surrogates [n, d].
    """
    if evidence.num_ended <= MOST_TOLD:
        return evidence
    at = _told(evidence, features)
    kept = set(evidence.measured[at].tolist())
    limited = _some(evidence.limits_s, features)
    return replace(
        evidence,
        measured=evidence.measured[at],
        log_step_s=evidence.log_step_s[at],
        variance=evidence.variance[at],
        num_completed=evidence.num_completed[at],
        limits_s={position: limit_s for position, limit_s in evidence.limits_s.items() if position in limited},
        peaks_bytes={position: peak for position, peak in evidence.peaks_bytes.items() if position in kept},
        misfits=_some(evidence.misfits, features),
        crashed=_some(evidence.crashed, features),
    )


def _told(evidence: Evidence, features: FloatArray) -> IntArray:
    """Which of the measured candidates, in their order [at most MOST_TOLD]."""
    count = len(evidence.measured)
    if count <= MOST_TOLD:
        return np.arange(count)
    fastest = np.argsort(evidence.log_step_s, kind="stable")[: MOST_TOLD // 2]
    return np.sort(_spread(features[evidence.measured], fastest, MOST_TOLD))


def _some(failed: Collection[int], features: FloatArray) -> frozenset[int]:
    """At most MOST_FAILED of these candidates."""
    positions = np.array(sorted(failed), dtype=np.int64)
    if len(positions) <= MOST_FAILED:
        return frozenset(positions.tolist())
    return frozenset(positions[_spread(features[positions], np.zeros(1, dtype=np.int64), MOST_FAILED)].tolist())


def _spread(features: FloatArray, first: IntArray, count: int) -> IntArray:
    """`first` and further rows of `features` [t, d], each the farthest from those before it [count]."""
    chosen = first.tolist()
    nearest = np.min([_squared(features, features[at]) for at in chosen], axis=0)
    while len(chosen) < count:
        chosen.append(int(np.argmax(nearest)))
        np.minimum(nearest, _squared(features, features[chosen[-1]]), out=nearest)
    return np.array(chosen, dtype=np.int64)


def _squared(features: FloatArray, point: FloatArray) -> FloatArray:
    """Squared distances of rows [t, d] from a point [d] -> [t]."""
    return np.asarray(((features - point) ** 2).sum(axis=1))
