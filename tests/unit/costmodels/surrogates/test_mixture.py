import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.surrogates.mixture import allot_draws, probabilities_of

WEIGHTS = st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda weights: sum(weights) > 1e-3)


def normal(weights):
    """Probabilities in these proportions."""
    return np.array(weights) / np.sum(weights)


@given(weights=WEIGHTS, num_draws=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_every_draw_is_allotted_once(weights, num_draws, seed):
    """The shares sum to M, and each is its expectation rounded down or up."""
    probabilities = normal(weights)

    counts = allot_draws(probabilities, num_draws, np.random.default_rng(seed))

    assert counts.sum() == num_draws
    assert (np.abs(counts - probabilities * num_draws) < 1 + 1e-6).all()


@given(weights=WEIGHTS, num_draws=st.integers(1, 20))
@settings(max_examples=8)
def test_shares_are_right_in_expectation(weights, num_draws):
    """Over 2,000 seeds every hypothesis gets its probability times M, within five standard errors."""
    probabilities = normal(weights)

    counts = np.array([allot_draws(probabilities, num_draws, np.random.default_rng(seed)) for seed in range(2000)])

    standard_error = 0.5 / np.sqrt(2000)  # of what varies by at most one
    assert np.abs(counts.mean(axis=0) - probabilities * num_draws).max() < 5 * standard_error


def test_what_is_impossible_gets_nothing():
    """A hypothesis of probability zero has no draw under any seed, wherever it stands."""
    counts = np.array(
        [allot_draws(np.array([0, 0.5, 0, 0.5, 0]), 7, np.random.default_rng(seed)) for seed in range(200)]
    )

    assert (counts[:, [0, 2, 4]] == 0).all()


def test_log_weights_may_be_far_from_zero():
    """Weights that underflow as numbers keep their proportions as logarithms."""
    found = probabilities_of(np.array([-5000.0, -5000.0 + np.log(3.0), -9000.0]))

    assert found == pytest.approx([0.25, 0.75, 0.0])
