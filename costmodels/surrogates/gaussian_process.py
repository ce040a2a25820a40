"""Gaussian process with a linear part, its posterior moments, and joint draws over many points.

    y(x) = amplitude * m(x / length_scale) + sum_j b_j(x) w_j + noise

m has an anisotropic Matern kernel of smoothness 5/2. The columns b_j are given in units of their standard deviations,
so each weight w_j is standard normal. Examples are a common offset and the slopes of uncertain constants. The first
`num_scaled` columns are multiplied by one more hyperparameter, `scale`, which tells how far their deviations can be
trusted. Each observation has a noise variance of its own on top of one that all share.

Hyperparameters are the most probable ones under weak log-normal priors, so two or three observations cannot make the
process certain (Rasmussen and Williams 2006, sections 2.2, 2.7 and 5.4). A draw is a function, consistent over all
points. Draws use pathwise conditioning (Wilson et al. 2020, "Efficiently sampling functions from Gaussian process
posteriors"): a random-Fourier-feature draw of the prior plus the exact update by the data. Their cost is linear in the
number of points.

Letters: t observations, n points, d features, k linear columns, M draws.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular
from threadpoolctl import ThreadpoolController

from costmodels.surrogates.marginal_likelihood import MarginalLikelihood, maximize_posterior
from hardware.arrays import FloatArray, NarrowArray

NUM_FOURIER_FEATURES = 512
CHUNK = 512
"""Number of points drawn at once, so that intermediate arrays stay in the cache."""
SMOOTHNESS = 2.5
"""Parameter nu of the Matern kernel. Functions are twice differentiable, as log times are in log sizes."""

BOUNDS = {"amplitude": (0.005, 3.0), "length_scale": (0.05, 100.0), "noise": (0.001, 1.0), "scale": (0.05, 20.0)}


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperPrior:
    """Prior of the hyperparameters: medians of independent log-normal distributions.

    Attributes:
        amplitude: Standard deviation of the Matern part.
        length_scale: Distance over which the Matern part decorrelates; one for all features, or one per feature [d].
        noise: Standard deviation of the noise that all observations share.
        scale: Factor of the scaled linear columns.
        spread: Standard deviation of the logarithm of every hyperparameter.
    """

    amplitude: float = 0.3
    length_scale: float | tuple[float, ...] = 3.0
    noise: float = 0.02
    scale: float = 1.0
    spread: float = 0.6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Points:
    """Inputs of the process.

    Attributes:
        features: Columns of the Matern part [n, d].
        linear: Columns of the linear part, in units of their standard deviations [n, k].
        own_variance: Variance of each point's independent residual beyond the noise that all share [n].
    """

    features: FloatArray
    linear: FloatArray
    own_variance: FloatArray

    @classmethod
    def alike(cls, *, features: FloatArray, linear: FloatArray) -> Points:
        """Return points whose independent residuals are the shared noise."""
        return cls(features=features, linear=linear, own_variance=np.zeros(len(features)))

    def __len__(self) -> int:
        """Number of points."""
        return len(self.features)

    def take(self, at: NDArray[np.int64] | slice) -> Points:
        """Return the points at these positions."""
        return Points(features=self.features[at], linear=self.linear[at], own_variance=self.own_variance[at])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hyperparameters:
    """Values of the hyperparameters; see `HyperPrior`. `length_scale` has one entry per feature [d]."""

    amplitude: float
    length_scale: FloatArray
    noise: float
    scale: float


@dataclass(frozen=True, kw_only=True, eq=False)
class GaussianProcess:
    """Posterior process, given by its observations and hyperparameters.

    Attributes:
        at: Inputs of the observations [t].
        values: Observed values [t].
        variance: Noise variance of each observation beyond the shared one [t]. It is negative where an observation
            does not have the shared noise.
        hyper: Hyperparameters of the process.
        num_scaled: Number of leading linear columns that `hyper.scale` multiplies.
    """

    at: Points
    values: FloatArray
    variance: FloatArray
    hyper: Hyperparameters
    num_scaled: int

    def draw(
        self, points: Points, num_draws: int, rng: np.random.Generator, *, beside: FloatArray | None = None
    ) -> NDArray[np.float32]:
        """Return joint draws of the noise-free process at `points` [M, n].

        Args:
            points: Inputs to draw at [n].
            num_draws: Number of draws M.
            rng: Source of random numbers.
            beside: Draws of another additive quantity at the observations [M, t]. Each draw is then conditioned on
                `values - beside`.
        """
        hyper, num_features = self.hyper, self.at.features.shape[1]
        # random Fourier features of the prior (Rahimi and Recht 2007): the Matern kernel's spectral density is a
        # multivariate t distribution with 2 nu degrees of freedom
        chi_square = rng.chisquare(2 * SMOOTHNESS, NUM_FOURIER_FEATURES)
        frequencies = rng.standard_normal((num_features, NUM_FOURIER_FEATURES)) / np.sqrt(chi_square / (2 * SMOOTHNESS))
        phases = rng.uniform(0, 2 * np.pi, NUM_FOURIER_FEATURES)
        weights = rng.standard_normal((NUM_FOURIER_FEATURES, num_draws)) * (
            hyper.amplitude * np.sqrt(2 / NUM_FOURIER_FEATURES)
        )
        coefficients = rng.standard_normal((self.at.linear.shape[1], num_draws))
        noises = np.sqrt(self._noise_variance())[:, None] * rng.standard_normal((len(self.values), num_draws))
        # single precision halves the memory traffic of the many points; 512 features err by more than its rounding
        narrow = [array.astype(np.float32) for array in (frequencies, phases, weights)]

        def smooth_prior(where: NarrowArray) -> NarrowArray:
            angles = where @ narrow[0]
            angles += narrow[1]
            return np.asarray(np.cos(angles, out=angles) @ narrow[2])

        at = (self.at.features / hyper.length_scale).astype(np.float32)
        update = np.zeros((0, num_draws), dtype=np.float32)
        if len(self.values):
            # pathwise conditioning: weights of the update that moves this prior draw onto the noisy observations
            seen = self.values[:, None] if beside is None else self.values[:, None] - beside.T
            seen = seen - smooth_prior(at) - self._linear(self.at) @ coefficients - noises
            exact = cho_solve((self._factor, True), seen)
            # the update of the linear part is one of its weights, that of the Matern part a kernel expansion
            coefficients += self._linear(self.at).T @ exact
            update = (hyper.amplitude**2 * exact).astype(np.float32)
        linear = coefficients.astype(np.float32)
        drawn = np.empty((num_draws, len(points)), dtype=np.float32)
        for start in range(0, len(points), CHUNK):
            some = points.take(slice(start, start + CHUNK))
            features = (some.features / hyper.length_scale).astype(np.float32)
            values = smooth_prior(features)
            values += self._linear(some).astype(np.float32) @ linear
            if len(update):
                values += _matern(features, at) @ update
            drawn[:, start : start + CHUNK] = values.T
        return drawn

    def mean(self, points: Points) -> FloatArray:
        """Return the posterior mean of the noise-free process at `points` [n]."""
        if not len(self.values):
            return np.zeros(len(points))
        # Rasmussen and Williams 2006, equation 2.25; the linear part of the covariance sums to one weight per column
        weights = cho_solve((self._factor, True), self.values)
        mean = self._linear(points) @ (self._linear(self.at).T @ weights)
        scale, smooth = self.hyper.length_scale, self.hyper.amplitude**2 * weights
        at = self.at.features / scale
        for start in range(0, len(points), CHUNK):
            some = slice(start, start + CHUNK)
            mean[some] += _matern(points.features[some] / scale, at) @ smooth
        return np.asarray(mean)

    def mean_and_deviation(self, points: Points) -> tuple[FloatArray, FloatArray]:
        """Return the posterior mean and standard deviation of the noise-free process at `points`, each [n]."""
        variance = self.hyper.amplitude**2 + np.sum(self._linear(points) ** 2, axis=1)
        if not len(self.values):
            return np.zeros(len(points)), np.sqrt(variance)
        factor = self._factor
        # Rasmussen and Williams 2006, equations 2.25 and 2.26
        weights = cho_solve((factor, True), self.values)
        mean = np.empty(len(points))
        for start in range(0, len(points), CHUNK):
            some = slice(start, start + CHUNK)
            cross = self._between(points.take(some), self.at)
            mean[some] = cross @ weights
            half = solve_triangular(factor, cross.T, lower=True)
            variance[some] -= np.sum(half**2, axis=0)
        return mean, np.sqrt(np.maximum(variance, 0.0))

    def mean_and_covariance(self, points: Points) -> tuple[FloatArray, FloatArray]:
        """Return the posterior mean [n] and covariance [n, n] of the noise-free process at a few `points`."""
        covariance = self._between(points, points)
        if not len(self.values):
            return np.zeros(len(points)), covariance
        factor = self._factor
        cross = self._between(points, self.at)
        half = solve_triangular(factor, cross.T, lower=True)
        return cross @ cho_solve((factor, True), self.values), covariance - half.T @ half

    def take(self, part: NDArray[np.int64]) -> GaussianProcess:
        """Return the process with some of its observations only, under the same hyperparameters."""
        return replace(self, at=self.at.take(part), values=self.values[part], variance=self.variance[part])

    def with_more(self, at: Points, values: FloatArray, variance: FloatArray) -> GaussianProcess:
        """Return the process with more observations [m], whose noise variance [m] includes the shared one."""
        return replace(
            self,
            at=join_points(self.at, at),
            values=np.concatenate([self.values, values]),
            variance=np.concatenate([self.variance, variance - self.hyper.noise**2]),
        )

    def log_likelihood(self) -> float:
        """Return the log marginal likelihood of the observations (Rasmussen and Williams 2006, equation 2.30)."""
        if not len(self.values):
            return 0.0
        factor = self._factor
        whitened = solve_triangular(factor, self.values, lower=True)
        return float(
            -0.5 * whitened @ whitened - np.log(np.diag(factor)).sum() - 0.5 * len(self.values) * np.log(2 * np.pi)
        )

    def left_out_errors(self, part: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
        """Return cross-validation errors of the observations and their standard deviations, each [t].

        Each part of the observations is predicted from all others. No refit is needed: the errors of a part follow from
        its block of the inverse covariance (Rasmussen and Williams 2006, section 5.4.2, generalised from one
        observation to several).

        Args:
            part: Label of the part that each observation belongs to [t].
        """
        # for a part P: errors = (K^-1)_PP^-1 (K^-1 y)_P, with covariance (K^-1)_PP^-1
        inverse = cho_solve((self._factor, True), np.eye(len(self.values)))
        weights = inverse @ self.values
        if len(np.unique(part)) == len(part):
            variance = 1.0 / np.diag(inverse)
            return variance * weights, np.sqrt(variance)
        errors, deviations = np.empty(len(self.values)), np.empty(len(self.values))
        for index in np.unique(part):
            of_part = np.flatnonzero(part == index)
            covariance = np.linalg.inv(inverse[np.ix_(of_part, of_part)])
            errors[of_part] = covariance @ weights[of_part]
            deviations[of_part] = np.sqrt(np.diag(covariance))
        return errors, deviations

    def _noise_variance(self) -> FloatArray:
        return self.hyper.noise**2 + self.variance

    @cached_property
    def _factor(self) -> FloatArray:
        """Lower Cholesky factor of the observations' covariance [t, t]."""
        with one_thread():
            return np.asarray(cholesky(self._between(self.at, self.at) + np.diag(self._noise_variance()), lower=True))

    def _linear(self, points: Points) -> FloatArray:
        scales = np.ones(points.linear.shape[1])
        scales[: self.num_scaled] = self.hyper.scale
        return points.linear * scales

    def _between(self, left: Points, right: Points) -> FloatArray:
        """Return the prior covariance of the noise-free process between two sets of points [n, m]."""
        scale = self.hyper.length_scale
        smooth = self.hyper.amplitude**2 * _matern(left.features / scale, right.features / scale)
        return np.asarray(smooth + self._linear(left) @ self._linear(right).T)


def one_thread() -> AbstractContextManager[object]:
    """Limit linear algebra to one thread.

    On small matrices, waiting for a second one costs more than it saves; on a busy machine, so it does on large ones.
    """
    limit: AbstractContextManager[object] = _controller().limit(limits=1)
    return limit


@cache
def _controller() -> ThreadpoolController:
    """Find the linear algebra libraries once, since the search takes many milliseconds."""
    return ThreadpoolController()


def join_points(left: Points, right: Points) -> Points:
    """Concatenate two sets of points."""
    return Points(
        features=np.concatenate([left.features, right.features]),
        linear=np.concatenate([left.linear, right.linear]),
        own_variance=np.concatenate([left.own_variance, right.own_variance]),
    )


def _matern(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """Return the Matern 5/2 correlation of rows [n, d] and [t, d], in their own precision [n, t]."""
    # with s^2 = 5 |l - r|^2 this is (1 + s + s^2 / 3) exp(-s), computed in place: the arrays are the largest of a draw
    squared = -2.0 * left @ right.T
    squared += (left**2).sum(axis=1)[:, None]
    squared += (right**2).sum(axis=1)
    np.maximum(squared, 0.0, out=squared)
    squared *= 5.0
    distance = np.sqrt(squared)
    squared /= 3.0
    squared += distance
    squared += 1.0
    np.negative(distance, out=distance)
    squared *= np.exp(distance, out=distance)
    return np.asarray(squared)


def fit(
    at: Points,
    values: FloatArray,
    *,
    prior: HyperPrior,
    variance: FloatArray | None = None,
    num_scaled: int = 0,
    min_to_learn: int = 3,
) -> GaussianProcess:
    """Fit the hyperparameters to `values` [t] and return the process.

    Args:
        at: Inputs of the observations [t].
        values: Observed values [t].
        prior: Prior of the hyperparameters.
        variance: Noise variance of each observation beyond its residual's [t]; zero if left out.
        num_scaled: Number of leading linear columns whose scale is a hyperparameter.
        min_to_learn: Fewest observations to fit to; with fewer, the hyperparameters are the prior's medians.
    """
    variance = at.own_variance if variance is None else at.own_variance + variance
    num_features = at.features.shape[1]
    # log-normal priors and bounds hold for the logarithms, in the order amplitude, length scales, noise, scale
    median = np.log(
        [prior.amplitude, *np.broadcast_to(prior.length_scale, num_features), prior.noise, prior.scale], dtype=float
    )
    theta = median
    if len(values) >= min_to_learn:
        names = ("amplitude", *["length_scale"] * num_features, "noise", "scale")
        lower, upper = np.log([BOUNDS[name] for name in names]).T
        likelihood = MarginalLikelihood(
            features=at.features, linear=at.linear, values=values, variance=variance, num_scaled=num_scaled
        )
        with one_thread():
            theta = maximize_posterior(likelihood, median=median, spread=prior.spread, lower=lower, upper=upper)
    amplitude, *length_scale, noise, scale = np.exp(theta).tolist()
    hyper = Hyperparameters(amplitude=amplitude, length_scale=np.array(length_scale), noise=noise, scale=scale)
    return GaussianProcess(at=at, values=values, variance=variance, hyper=hyper, num_scaled=num_scaled)
