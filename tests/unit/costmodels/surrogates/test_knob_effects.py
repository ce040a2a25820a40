import itertools

import numpy as np
import pytest

from costmodels.surrogates.knob_effects import CHANCES, KNOB_NOISE, SCALES, KnobDesign, basis_of, draw_effects

LAYOUTS = 6


def design(num_values, *, today=0, positions=None, ties=None, known=None):
    """The prior of a knob on six layouts."""
    return KnobDesign(
        basis=basis_of(num_values, today, positions),
        ties=np.ones((LAYOUTS, 1)) if ties is None else ties,
        active=np.ones(LAYOUTS, dtype=np.bool_),
        known=np.zeros((LAYOUTS, num_values)) if known is None else known,
    )


def exact_mean(designs, layouts, codes, values, covariance):
    """Mean effect of every value on layout 0, and the chance that each knob is idle, over all patterns of scales."""
    is_set = np.ones(codes.shape, dtype=np.bool_)
    columns = [one.columns(layouts, codes[:, at], is_set[:, at]) for at, one in enumerate(designs)]
    noise = covariance + KNOB_NOISE**2 * np.eye(len(values))
    weights, means = [], []
    patterns = list(itertools.product(range(len(SCALES)), repeat=len(designs)))
    for pattern in patterns:
        scaled = np.concatenate([SCALES[scale] * each for scale, each in zip(pattern, columns, strict=True)], axis=1)
        total = noise + scaled @ scaled.T
        _, log_det = np.linalg.slogdet(total)
        weights.append(
            -0.5 * (values @ np.linalg.solve(total, values) + log_det)
            + sum(np.log(CHANCES[scale]) for scale in pattern)
        )
        found = scaled.T @ np.linalg.solve(total, values)
        start, of_values = 0, []
        for scale, one, each in zip(pattern, designs, columns, strict=True):
            part = SCALES[scale] * found[start : start + each.shape[1]].reshape(one.basis.shape[1], one.ties.shape[1])
            of_values.append(one.basis @ part @ one.ties[0])
            start += each.shape[1]
        means.append(of_values)
    share = np.exp(np.array(weights) - max(weights))
    share /= share.sum()
    mean = [sum(p * each[at] for p, each in zip(share, means, strict=True)) for at in range(len(designs))]
    idle = [sum(p for p, each in zip(share, patterns, strict=True) if each[at] == 0) for at in range(len(designs))]
    return mean, idle


def test_draws_agree_with_the_enumerated_posterior():
    """Means of the drawn effects and shares of idle knobs are those of the posterior over all patterns of scales."""
    rng = np.random.default_rng(0)
    designs = [design(2), design(3), design(4, today=1, positions=np.linspace(0, 1, 4))]
    layouts = rng.integers(0, LAYOUTS, 12)
    codes = np.column_stack([rng.integers(0, len(one.basis), 12) for one in designs])
    truth = np.where(codes[:, 0] == 1, -0.05, 0.0) + np.array([0.03, 0.0, -0.01, -0.02])[codes[:, 2]]
    covariance = 0.02**2 * (layouts[:, None] == layouts) + 0.01**2 * np.eye(12)
    values = truth + 0.01 * rng.standard_normal(12)
    drawn = draw_effects(designs, layouts, codes, np.ones(codes.shape, dtype=np.bool_), values, covariance, 4000, rng)
    mean, idle = exact_mean(designs, layouts, codes, values, covariance)

    for at in range(len(designs)):
        of_values = drawn.of_values(at, np.zeros((4000, 1), dtype=np.int64))[:, 0]
        assert of_values.mean(axis=0) == pytest.approx(mean[at], abs=0.003)
    assert (drawn.scales == 0).mean(axis=0) == pytest.approx(idle, abs=0.04)


def test_without_trials_the_prior_is_drawn():
    """Before any trial half of the draws say that a knob does nothing, and effects have no sign."""
    none = np.zeros(0, dtype=np.int64)
    drawn = draw_effects(
        [design(2)],
        none,
        none.reshape(0, 1),
        np.zeros((0, 1), dtype=np.bool_),
        np.zeros(0),
        np.zeros((0, 0)),
        4000,
        np.random.default_rng(1),
    )
    effect = drawn.of_values(0, np.zeros((4000, 1), dtype=np.int64))[:, 0, 1]

    assert (drawn.scales == 0).mean(axis=0)[0] == pytest.approx(CHANCES[0], abs=0.03)
    assert abs(effect.mean()) < 0.003
    assert (effect == 0).mean() == pytest.approx(CHANCES[0], abs=0.03)


def test_a_knob_that_does_nothing_is_found_out():
    """After eight pairs of runs with equal times, few draws leave a switch an effect of a percent."""
    layouts, codes = np.repeat(np.arange(4), 2), np.tile([0, 1], 4)[:, None]
    covariance = 0.05**2 * (layouts[:, None] == layouts) + 0.005**2 * np.eye(8)
    drawn = draw_effects(
        [design(2)],
        layouts,
        codes,
        np.ones((8, 1), dtype=np.bool_),
        np.repeat([0.1, 0.0, -0.1, 0.05], 2),
        covariance,
        2000,
        np.random.default_rng(2),
    )
    effect = drawn.of_values(0, np.zeros((2000, 1), dtype=np.int64))[:, 0, 1]

    assert (drawn.scales == 0).mean(axis=0)[0] > 0.75
    assert (np.abs(effect) > 0.01).mean() < 0.01


def test_an_effect_follows_what_it_is_tied_to():
    """An effect in proportion to a share is predicted for a layout with another share, which no trial ran."""
    share = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    one = design(2, ties=np.column_stack([0.1 * np.ones(LAYOUTS), share]))
    layouts, codes = np.repeat(np.arange(4), 2), np.tile([0, 1], 4)[:, None]
    values = np.where(codes[:, 0] == 1, -0.1 * share[layouts], 0.0)
    covariance = 0.05**2 * (layouts[:, None] == layouts) + 0.003**2 * np.eye(8)
    drawn = draw_effects(
        [one], layouts, codes, np.ones((8, 1), dtype=np.bool_), values, covariance, 2000, np.random.default_rng(3)
    )
    effect = drawn.of_values(0, np.tile(np.arange(LAYOUTS), (2000, 1)))[:, :, 1].mean(axis=0)

    assert effect[5] == pytest.approx(-0.1, abs=0.02)
    assert effect[0] == pytest.approx(0.0, abs=0.01)


def test_ordered_values_share_what_is_learned():
    """A value between two slow neighbours is expected to be slow, and today's value has no effect in any draw."""
    one = design(5, today=0, positions=np.linspace(0, 1, 5))
    codes = np.array([0, 2, 4, 0, 2, 4])[:, None]
    values = np.array([0.0, 0.05, 0.1] * 2)
    drawn = draw_effects(
        [one],
        np.zeros(6, dtype=np.int64),
        codes,
        np.ones((6, 1), dtype=np.bool_),
        values,
        0.05**2 * np.ones((6, 6)) + 0.003**2 * np.eye(6),
        1000,
        np.random.default_rng(4),
    )
    of_values = drawn.of_values(0, np.zeros((1000, 1), dtype=np.int64))[:, 0]

    assert 0.05 < of_values[:, 3].mean() < 0.1
    assert not of_values[:, 0].any()


def test_pairs_add_up():
    """The effect of a pair is the sum of its knobs' effects, without those that are not set."""
    rng = np.random.default_rng(5)
    known = np.tile([0.0, -0.2], (LAYOUTS, 1))
    designs = [design(2, known=known), design(3)]
    none = np.zeros(0, dtype=np.int64)
    drawn = draw_effects(
        designs,
        none,
        np.zeros((0, 2), dtype=np.int64),
        np.zeros((0, 2), dtype=np.bool_),
        np.zeros(0),
        np.zeros((0, 0)),
        50,
        rng,
    )
    layouts, codes = np.array([0, 1, 5]), np.array([[1, 2], [1, 1], [0, 2]])
    is_set = np.array([[True, True], [True, False], [True, True]])
    expected = np.zeros((50, 3))
    for knob in range(2):
        of_values = drawn.of_values(knob, layouts)
        expected += of_values[:, np.arange(3), codes[:, knob]] * is_set[:, knob]

    assert drawn.of_pairs(layouts, codes, is_set) == pytest.approx(expected)
    assert drawn.of_pairs(layouts, codes, is_set)[:, 1].mean() == pytest.approx(-0.2, abs=0.05)
