import numpy as np
import pytest
from scipy.stats import kstest

from costmodels.surrogate import SurrogatePrior, fit_step_surrogate


@pytest.fixture
def rng():
    """A fixed stream."""
    return np.random.default_rng(0)


def observed(rng, num_trials=20, num_points=200, dim=4):
    """Features of points, and trials at the first of them whose error is smooth in the first feature."""
    features = rng.uniform(-1, 1, (num_points, dim))
    log_ratio = 0.3 + 0.2 * np.sin(2 * features[:num_trials, 0]) + 0.01 * rng.standard_normal(num_trials)
    return features, log_ratio


def test_draws_have_the_exact_posterior_mean_and_deviation(rng):
    """Pathwise draws agree with the closed-form posterior within the error of 2,000 draws and 512 features."""
    features, log_ratio = observed(rng)
    surrogate = fit_step_surrogate(features[:20], log_ratio)

    drawn = surrogate.draw(features, 2000, rng)

    mean, deviation = surrogate.mean_and_deviation(features)
    assert np.abs(drawn.mean(axis=0) - mean).max() < 0.02
    assert np.abs(drawn.std(axis=0) - deviation).max() < 0.03


def test_draws_are_joint(rng):
    """Two points that are the same have the same value in every draw, and near points nearly so."""
    features, log_ratio = observed(rng)
    surrogate = fit_step_surrogate(features[:20], log_ratio)
    points = np.stack([features[50], features[50], features[50] + 1e-3])

    drawn = surrogate.draw(points, 200, rng)

    assert np.allclose(drawn[:, 0], drawn[:, 1], atol=1e-5)
    assert np.abs(drawn[:, 0] - drawn[:, 2]).max() < 0.01


def test_draws_pass_through_the_data(rng):
    """At a trial's point the draws stay within the measurement noise of what was measured."""
    features, log_ratio = observed(rng)
    surrogate = fit_step_surrogate(features[:20], log_ratio)

    drawn = surrogate.draw(features[:20], 500, rng)

    assert np.abs(drawn.mean(axis=0) - log_ratio).max() < 4 * surrogate.noise


def test_without_trials_draws_follow_the_prior(rng):
    """Before any trial a draw at one point is normal with the prior's offset and amplitude together."""
    prior = SurrogatePrior(offset=0.3, amplitude=0.4)
    surrogate = fit_step_surrogate(np.zeros((0, 3)), np.zeros(0), prior)

    drawn = surrogate.draw(np.array([[0.1, 0.2, 0.3]]), 4000, rng)[:, 0]

    assert kstest(drawn / 0.5, "norm").pvalue > 1e-3


def test_uncertainty_returns_to_the_prior_far_away(rng):
    """Far from all trials the posterior has the prior's amplitude again; at a trial it is near the noise."""
    features, log_ratio = observed(rng)
    surrogate = fit_step_surrogate(features[:20], log_ratio)

    _, near = surrogate.mean_and_deviation(features[:1])
    _, far = surrogate.mean_and_deviation(features[:1] + 1000.0)

    assert far[0] > 0.9 * surrogate.amplitude
    assert near[0] < 2 * surrogate.noise


def test_a_shared_error_is_learned_from_few_trials(rng):
    """Three trials that are all 50% slow teach the surrogate that the untried are slow too."""
    features = rng.uniform(-1, 1, (50, 4))

    surrogate = fit_step_surrogate(features[:3], np.log([1.5, 1.5, 1.5]))

    mean, _ = surrogate.mean_and_deviation(features)
    assert np.abs(np.exp(mean[3:]) - 1.5).max() < 0.25


def test_the_same_generator_gives_the_same_draws():
    """A fit and a draw are functions of their inputs and the generator alone."""
    features, log_ratio = observed(np.random.default_rng(1))

    first, second = (
        fit_step_surrogate(features[:20], log_ratio).draw(features, 10, np.random.default_rng(7)) for _ in range(2)
    )

    assert np.array_equal(first, second)


def test_held_out_errors_are_calibrated(rng):
    """About 95% of unseen errors lie within two posterior deviations of the mean."""
    features, log_ratio = observed(rng, num_trials=200)
    surrogate = fit_step_surrogate(features[:40], log_ratio[:40])

    mean, deviation = surrogate.mean_and_deviation(features[40:])

    spread = np.sqrt(deviation**2 + surrogate.noise**2)
    assert np.mean(np.abs(log_ratio[40:] - mean) < 2 * spread) > 0.85
