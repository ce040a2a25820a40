"""Importance sampling from the exact process is the oracle of expectation propagation."""

import numpy as np
import pytest
from scipy.special import ndtr

from costmodels.surrogates.censored import Bounds, condition_on_bounds
from costmodels.surrogates.gaussian_process import GaussianProcess, Hyperparameters, Points

HYPER = Hyperparameters(amplitude=0.5, length_scale=np.array([1.0, 2.0]), noise=0.05, scale=1.0)


def random_points(rng, num_points):
    """Points of two features and a common offset."""
    return Points.alike(features=rng.uniform(-2, 2, (num_points, 2)), linear=np.full((num_points, 1), 0.4))


def process_after(rng, num_observations=4):
    """A process that has seen a few values about zero."""
    return GaussianProcess(
        at=random_points(rng, num_observations),
        values=rng.normal(0, 0.4, num_observations),
        variance=np.zeros(num_observations),
        hyper=HYPER,
        num_scaled=0,
    )


def bounds_at(at, edge, side, mishap):
    """Bounds as blurred as a configuration is of its own."""
    count = len(at)
    return Bounds(
        at=at,
        edge=np.broadcast_to(edge, count).astype(float),
        side=np.broadcast_to(side, count).astype(float),
        mishap=np.broadcast_to(mishap, count).astype(float),
        blur=np.full(count, HYPER.noise),
    )


def by_sampling(process, bounds, asked, rng, num_samples=100_000):
    """Means and deviations at `asked` and the log probability of the bounds, from weighed draws of the process."""
    at = Points.alike(
        features=np.concatenate([bounds.at.features, asked.features]),
        linear=np.concatenate([bounds.at.linear, asked.linear]),
    )
    mean, covariance = process.mean_and_covariance(at)
    root = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(mean)))
    drawn = mean + rng.standard_normal((num_samples, len(mean))) @ root.T
    met = ndtr(bounds.side * (drawn[:, : len(bounds)] - bounds.edge) / bounds.blur)
    weights = np.prod(bounds.mishap + (1 - bounds.mishap) * met, axis=1)
    values = drawn[:, len(bounds) :]
    means = np.average(values, axis=0, weights=weights)
    return means, np.sqrt(np.average((values - means) ** 2, axis=0, weights=weights)), np.log(weights.mean())


@pytest.mark.parametrize(("mishap", "num_false"), [(1e-4, 0), (0.02, 0), (0.02, 1), (0.3, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_it_agrees_with_sampling_from_the_exact_process(seed, mishap, num_false):
    """After six bounds to both sides, some of them mishaps, means at other points are right within 0.05, deviations
    within 0.08, and the log probability within 0.15; before the bounds, deviations are 0.4 to 0.5.
    """
    rng = np.random.default_rng(seed)
    process, at, asked = process_after(rng), random_points(rng, 6), random_points(rng, 5)
    truth = process.draw(at, 1, rng)[0]
    edge = truth + rng.normal(0, 0.3, 6)
    side = np.where(truth > edge, 1.0, -1.0)
    side[:num_false] *= -1
    bounds = bounds_at(at, edge, side, mishap)

    after, log_probability = condition_on_bounds(process, bounds)

    means, deviations, sampled = by_sampling(process, bounds, asked, rng)
    mean, deviation = after.mean_and_deviation(asked)
    assert np.abs(mean - means).max() < 0.05
    assert np.abs(deviation - deviations).max() < 0.08
    assert log_probability == pytest.approx(sampled, abs=0.15)


@pytest.mark.parametrize(("edge", "mishap"), [(0.5, 1e-4), (0.0, 0.02), (1.0, 0.02)])
def test_one_bound_is_met_exactly(rng, edge, mishap):
    """A single bound leaves the mean that sampling finds, to 0.01, and has its log probability, to 0.03."""
    process, at = process_after(rng), random_points(rng, 1)
    bounds = bounds_at(at, edge, 1.0, mishap)

    after, log_probability = condition_on_bounds(process, bounds)

    means, _, sampled = by_sampling(process, bounds, at, rng)
    assert after.mean_and_deviation(at)[0] == pytest.approx(means, abs=0.01)
    assert log_probability == pytest.approx(sampled, abs=0.03)


def test_a_bound_narrows_and_never_widens(rng):
    """A plausible bound leaves the deviation that sampling finds, to 0.01; one that is hardly to be believed, which
    ought to widen it, leaves it as it was.
    """
    process, at = process_after(rng), random_points(rng, 1)
    plausible, absurd = (bounds_at(at, edge, 1.0, 0.02) for edge in (0.0, 1.5))

    found = [condition_on_bounds(process, bounds)[0].mean_and_deviation(at)[1] for bounds in (plausible, absurd)]

    assert found[0] == pytest.approx(by_sampling(process, plausible, at, rng)[1], abs=0.01)
    assert found[1] == pytest.approx(process.mean_and_deviation(at)[1], abs=1e-3)


@pytest.mark.parametrize(("edge", "mishap"), [(2.0, 1 - 1e-9), (-8.0, 0.02)])
def test_a_bound_that_would_be_seen_anyhow_says_nothing(rng, edge, mishap):
    """With mishaps nearly certain, or ten deviations beyond the edge already, the process stays what it was.

    It gave the bounds a probability near one; no bounds at all leave it itself.
    """
    process, at, asked = process_after(rng), random_points(rng, 5), random_points(rng, 20)

    after, log_probability = condition_on_bounds(process, bounds_at(at, edge, 1.0, mishap))

    for found, expected in zip(after.mean_and_deviation(asked), process.mean_and_deviation(asked), strict=True):
        assert np.abs(found - expected).max() < 1e-3
    assert log_probability == pytest.approx(0.0, abs=1e-3)
    assert condition_on_bounds(process, bounds_at(at.take(slice(0)), edge, 1.0, mishap)) == (process, 0.0)


def test_the_order_of_bounds_does_not_matter(rng):
    """The same bounds in another order give the same process and the same probability."""
    process, at, asked = process_after(rng), random_points(rng, 8), random_points(rng, 10)
    bounds = bounds_at(at, rng.normal(0, 0.3, 8), rng.choice([-1.0, 1.0], 8), 0.02)
    order = rng.permutation(8)
    shuffled = bounds_at(at.take(order), bounds.edge[order], bounds.side[order], bounds.mishap[order])

    (one, log_one), (other, log_other) = condition_on_bounds(process, bounds), condition_on_bounds(process, shuffled)

    assert np.allclose(one.mean_and_deviation(asked), other.mean_and_deviation(asked), atol=1e-6)
    assert log_one == pytest.approx(log_other, abs=1e-6)


def test_many_bounds_converge(rng):
    """Eighty bounds of one plausible function are all met within what is left uncertain."""
    process, at = process_after(rng), random_points(rng, 80)
    truth = process.draw(at, 1, rng)[0]
    side = rng.choice([-1.0, 1.0], 80)
    bounds = bounds_at(at, truth - 0.1 * side, side, 0.02)

    after, log_probability = condition_on_bounds(process, bounds)

    mean, deviation = after.mean_and_deviation(at)
    assert np.isfinite(log_probability)
    assert (side * (mean - bounds.edge) > -2 * np.hypot(deviation, bounds.blur)).all()
    assert np.abs(mean - truth).mean() < 0.5 * np.abs(process.mean_and_deviation(at)[0] - truth).mean()


def test_contradictory_bounds_are_put_down_to_mishaps(rng):
    """Ten bounds at one point, one of them absurd: the others hold, and the probability stays finite."""
    process, at = process_after(rng), random_points(rng, 1)
    ten = at.take(np.zeros(10, dtype=np.int64))
    edge = np.r_[np.full(9, 0.0), 30.0]

    after, log_probability = condition_on_bounds(process, bounds_at(ten, edge, np.r_[np.full(9, -1.0), 1.0], 0.02))

    mean, _ = after.mean_and_deviation(at)
    assert mean[0] < 0.1
    assert log_probability == pytest.approx(np.log(0.02), abs=2.0)
