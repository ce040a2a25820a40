"""Censored observations: a value is known to lie above, or below, an edge, unless there was a mishap.

    P(seen | y) = mishap + (1 - mishap) Phi(side (y - edge) / blur)

`side` is +1 for "at least the edge" and -1 for "at most". A mishap produces the same observation whatever the value is:
a crash that was mistaken for lack of memory, or a file system that stalled. Expectation propagation replaces each bound
by the Gaussian observation that changes the process most nearly as the bound does (Minka 2001; Rasmussen and Williams
2006, section 3.6). The result is again a Gaussian process.

Letters: t observations, b bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.special import log_ndtr

from costmodels.surrogates.gaussian_process import GaussianProcess, Points
from hardware.arrays import FloatArray

MAX_SWEEPS = 60
DAMPING = 0.6
TOLERANCE = 1e-3
VAGUE = 1e6
"""Variance of the Gaussian observation that replaces a bound without information."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bounds:
    """Censored observations.

    Attributes:
        at: Inputs of the observations [b].
        edge: Known bound of each value [b].
        side: Direction of each bound: +1 if the value is at least the edge, -1 if at most [b].
        mishap: Probability of the same observation whatever the value is [b].
        blur: Standard deviation of each edge [b].
    """

    at: Points
    edge: FloatArray
    side: FloatArray
    mishap: FloatArray
    blur: FloatArray

    def __len__(self) -> int:
        """Number of bounds."""
        return len(self.edge)


def condition_on_bounds(process: GaussianProcess, bounds: Bounds) -> tuple[GaussianProcess, float]:
    """Return the process conditioned on `bounds` too, and the log probability that it gave them before."""
    if not len(bounds):
        return process, 0.0
    mean, covariance = process.mean_and_covariance(bounds.at)
    covariance = covariance + 1e-9 * np.eye(len(mean))
    # the Gaussian observations that replace the bounds, in natural parameters: precision and precision times mean
    precision, shift = np.zeros(len(mean)), np.zeros(len(mean))
    for _ in range(MAX_SWEEPS):
        posterior_mean, posterior_covariance = _condition(mean, covariance, precision, shift)
        variance = np.diag(posterior_covariance)
        # cavity: the process without the bound itself (Rasmussen and Williams 2006, equation 3.56)
        cavity_precision = np.maximum(1.0 / variance - precision, 1e-9)
        cavity_mean = (posterior_mean / variance - shift) / cavity_precision
        matched_mean, matched_variance, _ = _match_moments(cavity_mean, 1.0 / cavity_precision, bounds)
        new_precision = np.maximum(1.0 / matched_variance - cavity_precision, 1.0 / VAGUE)
        new_shift = matched_mean * (new_precision + cavity_precision) - cavity_mean * cavity_precision
        # change relative to the deviations, since a bound may move the mean and leave the variance
        total = new_precision + cavity_precision
        change = np.max(np.abs([(new_precision - precision) / total, (new_shift - shift) / np.sqrt(total)]))
        precision += DAMPING * (new_precision - precision)
        shift += DAMPING * (new_shift - shift)
        if change < TOLERANCE:
            break
    log_evidence = _log_evidence(mean, covariance, precision, shift, bounds)
    return process.with_more(bounds.at, shift / precision, 1.0 / precision), log_evidence


def _condition(
    mean: FloatArray, covariance: FloatArray, precision: FloatArray, shift: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return mean [b] and covariance [b, b] after Gaussian observations given by natural parameters."""
    # B = I + S^(1/2) K S^(1/2) is well conditioned where S has zeros (Rasmussen and Williams 2006, equation 3.68)
    root = np.sqrt(precision)
    inner = cho_factor(np.eye(len(mean)) + root[:, None] * covariance * root, lower=True)
    weighed = root[:, None] * covariance
    posterior = covariance - weighed.T @ cho_solve(inner, weighed)
    return mean + posterior @ (shift - precision * mean), posterior


def _match_moments(mean: FloatArray, variance: FloatArray, bounds: Bounds) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return mean and variance of Gaussian values conditioned on their bounds, and the bounds' log probability [b]."""
    total = variance + bounds.blur**2
    distance = bounds.side * (mean - bounds.edge) / np.sqrt(total)
    log_above = log_ndtr(distance)
    log_probability = np.logaddexp(np.log(bounds.mishap), np.log1p(-bounds.mishap) + log_above)
    # probability that the bound is true and no mishap; then the ratio of the normal density to its distribution
    is_true = np.exp(np.log1p(-bounds.mishap) + log_above - log_probability)
    ratio = np.exp(-0.5 * distance**2 - 0.5 * np.log(2 * np.pi) - log_above)
    step = variance / np.sqrt(total) * ratio
    # moments of a normal variable above its bound (Rasmussen and Williams 2006, equation 3.85), mixed with a mishap
    true_mean = mean + bounds.side * step
    true_variance = variance - variance**2 / total * ratio * (ratio + distance)
    matched_mean = is_true * true_mean + (1 - is_true) * mean
    spread = is_true * (true_variance + true_mean**2) + (1 - is_true) * (variance + mean**2)
    return matched_mean, np.maximum(spread - matched_mean**2, 1e-9), log_probability


def _log_evidence(
    mean: FloatArray, covariance: FloatArray, precision: FloatArray, shift: FloatArray, bounds: Bounds
) -> float:
    """Return the log probability of all bounds by expectation propagation.

    Source: Rasmussen and Williams 2006, equation 3.65.
    """
    posterior_mean, posterior_covariance = _condition(mean, covariance, precision, shift)
    variance = np.diag(posterior_covariance)
    cavity_variance = 1.0 / np.maximum(1.0 / variance - precision, 1e-9)
    cavity_mean = cavity_variance * (posterior_mean / variance - shift)
    log_probability = _match_moments(cavity_mean, cavity_variance, bounds)[2]
    seen, seen_variance = shift / precision, 1.0 / precision
    # the constant of each Gaussian makes it as probable under the cavity as its bound is
    gap = (cavity_mean - seen) ** 2 / (cavity_variance + seen_variance)
    constants = log_probability + 0.5 * (gap + np.log(cavity_variance + seen_variance))
    factor = cho_factor(covariance + np.diag(seen_variance), lower=True)
    difference = seen - mean
    joint = -0.5 * difference @ cho_solve(factor, difference) - np.log(np.diag(factor[0])).sum()
    return float(constants.sum() + joint)
