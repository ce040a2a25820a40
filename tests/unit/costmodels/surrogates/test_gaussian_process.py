"""scikit-learn's process is the oracle of likelihood and moments; a direct search is that of the fit."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Kernel, Matern

from costmodels.surrogates.gaussian_process import (
    BOUNDS,
    GaussianProcess,
    Hyperparameters,
    HyperPrior,
    Points,
    fit,
    join_points,
)
from costmodels.surrogates.marginal_likelihood import IMPOSSIBLE, MarginalLikelihood

HYPER = Hyperparameters(amplitude=0.4, length_scale=np.array([1.5, 4.0, 0.8]), noise=0.05, scale=1.7)
PRIOR = HyperPrior(amplitude=0.3, length_scale=(2.0, 2.0, 2.0), noise=0.05, spread=0.6)


class OnColumns(Kernel):
    """A kernel of scikit-learn that sees some of the columns."""

    def __init__(self, kernel, first, last):
        self.kernel, self.first, self.last = kernel, first, last

    def __call__(self, left, right=None, eval_gradient=False):
        """Covariance of the rows."""
        assert not eval_gradient, "its hyperparameters are given"
        of_right = None if right is None else right[:, self.first : self.last]
        return self.kernel(left[:, self.first : self.last], of_right)

    def diag(self, rows):
        """Variance of each row."""
        return self.kernel.diag(rows[:, self.first : self.last])

    def is_stationary(self):
        """Said of no kernel here: nothing depends on it."""
        return False


def random_points(rng, num_points):
    """Points of three features and two linear columns: a slope and a common offset."""
    features = rng.uniform(-2, 2, (num_points, 3))
    linear = np.stack([rng.normal(0, 0.3, num_points), np.full(num_points, 0.5)], axis=1)
    return Points.alike(features=features, linear=linear)


def smooth_values(rng, points):
    """A smooth function of the features, an offset, and noise of 5%."""
    return 0.2 + 0.4 * np.sin(points.features[:, 0]) + points.linear[:, 0] + 0.05 * rng.standard_normal(len(points))


@pytest.fixture
def process(rng):
    """A process of known hyperparameters after 25 observations of unlike noise."""
    points = random_points(rng, 25)
    return GaussianProcess(
        at=points, values=smooth_values(rng, points), variance=rng.uniform(0, 0.02, 25), hyper=HYPER, num_scaled=1
    )


@pytest.fixture
def oracle(process):
    """The same process in scikit-learn."""
    kernel = OnColumns(ConstantKernel(HYPER.amplitude**2) * Matern(HYPER.length_scale, nu=2.5), 0, 3)
    kernel += OnColumns(ConstantKernel(HYPER.scale**2) * DotProduct(sigma_0=0.0), 3, 4)
    kernel += OnColumns(DotProduct(sigma_0=0.0), 4, 5)
    regressor = GaussianProcessRegressor(kernel, alpha=HYPER.noise**2 + process.variance, optimizer=None)
    return regressor.fit(columns(process.at), process.values)


def columns(points):
    """All columns as scikit-learn takes them."""
    return np.concatenate([points.features, points.linear], axis=1)


def log_posterior(process, prior):
    """What `fit` makes as large as it can, up to a constant."""
    hyper = process.hyper
    theta = np.log([hyper.amplitude, *hyper.length_scale, hyper.noise, hyper.scale])
    median = np.log([prior.amplitude, *prior.length_scale, prior.noise, prior.scale])
    return process.log_likelihood() - 0.5 * np.sum(((theta - median) / prior.spread) ** 2)


def test_likelihood_and_moments_are_those_of_the_oracle(process, oracle, rng):
    """With unlike noise and scaled columns, the log marginal likelihood is scikit-learn's, and so are mean, deviation
    and covariance at new points.
    """
    points = random_points(rng, 40)

    mean, deviation = process.mean_and_deviation(points)
    same_mean, covariance = process.mean_and_covariance(points)

    expected_mean, expected_covariance = oracle.predict(columns(points), return_cov=True)
    assert process.log_likelihood() == pytest.approx(oracle.log_marginal_likelihood_value_, rel=1e-9)
    assert mean == pytest.approx(expected_mean, abs=1e-7)
    assert same_mean == pytest.approx(expected_mean, abs=1e-7)
    assert covariance == pytest.approx(expected_covariance, abs=1e-7)
    assert deviation == pytest.approx(np.sqrt(np.diag(expected_covariance)), abs=1e-7)


def test_without_observations_it_is_the_prior(process, rng):
    """A process that has seen nothing has mean zero and the prior's deviation, in closed form and in draws."""
    nothing = dataclasses.replace(process, at=process.at.take(slice(0)), values=np.zeros(0), variance=np.zeros(0))
    points = random_points(rng, 5)

    mean, deviation = nothing.mean_and_deviation(points)
    drawn = nothing.draw(points, 4000, rng)

    expected = HYPER.amplitude**2 + (HYPER.scale * points.linear[:, 0]) ** 2 + points.linear[:, 1] ** 2
    assert mean == pytest.approx(0)
    assert deviation**2 == pytest.approx(expected)
    assert drawn.std(axis=0) == pytest.approx(deviation, rel=0.1)
    assert nothing.log_likelihood() == 0


def test_draws_have_the_posterior_mean_and_covariance(process, rng):
    """Over 6,000 draws, mean and covariance are the posterior's but for the error of 512 random features."""
    points = random_points(rng, 12)

    drawn = process.draw(points, 6000, rng)

    mean, covariance = process.mean_and_covariance(points)
    assert drawn.mean(axis=0) == pytest.approx(mean, abs=0.03)
    assert np.cov(drawn.T) == pytest.approx(covariance, abs=0.1 * HYPER.amplitude**2)


def test_draws_are_functions(process, rng):
    """Two points that nearly coincide have nearly the same value in every draw, across chunks too."""
    points = random_points(rng, 9000)
    points.features[-1] = points.features[0] + 1e-4
    points.linear[-1] = points.linear[0]

    drawn = process.draw(points, 20, rng)

    assert drawn.shape == (20, 9000)
    assert drawn[:, -1] == pytest.approx(drawn[:, 0], abs=1e-3)
    assert drawn[:, 0].std() > 0.01


def test_what_was_drawn_beside_is_taken_from_the_values(process, rng):
    """A draw beside a constant is one of the process whose values are lower by it, and each draw has its own."""
    points, at = random_points(rng, 8), process.at.take(slice(0, 1))
    lower = dataclasses.replace(process, values=process.values - 0.5)
    rising = np.linspace(-1, 1, 40)[:, None] * np.ones(25)

    drawn = process.draw(points, 50, np.random.default_rng(1), beside=np.full((50, 25), 0.5))
    of_each = process.draw(at, 40, np.random.default_rng(1), beside=rising)[:, 0]

    assert drawn == pytest.approx(lower.draw(points, 50, np.random.default_rng(1)), abs=1e-5)
    assert np.corrcoef(of_each, -rising[:, 0])[0, 1] > 0.9


def test_more_observations_bring_all_their_noise(process, rng):
    """Observations added later count with their own noise alone, not with the shared one on top."""
    points, more = random_points(rng, 6), random_points(rng, 3)
    values, noise = rng.normal(size=3), np.array([0.001, 0.01, 0.1])

    added = process.with_more(more, values, noise)

    all_noise = np.concatenate([HYPER.noise**2 + process.variance, noise])
    silent = dataclasses.replace(HYPER, noise=0.0)
    whole = GaussianProcess(
        at=join_points(process.at, more),
        values=np.concatenate([process.values, values]),
        variance=all_noise,
        hyper=silent,
        num_scaled=1,
    )
    assert added.mean_and_deviation(points)[0] == pytest.approx(whole.mean_and_deviation(points)[0])
    assert added.mean_and_deviation(points)[1] == pytest.approx(whole.mean_and_deviation(points)[1])


@pytest.mark.parametrize("num_parts", [3, 25])
def test_left_out_errors_are_those_of_processes_without_the_part(process, num_parts):
    """Errors of a part, and their deviations, are those of a process that never saw it, down to single observations."""
    part = np.arange(25) % num_parts

    errors, deviations = process.left_out_errors(part)

    for index in range(num_parts):
        held, kept = np.flatnonzero(part == index), np.flatnonzero(part != index)
        without = process.take(kept)
        mean, deviation = without.mean_and_deviation(process.at.take(held))
        total = np.sqrt(deviation**2 + HYPER.noise**2 + process.variance[held])
        assert errors[held] == pytest.approx(process.values[held] - mean)
        assert deviations[held] == pytest.approx(total)


@pytest.mark.parametrize("num_scaled", [0, 1])
def test_a_fit_beats_its_neighbours(rng, num_scaled):
    """No hyperparameter of a fit can be moved by 5% either way without making the observations less likely."""
    points = random_points(rng, 30)
    fitted = fit(points, smooth_values(rng, points), prior=PRIOR, variance=np.full(30, 1e-3), num_scaled=num_scaled)
    best = log_posterior(fitted, PRIOR)

    for factor in (0.95, 1.05):
        lengths = [fitted.hyper.length_scale * np.where(np.arange(3) == i, factor, 1.0) for i in range(3)]
        changes = [{name: getattr(fitted.hyper, name) * factor} for name in ("amplitude", "noise", "scale")]
        for change in [*changes, *({"length_scale": length} for length in lengths)]:
            moved = dataclasses.replace(fitted, hyper=dataclasses.replace(fitted.hyper, **change))
            assert log_posterior(moved, PRIOR) < best, change


def log_marginal_likelihood(theta, features, values):
    """The log marginal likelihood from numpy alone: amplitude, length scales, noise as logarithms; no linear part."""
    amplitude, *length_scale, noise = np.exp(theta)
    scaled = features / np.array(length_scale)
    distance = np.sqrt(5 * np.sum((scaled[:, None] - scaled[None]) ** 2, axis=2))
    covariance = amplitude**2 * (1 + distance + distance**2 / 3) * np.exp(-distance)
    covariance += noise**2 * np.eye(len(values))
    _, log_determinant = np.linalg.slogdet(covariance)
    return -0.5 * (values @ np.linalg.solve(covariance, values) + log_determinant + len(values) * np.log(2 * np.pi))


def test_a_fit_under_a_wide_prior_is_as_likely_as_a_direct_search(rng):
    """With next to no prior, the likelihood found is the largest that a direct search finds from three starts."""
    points = random_points(rng, 40)
    points.linear[:] = 0.0
    values = np.sin(points.features).sum(axis=1) + 0.2 * rng.standard_normal(40)

    fitted = fit(points, values, prior=dataclasses.replace(PRIOR, spread=30.0))

    bounds = np.log([BOUNDS["amplitude"], *[BOUNDS["length_scale"]] * 3, BOUNDS["noise"]])
    searches = (
        minimize(lambda theta: -log_marginal_likelihood(theta, points.features, values), start, bounds=bounds)
        for start in np.log([[0.3, 2, 2, 2, 0.05], [1, 0.5, 0.5, 0.5, 0.3], [2, 5, 5, 5, 0.1]])
    )
    assert fitted.log_likelihood() == pytest.approx(-min(found.fun for found in searches), abs=0.05)


@pytest.mark.parametrize("num_scaled", [0, 1, 2])
def test_the_likelihood_that_a_fit_climbs_is_the_process_own(process, rng, num_scaled):
    """Value and gradient at any hyperparameters are those of the process, the gradient by central differences."""
    process = dataclasses.replace(process, num_scaled=num_scaled)
    at = process.at
    likelihood = MarginalLikelihood(
        features=at.features, linear=at.linear, values=process.values, variance=process.variance, num_scaled=num_scaled
    )
    theta = np.log([HYPER.amplitude, *HYPER.length_scale, HYPER.noise, HYPER.scale]) + rng.normal(0, 0.2, 6)

    value, gradient = likelihood.negative(theta)

    amplitude, *length_scale, noise, scale = np.exp(theta)
    hyper = Hyperparameters(amplitude=amplitude, length_scale=np.array(length_scale), noise=noise, scale=scale)
    steps = 1e-5 * np.eye(6)
    differences = [
        (likelihood.negative(theta + step)[0] - likelihood.negative(theta - step)[0]) / 2e-5 for step in steps
    ]
    assert value == pytest.approx(-dataclasses.replace(process, hyper=hyper).log_likelihood(), rel=1e-9)
    assert gradient == pytest.approx(np.array(differences), rel=1e-5, abs=1e-5)


def test_a_singular_covariance_is_no_error():
    """Two equal observations without any noise are as unlikely as can be, and the search goes on from there."""
    twins = MarginalLikelihood(
        features=np.zeros((2, 1)), linear=np.zeros((2, 1)), values=np.ones(2), variance=np.full(2, -0.01), num_scaled=1
    )

    assert twins.negative(np.log([0.01, 1.0, 0.01, 1.0]))[0] == IMPOSSIBLE


@pytest.mark.parametrize("num_features", [0, 1])
def test_a_process_of_few_features_is_fitted(rng, num_features):
    """Where candidates have no features, amplitude, noise and scale are learned all the same."""
    points = Points.alike(features=rng.uniform(0, 3, (12, num_features)), linear=rng.normal(size=(12, 1)))

    values = 3.0 * points.linear[:, 0] + np.sin(points.features).sum(axis=1) + 0.2 * rng.normal(size=12)
    fitted = fit(points, values, prior=HyperPrior(), num_scaled=1)

    assert fitted.hyper.length_scale.shape == (num_features,)
    assert fitted.hyper.scale > HyperPrior().scale
    assert fitted.hyper.amplitude != pytest.approx(HyperPrior().amplitude, rel=1e-3)


def test_few_observations_teach_no_hyperparameters(rng):
    """Below `min_to_learn` observations the hyperparameters are the prior's medians, from there on they are not."""
    points = random_points(rng, 4)
    values = np.array([0.5, -0.5, 0.4, -0.1])

    few = fit(points.take(slice(3)), values[:3], prior=PRIOR, min_to_learn=4)
    enough = fit(points, values, prior=PRIOR, min_to_learn=4)

    assert few.hyper.amplitude == pytest.approx(PRIOR.amplitude)
    assert few.hyper.length_scale == pytest.approx(PRIOR.length_scale)
    assert (few.hyper.noise, few.hyper.scale) == pytest.approx((PRIOR.noise, PRIOR.scale))
    assert enough.hyper.amplitude != pytest.approx(PRIOR.amplitude, rel=1e-3)


def test_the_prior_keeps_a_few_observations_from_certainty(rng):
    """Three observations that agree by chance leave more noise and amplitude than the likelihood alone would."""
    points = random_points(rng, 3)
    values = np.array([0.1, 0.1001, 0.0999])

    weak = fit(points, values, prior=dataclasses.replace(PRIOR, spread=30.0))
    usual = fit(points, values, prior=PRIOR)

    assert usual.hyper.noise > 3 * weak.hyper.noise
    assert usual.hyper.amplitude > 3 * weak.hyper.amplitude


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_distinct=st.integers(1, 6),
    num_points=st.integers(1, 14),
    exponent=st.integers(-9, 6),
    offset=st.sampled_from([0.0, 1.0, -20.0, 20.0]),
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_any_finite_observations_give_a_finite_posterior(seed, num_distinct, num_points, exponent, offset):
    """Equal values, equal points, tiny and huge ones: likelihood, mean, deviation and draws are numbers, and no
    deviation is negative.
    """
    rng = np.random.default_rng(seed)
    distinct = random_points(rng, num_distinct)
    points = distinct.take(rng.integers(num_distinct, size=num_points))
    values = offset + 10.0**exponent * rng.choice([0.0, 1.0, -1.0], num_points)

    process = fit(points, values, prior=PRIOR, num_scaled=1)
    mean, deviation = process.mean_and_deviation(join_points(points, random_points(rng, 5)))
    drawn = process.draw(random_points(rng, 5), 7, rng)

    assert np.isfinite(process.log_likelihood())
    assert np.isfinite(mean).all()
    assert np.isfinite(deviation).all()
    assert (deviation >= 0).all()
    assert np.isfinite(drawn).all()


def test_observations_without_noise_at_one_point(rng):
    """Equal observations of no noise at all, at one point, are one observation; rounding does not end the process."""
    point = random_points(rng, 1)
    process = GaussianProcess(
        at=point, values=np.array([0.3]), variance=np.array([-(HYPER.noise**2)]), hyper=HYPER, num_scaled=1
    )

    twice = process.with_more(point, np.array([0.3]), np.array([0.0]))
    mean, deviation = twice.mean_and_deviation(point)

    assert mean[0] == pytest.approx(0.3, abs=1e-3)
    assert 0 <= deviation[0] < 1e-2
