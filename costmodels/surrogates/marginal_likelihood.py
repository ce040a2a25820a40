"""Most probable hyperparameters of a Gaussian process with a linear part.

The log marginal likelihood and its gradient are those of Rasmussen and Williams 2006, equations 2.30 and 5.9. The
log-normal priors of the hyperparameters are added, so the result is the maximum a posteriori. tests/unit/costmodels/
surrogates compares likelihood and gradient with scikit-learn's.

Letters: t observations, d features, k linear columns, p = d + 3 hyperparameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve
from scipy.optimize import minimize

from hardware.arrays import FloatArray

MAX_ITERATIONS = 40

IMPOSSIBLE = 1e25
"""Negative log likelihood of hyperparameters under which the covariance is singular to rounding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MarginalLikelihood:
    """Log marginal likelihood of observations, as a function of p log hyperparameters.

    Their order is amplitude, length scales [d], noise, scale.

    Attributes:
        features: Columns of the Matern part [t, d].
        linear: Columns of the linear part, in units of their standard deviations [t, k].
        values: Observed values [t].
        variance: Noise variance of each observation beyond the shared one [t].
        num_scaled: Number of leading linear columns that the scale multiplies.
    """

    features: FloatArray
    linear: FloatArray
    values: FloatArray
    variance: FloatArray
    num_scaled: int

    @cached_property
    def _squared(self) -> FloatArray:
        """Squared differences of each feature between observations [d, t t]."""
        columns = self.features.T
        squared = (columns[:, :, None] - columns[:, None, :]) ** 2
        return np.asarray(squared.reshape(len(columns), len(self.values) ** 2))

    @cached_property
    def _scaled(self) -> FloatArray:
        part = self.linear[:, : self.num_scaled]
        return np.asarray(part @ part.T)

    @cached_property
    def _fixed(self) -> FloatArray:
        part = self.linear[:, self.num_scaled :]
        return np.asarray(part @ part.T + np.diag(self.variance))

    def negative(self, log_hyper: FloatArray) -> tuple[float, FloatArray]:
        """Return the negative log marginal likelihood and its gradient by the log hyperparameters [p]."""
        count = len(self.values)
        amplitude, noise, scale = np.exp(2 * log_hyper[[0, -2, -1]])
        weights = np.exp(-2 * log_hyper[1:-2])
        # Matern 5/2 of s = sqrt(5) r: (1 + s + s^2 / 3) exp(-s)
        distance = np.sqrt(5.0 * (weights @ self._squared)).reshape(count, count)
        decay = np.exp(-distance)
        smooth = amplitude * (1.0 + distance + distance**2 / 3.0) * decay
        covariance = smooth + scale * self._scaled + self._fixed
        covariance[np.diag_indices(count)] += noise
        try:
            factor = cho_factor(covariance, lower=True)
        except LinAlgError:
            return IMPOSSIBLE, np.zeros(len(log_hyper))
        inverse = cho_solve(factor, np.eye(count))
        explained = inverse @ self.values
        log_determinant = 2.0 * np.log(np.diag(factor[0])).sum()
        value = 0.5 * (self.values @ explained + log_determinant + count * np.log(2 * np.pi))
        # d value / d theta = tr((K^-1 - a a^T) dK / d theta) / 2 with a = K^-1 y
        slope = 0.5 * (inverse - np.outer(explained, explained))
        by_distance = (slope * (amplitude * 5.0 / 3.0) * (1.0 + distance) * decay).ravel()
        gradient = np.concatenate(
            [
                [2.0 * np.sum(slope * smooth)],
                weights * (self._squared @ by_distance),
                [2.0 * noise * np.trace(slope), 2.0 * scale * np.sum(slope * self._scaled)],
            ]
        )
        return float(value), gradient


def maximize_posterior(
    likelihood: MarginalLikelihood, *, median: FloatArray, spread: float, lower: FloatArray, upper: FloatArray
) -> FloatArray:
    """Return the most probable log hyperparameters [p].

    Args:
        likelihood: Likelihood of the observations.
        median: Logarithms of the prior medians [p].
        spread: Standard deviation of every log hyperparameter under its prior.
        lower: Logarithms of the lowest values [p].
        upper: Logarithms of the highest values [p].
    """

    def objective(log_hyper: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = likelihood.negative(log_hyper)
        # the negative logarithm of the normal priors of the log hyperparameters, up to a constant
        standardised = (log_hyper - median) / spread
        return value + 0.5 * float(standardised @ standardised), gradient + standardised / spread

    found = minimize(
        objective,
        np.clip(median, lower, upper),
        jac=True,
        bounds=np.stack([lower, upper], axis=1),
        method="L-BFGS-B",
        options={"maxiter": MAX_ITERATIONS},
    )
    return np.asarray(found.x)
