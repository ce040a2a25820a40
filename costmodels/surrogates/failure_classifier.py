"""Classifier of failures: the chance that a trial of a candidate fails, from the trials that ran and those that failed.

The cost model gives each candidate a chance to fail before it is tried: that its memory does not suffice, or that it is
of a kind that the runtime cannot run. The classifier keeps to these odds as long as few trials ended, and corrects them
by what the failed ones have in common, whatever the cost model knows of it.

    logit(chance)(x) = a logit(before(x)) + w . (features(x) - mean)

The weights have independent standard normal priors: scikit-learn's Gaussian-process classifier with a linear kernel
(Rasmussen and Williams 2006, sections 2.1 and 3.4, Laplace's approximation). ANCHORS draw `a` towards one.

Letters: n candidates, d features.
"""

from __future__ import annotations

import numpy as np
from scipy.special import logit

from hardware.arrays import FloatArray, IntArray

ANCHORS = 2
"""Imagined trials of average candidates that surely fail, all of which failed, and of as many that surely fit and ran.
More of them left out fewer failures of a source that had not been seen no better (see docs/decisions.md)."""


def failure_chances(
    before: FloatArray, features: FloatArray, ran: IntArray, failed: IntArray, *, doubt: float
) -> FloatArray:
    """Return the chance that each candidate fails [n], after trials.

    Args:
        before: Chance as the cost model believes it, given the same trials [n].
        features: Features of the candidates; a distance of one is a large change [n, d].
        ran: Positions of candidates that ran.
        failed: Positions of candidates that ran out of memory or crashed.
        doubt: Least chance that anything fails, or runs, against all belief.
    """
    # imported where trials have ended: it takes a second to load
    from sklearn.gaussian_process import GaussianProcessClassifier  # noqa: PLC0415 # see above
    from sklearn.gaussian_process.kernels import DotProduct  # noqa: PLC0415 # see above

    odds = logit(np.clip(before, doubt, 1 - doubt))
    points = np.column_stack([odds, features - features.mean(axis=0)])
    anchors = np.zeros((2 * ANCHORS, points.shape[1]))
    anchors[:, 0] = np.repeat([-1.0, 1.0], ANCHORS) * logit(1 - doubt)
    told = np.concatenate([points[ran], points[failed], anchors])
    is_failure = np.repeat([False, True, False, True], [len(ran), len(failed), ANCHORS, ANCHORS])
    classifier = GaussianProcessClassifier(DotProduct(0.0, "fixed"), optimizer=None).fit(told, is_failure)
    return np.asarray(classifier.predict_proba(points)[:, 1])
