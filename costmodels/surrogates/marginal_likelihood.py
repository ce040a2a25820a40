"""Hyperparameters of a Gaussian process with a linear part, fitted by scikit-learn.

scikit-learn evaluates the log marginal likelihood and its gradient (Rasmussen and Williams 2006, equations 2.30 and
5.9). The log-normal priors of the hyperparameters are added inside the optimizer that it calls, so the result is the
maximum a posteriori. Importing scikit-learn takes about a second, so `gaussian_process.fit` imports this module only
when there is something to fit.

Letters: t observations, d features, k linear columns, p = d + 3 hyperparameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Hyperparameter, Kernel, Matern, WhiteKernel

from hardware.arrays import FloatArray

SMOOTHNESS = 2.5
"""Parameter nu of the Matern kernel; `gaussian_process` evaluates the same kernel."""

MAX_ITERATIONS = 40

Range = tuple[float, float]


class FeatureMatern(Matern):  # type: ignore[misc] # scikit-learn publishes no types
    """Matern kernel that sees the leading columns only, one for each of its length scales."""

    def __call__(self, X: FloatArray, Y: FloatArray | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803 # scikit-learn's names
        """Return the covariance of the rows, and its gradient if asked."""
        count = np.size(self.length_scale)  # scikit-learn unpacks a single one
        return super().__call__(X[:, :count], None if Y is None else Y[:, :count], eval_gradient)


class LinearColumns(Kernel):  # type: ignore[misc] # scikit-learn publishes no types
    """Covariance of a linear model with standard normal weights, some of whose columns share a learned scale.

        k(x, x') = scale^2 s(x) . s(x') + f(x) . f(x')

    Attributes:
        first: Position of the first linear column among the columns of X.
        num_scaled: Number of leading linear columns s(x) that the scale multiplies; the others are f(x).
        scale: Standard deviation of the weights of the scaled columns.
        scale_bounds: Lowest and highest scale.
    """

    def __init__(self, first: int, num_scaled: int, scale: float, scale_bounds: Range) -> None:
        self.first = first
        self.num_scaled = num_scaled
        self.scale = scale
        self.scale_bounds = scale_bounds

    @property
    def hyperparameter_scale(self) -> Hyperparameter:
        """Hyperparameter `scale`, as scikit-learn declares one."""
        return Hyperparameter("scale", "numeric", self.scale_bounds)

    def __call__(self, X: FloatArray, Y: FloatArray | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803 # scikit-learn's names
        """Return the covariance of the rows, and its gradient by log(scale) if asked."""
        right = X if Y is None else Y
        end = self.first + self.num_scaled
        scaled = self.scale**2 * X[:, self.first : end] @ right[:, self.first : end].T
        covariance = scaled + X[:, end:] @ right[:, end:].T
        return (covariance, 2.0 * scaled[:, :, None]) if eval_gradient else covariance

    def diag(self, X: FloatArray) -> FloatArray:  # noqa: N803 # scikit-learn's names
        """Return the variance of each row."""
        end = self.first + self.num_scaled
        squared = self.scale**2 * np.sum(X[:, self.first : end] ** 2, axis=1)
        return np.asarray(squared + np.sum(X[:, end:] ** 2, axis=1))

    def is_stationary(self) -> bool:
        """Return False: the covariance depends on more than the difference of two rows."""
        return False


def maximize_posterior(
    features: FloatArray,
    linear: FloatArray,
    values: FloatArray,
    *,
    variance: FloatArray,
    num_scaled: int,
    median: FloatArray,
    spread: float,
    bounds_of: Mapping[str, Range],
) -> FloatArray:
    """Return the most probable log hyperparameters [p]: amplitude, length scales [d], noise, scale.

    Args:
        features: Columns of the Matern part [t, d].
        linear: Columns of the linear part, in units of their standard deviations [t, k].
        values: Observed values [t].
        variance: Noise variance of each observation beyond the shared one [t].
        num_scaled: Number of leading linear columns that the scale multiplies.
        median: Logarithms of the prior medians [p], in the order of the result.
        spread: Standard deviation of every log hyperparameter under its prior.
        bounds_of: Lowest and highest value of `amplitude`, `length_scale`, `noise` and `scale`.
    """
    amplitude, *length_scale, noise, scale = np.exp(median)
    squared = {name: (low**2, high**2) for name, (low, high) in bounds_of.items()}
    smooth = ConstantKernel(amplitude**2, squared["amplitude"])
    if length_scale:  # without features all points are equal
        smooth *= FeatureMatern(np.array(length_scale), bounds_of["length_scale"], nu=SMOOTHNESS)
    # this order makes theta the order of the result
    linear_part = LinearColumns(features.shape[1], num_scaled, scale, bounds_of["scale"])
    kernel = smooth + WhiteKernel(noise**2, squared["noise"]) + linear_part
    # scikit-learn's theta holds the logarithms of variances where ours holds those of standard deviations
    per_deviation = np.ones(len(median))
    per_deviation[[0, -2]] = 2.0

    def optimizer(negative_log_likelihood: Callable[..., Any], _: FloatArray, bounds: FloatArray) -> tuple[Any, float]:
        """Minimise the negative log posterior; scikit-learn calls this with its likelihood and bounds."""

        def objective(log_hyper: FloatArray) -> tuple[float, FloatArray]:
            value, gradient = negative_log_likelihood(per_deviation * log_hyper, eval_gradient=True)
            # the negative logarithm of the normal priors of the log hyperparameters, up to a constant
            standardised = (log_hyper - median) / spread
            return value + 0.5 * standardised @ standardised, per_deviation * gradient + standardised / spread

        limits = bounds / per_deviation[:, None]
        found = minimize(
            objective,
            np.clip(median, limits[:, 0], limits[:, 1]),
            jac=True,
            bounds=limits,
            method="L-BFGS-B",
            options={"maxiter": MAX_ITERATIONS},
        )
        return per_deviation * found.x, found.fun

    regressor = GaussianProcessRegressor(kernel, alpha=variance, optimizer=optimizer)
    with warnings.catch_warnings():
        # a hyperparameter at its bound is expected of few observations; the caller's prior holds the others
        warnings.simplefilter("ignore", ConvergenceWarning)
        regressor.fit(np.concatenate([features, linear], axis=1), values)
    return np.asarray(regressor.kernel_.theta / per_deviation)
