from dataclasses import replace

import numpy as np
import pytest

from costmodels.surrogates.predicted import Predicted
from tuner.search.gain import gain_in
from tuner.search.observations import observations_of
from tuner.search.posterior import posterior_of
from tuner.search.sampler import ThompsonSampler

CURRENT = 21
TRIED = (CURRENT, *range(0, 21, 3))
"""Positions of the eight candidates that are tried, the current one first."""


def studied(layouts, seed, noise):
    """A sampler, true log step times, and what one noisy trial each of some candidates told."""
    rng = np.random.default_rng(seed)
    features = np.log2(np.stack([layouts.pp, layouts.tp, layouts.dp, layouts.mbs], axis=1)) / 3
    predicted_s = 1.0 + 0.2 * np.log2(layouts.tp) + 0.1 * np.log2(layouts.pp)
    true = np.log(predicted_s) + features @ rng.normal(0, 0.1, 4) + rng.normal(0, 0.03, len(layouts))
    steps = true[list(TRIED), None] + noise * rng.standard_normal((len(TRIED), 5))
    seen = replace(
        observations_of([], lambda _: None),
        measured=np.array(TRIED),
        log_step_s=np.median(steps, axis=1),
        variance=0.005**2 + np.pi / 2 * steps.var(axis=1, ddof=1) / 5,
        num_completed=np.ones(len(TRIED), dtype=np.int64),
        explored=frozenset(TRIED),
        num_decisions=len(TRIED),
    )
    sampler = ThompsonSampler(layouts, posterior_of(Predicted.of_times(predicted_s, features), layouts))
    return sampler, true, seen


def gain_of(layouts, seed, noise):
    """Log gain of the fastest measured candidate over the current one: true, measured, and the posterior's."""
    sampler, true, seen = studied(layouts, seed, noise)
    row = int(np.argmin(seen.log_step_s))
    best = int(seen.measured[row])
    found = sampler.gain(seen, layouts.values(best), layouts.values(CURRENT))
    ends = np.log([found.low, found.median, found.high])
    return true[CURRENT] - true[best], seen.log_step_s[0] - seen.log_step_s[row], ends


def test_a_gain_is_not_the_luckiest_trials(layouts):
    """Under strong noise the ratio of measured steps says far too much; the posterior does not, and its interval holds
    the true gain as often as it says.
    """
    true, measured, ends = (
        np.array(each) for each in zip(*(gain_of(layouts, seed, 0.6) for seed in range(20)), strict=True)
    )

    assert np.mean(measured - true) > 0.25
    assert abs(np.mean(ends[:, 1] - true)) < 0.4 * np.mean(measured - true)
    assert np.mean((ends[:, 0] <= true) & (true <= ends[:, 2])) >= 0.8
    assert np.median(ends[:, 2] - ends[:, 0]) > 0.3


def test_without_noise_a_gain_is_the_measured_one(layouts):
    """Where steps hardly vary, the gain is the ratio of the measured step times to a percent."""
    _, measured, ends = gain_of(layouts, 0, 0.001)

    assert ends[1] == pytest.approx(measured, abs=0.01)
    assert ends[2] - ends[0] < 0.05


def test_a_reference_that_was_not_measured_is_predicted(layouts):
    """Its gain is the posterior's, with a wider interval; one that cannot run has none, and the best itself has 1."""
    sampler, true, seen = studied(layouts, 1, 0.01)
    best = int(seen.measured[np.argmin(seen.log_step_s)])
    untried = layouts.values(1)

    found = sampler.gain(seen, layouts.values(best), untried)
    known = sampler.gain(seen, layouts.values(best), layouts.values(CURRENT))

    assert found.low < np.exp(true[1] - true[best]) < found.high
    assert np.log(found.high / found.low) > 2 * np.log(known.high / known.low)
    assert sampler.gain(seen, layouts.values(best), layouts.values(best)).interval == (1.0, 1.0)
    failed = replace(seen, misfits=frozenset({1}))
    assert sampler.gain(failed, layouts.values(best), untried) is None


def test_a_few_candidates_are_drawn_as_among_all(posterior):
    """Draws of a few candidates have the means and deviations that they have among draws of all."""
    predicted = np.log(posterior.predicted.step_time_s)
    measured = np.array([2, 5, 9])
    seen = replace(
        observations_of([], lambda _: None),
        measured=measured,
        log_step_s=predicted[measured] + np.array([0.1, 0.2, 0.15]),
        variance=np.full(3, 0.05**2),
        num_completed=np.ones(3, dtype=np.int64),
        explored=frozenset({2, 5, 9, 11}),
        limits_s={11: float(2 * np.exp(predicted[11]))},
    )
    at = np.array([5, 7, 11, 5])

    few = posterior.draw_steps_at(seen, at, 2000, np.random.default_rng(0)).log_step_s
    among_all = posterior.draw_steps(seen, seen, 2000, np.random.default_rng(1))[:, at]

    assert np.array_equal(few[:, 0], few[:, 3])
    assert few.mean(axis=0) == pytest.approx(among_all.mean(axis=0), abs=0.08)
    assert few.std(axis=0) == pytest.approx(among_all.std(axis=0), rel=0.2)
    assert few[:, 2].min() >= np.log(seen.limits_s[11]) - 1e-6


def test_a_kept_gain_is_read_again(layouts):
    """What the study keeps as JSON is the same gain, and fields of other versions are left alone."""
    sampler, _, seen = studied(layouts, 0, 0.1)
    found = sampler.gain(seen, layouts.values(3), layouts.values(CURRENT))

    assert gain_in({"gain": found.as_json() | {"later": 1}}) == found
    assert gain_in({}) is None
