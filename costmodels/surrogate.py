"""A Gaussian process on log(measured / predicted) step time, and joint draws of it over every candidate.

The step-level surrogate of the tuner. Letters: t trials, n candidates, d features, M draws.

Hyperparameters are found by marginal likelihood (scikit-learn) with weak log-normal priors, so that two or three trials
don't talk the process into certainty. Draws are functions, consistent over all candidates: they come by pathwise
conditioning (Wilson et al. 2020, "Efficiently sampling functions from Gaussian process posteriors"): a
random-Fourier-feature draw of the prior plus the exact update by the data. The cost is linear in n.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from threadpoolctl import threadpool_limits

FloatArray = NDArray[np.float64]

Objective = Callable[[FloatArray], tuple[float, FloatArray]]
"""Negative log marginal likelihood and its gradient, as scikit-learn hands them to an optimizer."""

NUM_FOURIER_FEATURES = 512
CHUNK = 8192
SMOOTHNESS = 2.5
"""nu of the Matern kernel: twice differentiable, as times are in log sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SurrogatePrior:
    """What is believed before any trial, as medians of log-normal priors on the hyperparameters.

    Attributes:
        offset: Standard deviation of the error that all candidates share; it changes no ranking.
        amplitude: Standard deviation of the error that differs between candidates.
        length_scale: Distance in feature space over which that error forgets itself.
        noise: Standard deviation of one measurement.
        spread: Standard deviation of the priors in log space.
    """

    offset: float = 0.5
    amplitude: float = 0.5
    length_scale: float = 3.0
    noise: float = 0.02
    spread: float = 0.6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSurrogate:
    """A fitted process.

    Attributes:
        features: Features of the trials [t, d].
        log_ratio: log(measured / predicted) of the trials [t].
        offset: See SurrogatePrior; `amplitude`, `length_scale` [d] and `noise` likewise, as fitted.
        amplitude: See SurrogatePrior.
        length_scale: See SurrogatePrior, one per feature [d].
        noise: See SurrogatePrior.
    """

    features: FloatArray
    log_ratio: FloatArray
    offset: float
    amplitude: float
    length_scale: FloatArray
    noise: float

    def draw(self, features: FloatArray, num_draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Joint draws of the log ratio at `features` [n, d] -> [num_draws, n], without measurement noise."""
        dim = len(self.length_scale)
        # Matern's spectral density is a multivariate t distribution with 2 nu degrees of freedom.
        chi_square = rng.chisquare(2 * SMOOTHNESS, NUM_FOURIER_FEATURES)
        frequencies = rng.standard_normal((dim, NUM_FOURIER_FEATURES)) / np.sqrt(chi_square / (2 * SMOOTHNESS))
        phases = rng.uniform(0, 2 * np.pi, NUM_FOURIER_FEATURES)
        weights = rng.standard_normal((NUM_FOURIER_FEATURES, num_draws)) * (
            self.amplitude * np.sqrt(2 / NUM_FOURIER_FEATURES)
        )
        offsets = self.offset * rng.standard_normal(num_draws)
        noises = self.noise * rng.standard_normal((len(self.log_ratio), num_draws))

        def prior(points: FloatArray) -> NDArray[np.float32]:
            angles = (points / self.length_scale).astype(np.float32) @ frequencies.astype(np.float32)
            angles += phases.astype(np.float32)
            return np.asarray(np.cos(angles, out=angles) @ weights.astype(np.float32) + offsets.astype(np.float32))

        update = np.zeros((0, num_draws))
        if len(self.log_ratio):
            residual = self.log_ratio[:, None] - prior(self.features) - noises
            covariance = self._covariance(self.features) + self.noise**2 * np.eye(len(self.log_ratio))
            update = cho_solve((cholesky(covariance, lower=True), True), residual)
        drawn = np.empty((num_draws, len(features)), dtype=np.float32)
        for start in range(0, len(features), CHUNK):
            points = features[start : start + CHUNK]
            values = prior(points)
            if len(update):
                values += (self._covariance(points) @ update).astype(np.float32)
            drawn[:, start : start + CHUNK] = values.T
        return drawn

    def mean_and_deviation(self, features: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Posterior mean and standard deviation of the log ratio at `features` [n, d], each [n]."""
        variance = np.full(len(features), self.offset**2 + self.amplitude**2)
        if not len(self.log_ratio):
            return np.zeros(len(features)), np.sqrt(variance)
        factor = cholesky(self._covariance(self.features) + self.noise**2 * np.eye(len(self.log_ratio)), lower=True)
        cross = self._covariance(features)
        mean = cross @ cho_solve((factor, True), self.log_ratio)
        explained = np.einsum("ij,ji->i", cross, cho_solve((factor, True), cross.T))
        return mean, np.sqrt(np.maximum(variance - explained, 0.0))

    def _covariance(self, points: FloatArray) -> FloatArray:
        """Covariance of the noise-free process between `points` [m, d] and the trials [m, t]."""
        distance = np.sqrt(5.0) * _distances(points / self.length_scale, self.features / self.length_scale)
        matern = (1 + distance + distance**2 / 3) * np.exp(-distance)
        return np.asarray(self.offset**2 + self.amplitude**2 * matern)


def _distances(left: FloatArray, right: FloatArray) -> FloatArray:
    """Euclidean distances [m, t] of the rows."""
    squared = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * left @ right.T
    return np.asarray(np.sqrt(np.maximum(squared, 0.0)))


def fit_step_surrogate(
    features: FloatArray, log_ratio: FloatArray, prior: SurrogatePrior | None = None
) -> StepSurrogate:
    """The process with the most likely hyperparameters given trials at `features` [t, d].

    With fewer than three trials the prior's medians are kept.
    """
    prior = prior or SurrogatePrior()
    dim = features.shape[1]
    median = np.log([prior.amplitude**2, *[prior.length_scale] * dim, prior.noise**2])
    theta = median
    if len(log_ratio) >= 3:
        theta = _most_likely(features, log_ratio, prior, median)
    return StepSurrogate(
        features=features,
        log_ratio=log_ratio,
        offset=prior.offset,
        amplitude=float(np.exp(theta[0] / 2)),
        length_scale=np.exp(theta[1 : 1 + dim]),
        noise=float(np.exp(theta[-1] / 2)),
    )


def _most_likely(features: FloatArray, log_ratio: FloatArray, prior: SurrogatePrior, median: FloatArray) -> FloatArray:
    """Maximum a posteriori hyperparameters: log(amplitude^2), log(length scales) [d], log(noise^2)."""
    dim = features.shape[1]
    kernel = (
        ConstantKernel(prior.offset**2, constant_value_bounds="fixed")
        + ConstantKernel(prior.amplitude**2, (1e-4, 4.0))
        * Matern(np.full(dim, prior.length_scale), (0.05, 50.0), nu=SMOOTHNESS)
        + WhiteKernel(prior.noise**2, (1e-5, 0.25))
    )
    # a variance is a squared scale, so its logarithm spreads twice as far
    spread = prior.spread * np.array([2.0, *[1.0] * dim, 2.0])

    def optimise(objective: Objective, initial: FloatArray, bounds: FloatArray) -> tuple[FloatArray, float]:
        def penalised(theta: FloatArray) -> tuple[float, FloatArray]:
            value, gradient = objective(theta)
            standardised = (theta - median) / spread
            return value + 0.5 * float(standardised @ standardised), gradient + standardised / spread

        found = minimize(penalised, initial, jac=True, bounds=bounds, method="L-BFGS-B", options={"maxiter": 25})
        return np.asarray(found.x), float(found.fun)

    regressor = GaussianProcessRegressor(kernel, alpha=1e-8, optimizer=optimise)
    # the matrices are small: a second thread costs more in waiting than it brings
    with threadpool_limits(limits=1), warnings.catch_warnings():
        # a hyperparameter at its bound is an answer here, not a failure
        warnings.simplefilter("ignore", ConvergenceWarning)
        regressor.fit(features, log_ratio)
    return np.asarray(regressor.kernel_.theta)
