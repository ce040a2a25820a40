from dataclasses import replace

import numpy as np
import pytest

from costmodels.surrogates.predicted import Predicted
from tuner.search.observations import observations_of
from tuner.search.posterior import posterior_of
from tuner.search.step_draws import StepDraws, slower_in_words

TRIED = np.arange(0, 30, 4)
"""Positions of the eight candidates that are tried."""

SLOWED = 1 / 8
"""Share of the runs that something slows down, in the worlds of these tests."""


def drawn_in_world(layouts, seed):
    """Draws of the untried after the trials of one world, where they stand, and their true log step times."""
    rng = np.random.default_rng(seed)
    features = np.log2(np.stack([layouts.pp, layouts.tp, layouts.dp, layouts.mbs], axis=1)) / 3
    predicted_s = 1.0 + 0.2 * np.log2(layouts.tp) + 0.1 * np.log2(layouts.pp)
    true = np.log(predicted_s) + rng.normal(0, 0.3) + features @ rng.normal(0, 0.1, 4) + rng.normal(0, 0.05, 30)
    true += (rng.random(30) < SLOWED) * rng.exponential(1.0, 30)
    seen = replace(
        observations_of([], lambda _: None),
        measured=TRIED,
        log_step_s=true[TRIED],
        variance=np.full(len(TRIED), 0.01**2),
        num_completed=np.ones(len(TRIED), dtype=np.int64),
        explored=frozenset(TRIED.tolist()),
        limits_s={1: float(3 * np.exp(true.max()))},
    )
    posterior = posterior_of(Predicted.of_times(predicted_s, features), layouts)
    return posterior.draw_steps_at(seen, np.arange(30), 1000, rng), np.setdiff1d(np.arange(30), [*TRIED, 1]), true


@pytest.fixture(scope="module")
def worlds(layouts):
    """Thirty worlds."""
    return [drawn_in_world(layouts, seed) for seed in range(30)]


def test_a_range_is_that_of_the_regular_part():
    """What slows a fifth of the draws down leaves the range as it is, and is the chance to be slower than that."""
    rng = np.random.default_rng(0)
    regular = rng.normal(np.log(2.0), 0.1, (20_000, 1))
    slowed = regular + 2.0 * (rng.random(regular.shape) < 0.2)

    (found,) = StepDraws(log_step_s=slowed, log_regular_s=regular).ranges()

    assert (found.low_s, found.high_s) == (
        pytest.approx(2 * np.exp(-0.196), rel=0.01),
        pytest.approx(2 * np.exp(0.196), rel=0.01),
    )
    assert found.log_error == pytest.approx(0.1, rel=0.03)
    assert found.slower_probability == pytest.approx(0.2 + 0.8 * 0.025, abs=0.01)


def test_ranges_and_chances_hold(worlds):
    """Over worlds whose runs are slowed down now and then, ranges hold their share of 95% of what the chances leave,
    and as many untried runs as told are slower, within 0.05.
    """
    inside, slower, told = [], [], []
    for drawn, untried, true in worlds:
        for place in untried:
            found = drawn.ranges()[place]
            inside.append(found.low_s <= np.exp(true[place]) <= found.high_s)
            slower.append(np.exp(true[place]) > found.high_s)
            told.append(found.slower_probability)

    assert np.mean(inside) >= 0.95 * (1 - np.mean(told))
    assert np.mean(slower) == pytest.approx(np.mean(told), abs=0.05)


def test_ranges_are_narrower_than_one_of_both_parts(worlds):
    """One interval with the outliers in it is at least twice as wide in the median."""
    ratios = []
    for drawn, untried, _ in worlds:
        low, high = np.quantile(drawn.log_step_s, [0.025, 0.975], axis=0)
        ranges = drawn.ranges()
        ratios += [np.exp(high[at] - low[at]) / (ranges[at].high_s / ranges[at].low_s) for at in untried]

    assert np.median(ratios) > 2


def test_what_was_measured_is_told_as_before(worlds):
    """A measured candidate is no outlier any more; outliers are slower, and a time limit bounds both kinds of draws."""
    for drawn, _, true in worlds:
        for place in TRIED:
            found = drawn.ranges()[place]
            assert found.low_s < np.exp(true[place]) < found.high_s
            assert found.slower_probability == pytest.approx(0.025, abs=0.001)
        assert (drawn.log_step_s >= drawn.log_regular_s).all()
        assert drawn.log_regular_s[:, 1].min() >= np.log(3) + true.max() - 1e-6


@pytest.mark.parametrize(
    ("probability", "told"), [(None, ""), (0.025, ""), (0.049, ""), (0.18, "; 18% chance to be slower than that")]
)
def test_only_a_notable_chance_is_told(probability, told):
    """Words name it from a twentieth on."""
    words = slower_in_words(probability)

    assert told in words
    assert bool(told) == bool(words)
