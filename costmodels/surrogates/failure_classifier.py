"""Classifier of failures: the chance that a trial of a candidate fails, after trials that ran and trials that failed.

The cost model gives each candidate odds to fail before it is tried: that its memory does not suffice, or that it is of
a kind that the runtime cannot run. The classifier keeps to these odds as long as few trials have ended, and corrects
them by what the failed ones have in common, whatever the cost model knows of it.

    logit(chance)(x) = a logit(before(x)) + w . SCALE (features(x) - mean)

The weights a and w have independent standard normal priors: scikit-learn's Gaussian-process classifier with a linear
kernel (Rasmussen and Williams 2006, sections 2.1 and 3.4, Laplace's approximation). Imagined trials draw `a` to one.

Letters: n candidates, d features.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from scipy.special import logit

from hardware.arrays import FloatArray, IntArray

SCALE = 2.0
"""Standard deviation of the change of the log odds over a feature's distance of one."""

ANCHORS, ANCHOR_ODDS = 8, 4.0
"""Imagined trials of average candidates that were believed to fail at such log odds, and failed, and of as many that
were believed to run, and ran."""

LEAST_VARIANCE = 1e-12
"""Least variance of log odds, below which rounding could bring it."""

INTERCEPT = 0.01
"""Standard deviation of a change that all log odds share; without one, an average candidate would have no variance."""


def failure_chances(
    before: FloatArray, features: FloatArray, ran: IntArray, failed: IntArray, *, mishap: float
) -> FloatArray:
    """Return the chance that each candidate fails [n], after trials.

    Args:
        before: Chance as the cost model believes it, given the same trials [n].
        features: Features of the candidates; a distance of one is a large change [n, d].
        ran: Positions of candidates that ran.
        failed: Positions of candidates that ran out of memory or crashed.
        mishap: Chance that a trial fails, or runs, against all belief; no belief counts as surer.
    """
    # imported where trials have ended: it takes a second to load
    from sklearn.gaussian_process import GaussianProcessClassifier  # noqa: PLC0415 # see above
    from sklearn.gaussian_process.kernels import DotProduct  # noqa: PLC0415 # see above

    odds = logit(np.clip(before, mishap, 1 - mishap))
    points = np.column_stack([odds, SCALE * (features - features.mean(axis=0))])
    anchors = np.zeros((2 * ANCHORS, points.shape[1]))
    anchors[:, 0] = np.repeat([-ANCHOR_ODDS, ANCHOR_ODDS], ANCHORS)
    told = np.concatenate([points[ran], points[failed], anchors])
    is_failure = np.repeat([False, True, False, True], [len(ran), len(failed), ANCHORS, ANCHORS])
    classifier = GaussianProcessClassifier(DotProduct(INTERCEPT, "fixed"), optimizer=None).fit(told, is_failure)
    of_two = classifier.base_estimator_
    of_two.latent_mean_and_variance = partial(_latent_by_weights, of_two)
    return np.asarray(classifier.predict_proba(points)[:, 1])


def _latent_by_weights(of_two: Any, points: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean and variance of the log odds of points [n], as scikit-learn does by their pairs with trials.

    A linear kernel stands for d + 1 weights. Of these, mean and covariance take a part of the time where there are many
    points (Rasmussen and Williams 2006, section 2.1, with the matrices of their algorithm 3.2).

    Args:
        of_two: Fitted classifier of two classes.
        points: Points [n, d].
    """
    told, asked = (
        np.column_stack([np.full(len(each), INTERCEPT), each]) for each in (of_two.X_train_, np.asarray(points))
    )
    mean = told.T @ (of_two.y_train_ - of_two.pi_)
    settled = np.linalg.solve(of_two.L_, of_two.W_sr_[:, None] * told)
    covariance = np.eye(len(mean)) - settled.T @ settled
    return asked @ mean, np.maximum((asked @ covariance * asked).sum(axis=1), LEAST_VARIANCE)
