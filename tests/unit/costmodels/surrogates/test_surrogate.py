from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import kstest

from costmodels.surrogates.gaussian_process import HyperPrior, Points
from costmodels.surrogates.surrogate import Hypothesis, PastErrors, Seen, after

NUM_CANDIDATES = 60
EVERYWHERE = np.arange(NUM_CANDIDATES)
PRIOR = HyperPrior(amplitude=0.2, length_scale=1.0, noise=0.05)


def hypothesis_of(rng, **changes):
    """Sixty candidates of two features, with one uncertain constant and a common offset."""
    effects = rng.normal(0, 0.2, NUM_CANDIDATES)
    made = Hypothesis(
        chance=1.0,
        log_predicted=rng.normal(0, 0.5, NUM_CANDIDATES),
        points=Points.alike(
            features=rng.uniform(-1, 1, (NUM_CANDIDATES, 2)),
            linear=np.stack([effects, np.full(NUM_CANDIDATES, 0.3)], axis=1),
        ),
        num_scaled=1,
        prior=PRIOR,
    )
    return replace(made, **changes)


@pytest.fixture
def hypothesis(rng):
    """One such hypothesis."""
    return hypothesis_of(rng)


def seen_at(measured, log_value, noise=0.01, bounded=(), log_edge=(), side=1.0):
    """Trials with such values, and others that know a bound only."""
    return Seen(
        measured=np.array(measured, dtype=np.int64),
        log_value=np.array(log_value, dtype=float),
        variance=np.full(len(measured), noise**2),
        bounded=np.array(bounded, dtype=np.int64),
        log_edge=np.array(log_edge, dtype=float),
        side=np.full(len(bounded), side),
        mishap=np.full(len(bounded), 1e-3),
    )


def past_at(points, values, noise=0.02):
    """Earlier runs with such errors."""
    return PastErrors(at=points, values=np.asarray(values), variance=np.full(len(points), noise**2))


# Draws


def test_a_residual_of_its_own_stays_uncertain_until_the_candidate_is_measured(rng):
    """Trials of all others leave a candidate its own variance, in moments and draws; its own trial removes it."""
    own_variance = np.zeros(NUM_CANDIDATES)
    own_variance[0] = 0.3**2
    calm = hypothesis_of(rng)
    hypothesis = replace(calm, points=replace(calm.points, own_variance=own_variance))
    others = EVERYWHERE[1:]
    values = calm.log_predicted[others]

    without = after((calm,), seen_at(others, values)).mean_and_deviation(EVERYWHERE[:1])[1]
    surrogate = after((hypothesis,), seen_at(others, values))
    deviation = surrogate.mean_and_deviation(EVERYWHERE[:1])[1]
    assert deviation**2 == pytest.approx(without**2 + 0.3**2, rel=0.05)
    drawn = surrogate.draw(4000, rng)[:, 0]
    assert drawn.std() == pytest.approx(deviation[0], rel=0.1)

    measured = after((hypothesis,), seen_at([0], [calm.log_predicted[0] + 0.2]))
    assert measured.draw(4000, rng)[:, 0].std() < 0.03


def test_without_trials_draws_follow_the_prior(rng):
    """Before any trial a candidate is normal about its prediction, with the deviation of all that may err."""
    hypothesis, at = hypothesis_of(rng), 7

    drawn = after((hypothesis,), seen_at([], [])).draw(4000, rng)

    deviation = np.sqrt(0.2**2 + 0.05**2 + np.sum(hypothesis.points.linear[at] ** 2))
    assert kstest((drawn[:, at] - hypothesis.log_predicted[at]) / deviation, "norm").pvalue > 1e-3


def test_measured_candidates_are_drawn_as_measured(rng, hypothesis):
    """Draws of a measured candidate have its value as mean and stay within the noise of the measurement, even where
    its error is its own and nothing smooth.
    """
    measured = np.arange(8)
    values = hypothesis.log_predicted[measured] + np.tile([0.3, -0.3], 4)

    drawn = after((hypothesis,), seen_at(measured, values)).draw(2000, rng)[:, measured]

    assert np.abs(drawn.mean(axis=0) - values).max() < 0.01
    assert drawn.std(axis=0).max() < 0.012


def test_an_unmeasured_twin_keeps_what_is_its_own(rng, hypothesis):
    """A candidate that the model cannot tell from a measured one is uncertain by what each has to itself."""
    hypothesis = replace(hypothesis, points=hypothesis.points.take(np.r_[0, 0, 2:NUM_CANDIDATES]))
    hypothesis.log_predicted[1] = hypothesis.log_predicted[0]

    surrogate = after((hypothesis,), seen_at([0], [hypothesis.log_predicted[0] + 0.4]))
    drawn = surrogate.draw(4000, rng)

    own = surrogate.fitted[0].process.hyper.noise
    assert own == pytest.approx(PRIOR.noise)
    assert drawn[:, 0].std() < 0.012
    assert own < drawn[:, 1].std() < 1.6 * own


def test_draws_have_the_moments_of_the_formula(rng, hypothesis):
    """Mean and deviation over 4,000 draws of two hypotheses are the closed-form ones, within 0.03."""
    other = replace(hypothesis, log_predicted=hypothesis.log_predicted + 0.3, chance=0.6)
    measured = np.arange(6)
    values = hypothesis.log_predicted[measured] + 0.1 + 0.05 * rng.standard_normal(6)

    surrogate = after((hypothesis, other), seen_at(measured, values))
    drawn = surrogate.draw(4000, rng)[:, 6:]

    mean, deviation = surrogate.mean_and_deviation(EVERYWHERE)
    assert np.abs(drawn.mean(axis=0) - mean[6:]).max() < 0.03
    assert np.abs(drawn.std(axis=0) - deviation[6:]).max() < 0.03


def test_draws_are_joint(rng):
    """Neighbours err alike: the draws of two near candidates are correlated, those of distant ones hardly."""
    features = np.array([[0.0, 0.0], [0.05, 0.0], [50.0, 0.0]])
    points = Points.alike(features=features, linear=np.zeros((3, 1)))
    hypothesis = hypothesis_of(rng, points=points, log_predicted=np.zeros(3))

    drawn = after((hypothesis,), seen_at([], [])).draw(4000, rng)

    correlation = np.corrcoef(drawn.T)
    assert correlation[0, 1] > 0.85
    assert abs(correlation[0, 2]) < 0.15


def test_a_shared_error_is_learned_from_few_trials(hypothesis):
    """Three trials that are all 50% slow teach that the untried are slow too."""
    surrogate = after((hypothesis,), seen_at([0, 1, 2], hypothesis.log_predicted[:3] + np.log(1.5)))

    error = surrogate.mean_and_deviation(EVERYWHERE)[0] - hypothesis.log_predicted
    assert np.median(np.exp(error[3:])) == pytest.approx(1.5, abs=0.2)


def test_the_same_generator_gives_the_same_draws():
    """What is believed and drawn is a function of what was seen and of the generator alone."""
    first, second = (
        after((hypothesis_of(np.random.default_rng(1)),), seen_at([0, 3, 5], [0.1, 0.2, -0.1])).draw(
            10, np.random.default_rng(7)
        )
        for _ in range(2)
    )

    assert np.array_equal(first, second)


def test_unseen_errors_are_calibrated():
    """Over twelve worlds drawn from the prior, 68% and 95% of the untried lie within one and two deviations."""
    within = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        hypothesis = hypothesis_of(rng)
        truth = after((hypothesis,), seen_at([], [])).draw(1, rng)[0].astype(float)
        mean, deviation = after((hypothesis,), seen_at(np.arange(12), truth[:12])).mean_and_deviation(EVERYWHERE)
        within.append(np.abs(truth - mean)[12:] < np.array([[1.0], [2.0]]) * deviation[12:])

    shares = np.mean(within, axis=(0, 2))
    assert shares[0] == pytest.approx(0.68, abs=0.1)
    assert shares[1] == pytest.approx(0.95, abs=0.04)


# Bounds


def test_a_bound_moves_its_candidate_and_those_like_it(hypothesis):
    """A candidate that took at least twice its prediction is believed to be slow, its twin nearly so, and the
    probability of exceeding the bound rises with it.
    """
    hypothesis = replace(hypothesis, points=hypothesis.points.take(np.r_[0, 0, 2:NUM_CANDIDATES]))
    log_edge = hypothesis.log_predicted + np.log(2.0)

    before = after((hypothesis,), seen_at([], []))
    surrogate = after((hypothesis,), seen_at([], [], bounded=[0], log_edge=log_edge[:1]))

    error = surrogate.mean_and_deviation(EVERYWHERE)[0] - hypothesis.log_predicted
    assert error[0] > 0.6
    assert error[1] == pytest.approx(error[0], abs=1e-6)
    assert (surrogate.probability_above(log_edge, EVERYWHERE)[:2] > 0.5).all()
    assert (before.probability_above(log_edge, EVERYWHERE)[:2] < 0.2).all()


def test_the_probability_of_exceeding_is_the_share_of_draws_that_do(rng, hypothesis):
    """probability_above agrees with 4,000 draws within 0.03, for two hypotheses that disagree."""
    other = replace(hypothesis, log_predicted=hypothesis.log_predicted - 1.0, chance=0.5)
    surrogate = after((hypothesis, other), seen_at([0], [hypothesis.log_predicted[0] - 0.4]))
    log_edge = hypothesis.log_predicted - 0.2

    share = (surrogate.draw(4000, rng) > log_edge).mean(axis=0)

    assert np.abs(surrogate.probability_above(log_edge, EVERYWHERE) - share)[1:].max() < 0.03


# What else was drawn


def test_what_was_drawn_beside_counts_once(rng):
    """A candidate that was measured is drawn as measured, whatever else was drawn of it; an untried one that the
    process knows nothing of has the deviation of both.
    """
    features = np.concatenate([np.zeros((1, 2)), np.full((1, 2), 50.0)])
    points = Points.alike(features=features, linear=np.zeros((2, 1)))
    hypothesis = hypothesis_of(rng, points=points, log_predicted=np.zeros(2))
    beside = (0.3 * rng.standard_normal((4000, 2))).astype(np.float32)

    drawn = after((hypothesis,), seen_at([0], [0.5], noise=0.001)).draw(4000, rng, beside=[beside])

    assert np.abs(drawn[:, 0] - 0.5).max() < 0.006
    assert drawn[:, 1].std() == pytest.approx(np.sqrt(0.3**2 + 0.2**2 + 0.05**2), rel=0.05)


def test_what_was_drawn_beside_explains_its_share_of_a_measurement(rng):
    """The twin of a measured candidate, of which the same was drawn beside, takes what was measured up to what each has
    to itself: a draw of the process explains only what is left, whatever runs of the past it holds too.
    """
    points = Points.alike(features=np.array([[0.0, 0.0], [0.0, 0.0]]), linear=np.zeros((2, 1)))
    elsewhere = Points.alike(features=np.full((4, 2), 50.0), linear=np.zeros((4, 1)))
    hypothesis = hypothesis_of(rng, points=points, log_predicted=np.zeros(2), past=past_at(elsewhere, np.full(4, 0.3)))
    beside = (0.3 * rng.standard_normal((4000, 1))).astype(np.float32) * np.ones(2, dtype=np.float32)

    twin = after((hypothesis,), seen_at([0], [0.2], noise=0.001)).draw(4000, rng, beside=[beside])[:, 1]

    assert twin.mean() == pytest.approx(0.2, abs=0.03)
    assert twin.std() < 2 * PRIOR.noise


def test_what_was_drawn_beside_is_that_of_the_draw(rng):
    """With two hypotheses each row of `beside` stays with its own draw, and only with the hypothesis it belongs to."""
    exact = HyperPrior(amplitude=0.005, length_scale=1.0, noise=0.001)
    hypothesis = hypothesis_of(rng, prior=exact, log_predicted=np.zeros(NUM_CANDIDATES))
    hypothesis = replace(hypothesis, points=replace(hypothesis.points, linear=np.zeros((NUM_CANDIDATES, 1))))
    far = replace(hypothesis, log_predicted=np.full(NUM_CANDIDATES, 100.0))
    beside = np.arange(50, dtype=np.float32)[:, None] * np.ones(NUM_CANDIDATES, dtype=np.float32)

    drawn = after((far, hypothesis), seen_at([], [])).draw(50, rng, beside=[None, beside])

    of_far = np.abs(drawn - 100.0).max(axis=1) < 0.1
    as_beside = np.abs(drawn - beside).max(axis=1) < 0.1
    assert of_far.sum() == as_beside.sum() == 25
    assert (of_far ^ as_beside).all()


def test_told_columns_say_nothing_more(rng, hypothesis):
    """corrected() changes the predictions, and drops the constants that were told from candidates and past alike."""
    hypothesis = replace(hypothesis, past=past_at(hypothesis.points.take(slice(0, 5)), np.zeros(5)))
    change = rng.normal(0, 0.1, NUM_CANDIDATES)

    corrected = hypothesis.corrected(change, [0])

    assert np.array_equal(corrected.log_predicted, hypothesis.log_predicted + change)
    assert corrected.past is not None
    for points in (corrected.points, corrected.past.at):
        assert (points.linear[:, 0] == 0).all()
        assert (points.linear[:, 1] == 0.3).all()
    assert (hypothesis.points.linear[:, 0] != 0).all()


# Hypotheses


def with_past(rng, error_of_past):
    """A hypothesis without a past, and one four times as probable whose forty past runs erred so."""
    cold = hypothesis_of(rng, prior=replace(PRIOR, amplitude=0.3))
    runs = cold.points.take(np.arange(20, 60))
    warm = replace(cold, chance=4.0, past=past_at(runs, error_of_past(runs.features)), prior=PRIOR)
    return cold, warm


def test_means_tell_what_is_likely_above_an_edge(rng):
    """The means, with deviations where hypotheses disagree, tell the same as the mixture's probabilities."""
    cold, misleading = with_past(rng, lambda features: -0.4 * features[:, 0])
    tried, everywhere = np.arange(3), np.arange(len(cold.log_predicted))
    found = after((cold, misleading), seen_at(tried, cold.log_predicted[tried] + 0.1))

    means = found.means()
    edge = np.quantile(means, 0.5, axis=0) + rng.normal(0, 0.1, means.shape[1])

    assert found.probabilities @ means == pytest.approx(found.mean_and_deviation(everywhere)[0], abs=1e-9)
    likely = found.probability_above(edge, everywhere) > 0.5
    assert np.array_equal(found.is_likely_above(edge, everywhere, means), likely)
    assert 0 < (means > edge).all(axis=0).sum() < likely.sum() < len(likely)


def test_a_past_has_its_say_as_long_as_it_is_right(rng):
    """A past that erred to the other side starts at 80%, and is below 10% after four trials; one that erred as the
    study does is above 90%, and predicts the untried.
    """
    cold, misleading = with_past(rng, lambda features: -0.4 * features[:, 0])
    right = replace(misleading, past=replace(misleading.past, values=-misleading.past.values))
    truth = cold.log_predicted + 0.4 * cold.points.features[:, 0]
    tried = np.argsort(-np.abs(cold.points.features[:20, 0]))[:4]

    before = after((cold, misleading), seen_at([], [])).probabilities
    misled, led = (after((cold, warm), seen_at(tried, truth[tried])) for warm in (misleading, right))

    assert before[1] == pytest.approx(0.8)
    assert misled.probabilities[1] < 0.1
    assert led.probabilities[1] > 0.9
    untried = np.setdiff1d(np.arange(20), tried)
    error = np.abs(led.mean_and_deviation(EVERYWHERE)[0] - truth)[untried]
    assert error.mean() < 0.3 * np.abs(truth - cold.log_predicted)[untried].mean()


def test_bounds_weigh_hypotheses_too(rng):
    """A candidate that broke a bound which one hypothesis holds impossible makes the other one more probable."""
    low = hypothesis_of(rng)
    high = replace(low, log_predicted=low.log_predicted + 1.5)

    surrogate = after((low, high), seen_at([], [], bounded=[4], log_edge=[low.log_predicted[4] + 1.2]))

    assert surrogate.probabilities[1] > 0.95


# Outliers


def test_one_run_that_was_slowed_down_speaks_for_itself_only(rng, hypothesis):
    """A trial twenty times slower than all others let expect is drawn as measured, and its likes hardly slower."""
    measured = np.arange(8)
    values = hypothesis.log_predicted[measured] + 0.02 * rng.standard_normal(8)
    slowed = values.copy()
    slowed[3] += np.log(20.0)

    plain, surprised = (after((hypothesis,), seen_at(measured, seen)) for seen in (values, slowed))

    assert np.flatnonzero(surprised.fitted[0].surprise).tolist() == [3]
    assert not plain.fitted[0].surprise.any()
    drawn = surprised.draw(500, rng)
    assert drawn[:, 3].mean() == pytest.approx(slowed[3], abs=0.02)
    others = np.setdiff1d(EVERYWHERE, measured)
    shift = surprised.mean_and_deviation(others)[0] - plain.mean_and_deviation(others)[0]
    assert np.abs(shift).max() < 0.3


def test_what_is_fast_or_happens_often_is_no_outlier(hypothesis):
    """A trial far below what was expected is believed: its likes may be the best. Of twelve trials at most four are set
    aside, however far five of them lie.
    """
    times = np.array([[1, 1, 1, 1 / 20, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 20, 30, 1, 1, 80, 1, 1, 50, 1, 100]])

    fast, often = (
        after((hypothesis,), seen_at(np.arange(12), hypothesis.log_predicted[:12] + log_times)).fitted[0].surprise
        for log_times in np.log(times)
    )

    assert not fast.any()
    assert 0 < np.count_nonzero(often) <= 4


def test_a_hypothesis_survives_one_outlier(rng):
    """A past that predicts all trials but one keeps most of its say against one that predicts none of them well."""
    cold = hypothesis_of(rng)
    past_error = 0.4 * np.sin(4 * cold.points.features[:, 0])
    warm = replace(cold, past=past_at(cold.points, past_error, noise=0.05))
    values = (cold.log_predicted + past_error)[:10]
    values[4] += np.log(20.0)

    assert after((cold, warm), seen_at(np.arange(10), values)).probabilities[1] > 0.9


def test_candidates_may_be_slowed_down_like_those_that_were(rng):
    """Where one of ten trials lay far above the others, one draw in ten of an unmeasured candidate does so too."""
    hypothesis = hypothesis_of(rng, outliers=(0.0, 0.0))
    measured = np.arange(10)
    values = hypothesis.log_predicted[measured] + 0.02 * rng.standard_normal(10)
    values[3] += np.log(20.0)

    drawn = after((hypothesis,), seen_at(measured, values)).draw(4000, rng)

    above = drawn[:, 30] - np.median(drawn[:, 30])
    assert np.mean(above > 1.0) == pytest.approx(0.1 * 0.74, abs=0.02)  # P(|N| > 1 / log 20)
    assert np.mean(above < -1.0) < 0.01


def test_the_regular_part_is_the_same_draw_without_its_slowdown(rng):
    """As if nothing slowed an unmeasured candidate down, draws differ from the others by an excess at the rate of the
    outliers, and not at all for what was measured.
    """
    hypothesis = hypothesis_of(rng, outliers=(2.0, 8.0))
    measured = np.arange(10)
    seen = seen_at(measured, hypothesis.log_predicted[measured] + 0.02 * rng.standard_normal(10))

    surrogate = after((hypothesis, replace(hypothesis, chance=0.5)), seen)
    drawn, regular = (each.draw(4000, np.random.default_rng(0)) for each in (surrogate, surrogate.regular))

    excess = drawn - regular
    assert not excess[:, measured].any()
    assert excess.min() >= 0
    assert (excess[:, 10:] > 0).mean() == pytest.approx(2 / 20, abs=0.01)
    assert excess[excess > 0].mean() == pytest.approx(1.0, abs=0.02)
