from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t as student

from costmodels.step.error_models import MemoryErrorModel
from costmodels.step.memory.peak import MEMORY_PARTS
from costmodels.surrogates.hypotheses import (
    FEWEST_PAST,
    MEMORY_MULTIPLES,
    TRUST,
    FittedHistory,
    PastGroup,
    memory_hypotheses,
    step_hypotheses,
)
from costmodels.surrogates.predicted import Predicted
from costmodels.surrogates.surrogate import Seen, after

NUM_CANDIDATES, NUM_CONSTANTS, NUM_FEATURES = 80, 4, 3
EVERYWHERE = np.arange(NUM_CANDIDATES)


def predicted_of(rng, count=NUM_CANDIDATES, share=0.5):
    """Candidates whose constants do unlike things to them; all need `share` of their memory, more or less."""
    parts = rng.dirichlet(np.ones(len(MEMORY_PARTS)), count)
    needed = share * np.exp(rng.normal(0, 0.05, count))
    return Predicted(
        step_time_s=np.exp(rng.normal(0, 0.4, count)),
        constant_effects=rng.normal(0, 0.15, (count, NUM_CONSTANTS)),
        features=rng.uniform(-1, 1, (count, NUM_FEATURES)),
        needed_bytes=needed,
        capacity_bytes=np.ones(count),
        peak_bytes=0.9 * needed,
        memory_shares=parts,
        memory_error=MemoryErrorModel(scale=0.1),
        stall_variance=np.zeros(count),
    )


def seen_at(measured, log_value, bounded=(), log_edge=(), side=1.0):
    """What trials told, exactly."""
    return Seen(
        measured=np.array(measured, dtype=np.int64),
        log_value=np.array(log_value, dtype=float),
        variance=np.full(len(measured), 0.01**2),
        bounded=np.array(bounded, dtype=np.int64),
        log_edge=np.array(log_edge, dtype=float),
        side=np.full(len(bounded), side),
        mishap=np.full(len(bounded), 0.02),
    )


def group_of(rng, count, log_error, peak_error=0.0):
    """Earlier runs that erred so; `log_error` is a number or one per run."""
    predicted = predicted_of(rng, count)
    return PastGroup(
        predicted=predicted,
        step_time_s=predicted.step_time_s * np.exp(log_error),
        peak_bytes=predicted.peak_bytes * np.exp(peak_error),
    )


# Step times


@pytest.mark.parametrize("constant", [0, NUM_CONSTANTS - 1])
def test_one_wrong_constant_is_learned_from_three_trials(constant):
    """Where one constant errs by two of its deviations, three trials along its column halve the error of the rest."""
    predicted = predicted_of(np.random.default_rng(constant))
    effect = predicted.constant_effects[:, constant]
    truth = np.log(predicted.step_time_s) + 2 * effect
    tried = np.argsort(effect)[[0, 1, -1]]

    surrogate = after(step_hypotheses(predicted), seen_at(tried, truth[tried]))

    untried = np.setdiff1d(np.arange(NUM_CANDIDATES), tried)
    left = (truth - surrogate.mean_and_deviation(EVERYWHERE)[0])[untried]
    assert np.std(left) < 0.5 * np.std(2 * effect[untried])


def test_what_all_candidates_share_is_no_constants_error(rng):
    """A constant that slows all candidates alike is the common factor's alone: its column is zero."""
    predicted = predicted_of(rng)
    effects = predicted.constant_effects.copy()
    effects[:, 0] = 3.0

    cold, _ = step_hypotheses(replace(predicted, constant_effects=effects))

    assert np.abs(cold.points.linear[:, 0]).max() < 1e-12
    assert cold.num_scaled == NUM_CONSTANTS


def test_experience_is_a_further_hypothesis(rng):
    """Step times have two hypotheses, smooth or rough, and memory one per multiple, when nothing was run before.

    With earlier runs there is one more for each, TRUST times as probable; it starts from what the fit predicts.
    """
    predicted = predicted_of(rng)
    fitted = replace(predicted, step_time_s=1.3 * predicted.step_time_s)
    history = FittedHistory(predicted=fitted, groups=(group_of(rng, 8, rng.normal(0, 0.03, 8)),))

    *cold, warm = step_hypotheses(predicted, history)
    *of_memory, warm_memory = memory_hypotheses(predicted, history)

    assert len(cold) == len(step_hypotheses(predicted)) == 2
    assert np.allclose(warm.log_predicted, np.log(fitted.step_time_s))
    assert [one.chance for one in memory_hypotheses(predicted)] == list(MEMORY_MULTIPLES.values())
    assert len(of_memory) == len(MEMORY_MULTIPLES)
    assert warm.chance == warm_memory.chance == TRUST


def test_heavy_tails_of_memory_are_normals_of_three_scales(rng):
    """Student's t is drawn as normal hypotheses whose mixture has its 95% interval within a tenth."""
    error = MemoryErrorModel(scale=0.1, freedom=4)
    found = memory_hypotheses(replace(predicted_of(rng), memory_error=error))

    multiples = [one.prior.scale for one in found]
    drawn = rng.choice(multiples, 200_000, p=[one.chance for one in found]) * rng.standard_normal(200_000)
    assert np.quantile(np.abs(drawn), 0.95) == pytest.approx(student.ppf(0.975, 4), rel=0.1)
    assert all(one.points.linear[:, 0] == pytest.approx(0.1) for one in found)


def test_outliers_of_the_past_are_left_out(rng):
    """A run that took three times as long as all others explain is no observation, nor is one without a time."""
    errors = rng.normal(0, 0.02, 14)
    errors[5], errors[9] = np.log(3.0), np.nan
    history = FittedHistory(predicted=predicted_of(rng), groups=(group_of(rng, 14, errors),))

    *_, warm = step_hypotheses(predicted_of(rng), history)

    assert warm.past is not None
    assert 10 <= len(warm.past.values) <= 12
    assert np.abs(warm.past.values).max() < 0.1
    assert warm.prior.noise < 0.06


@pytest.mark.parametrize(("num_fast", "is_kept"), [(1, False), (4, True)])
def test_a_configuration_that_does_well_in_every_job_is_believed(rng, num_fast, is_kept):
    """Runs far faster than predicted are kept where the like of them were so in other jobs, not where one was."""
    groups = [group_of(rng, 10, rng.normal(0, 0.02, 10)) for _ in range(4)]
    for number, group in enumerate(groups):
        group.predicted.features[0] = (2.0, 2.0, 2.0)
        if number < num_fast:
            group.step_time_s[0] *= np.exp(-0.4)

    *_, warm = step_hypotheses(predicted_of(rng), FittedHistory(predicted=predicted_of(rng), groups=tuple(groups)))

    assert warm.past is not None
    assert (np.count_nonzero(warm.past.values < -0.3) == num_fast) == is_kept


@pytest.mark.parametrize(("count", "is_told"), [(FEWEST_PAST - 1, False), (FEWEST_PAST, True)])
def test_a_few_runs_are_no_history(rng, count, is_told):
    """Fewer than FEWEST_PAST runs with a time make no hypothesis, however many there are without one."""
    errors = np.r_[np.full(count, 0.1), np.full(6, np.nan)]
    history = FittedHistory(predicted=predicted_of(rng), groups=(group_of(rng, count + 6, errors),))

    assert len(step_hypotheses(predicted_of(rng), history)) == 2 + is_told


def test_each_earlier_job_has_an_error_of_its_own(rng):
    """A past job that was slow as a whole does not make the candidates slow: other jobs say how far jobs differ."""
    groups = tuple(group_of(rng, 8, offset + rng.normal(0, 0.01, 8)) for offset in (0.06, -0.06, 0.05, -0.05))
    predicted = predicted_of(rng)

    *_, warm = step_hypotheses(predicted, FittedHistory(predicted=predicted, groups=groups))

    mean, deviation = after((warm,), seen_at([], [])).mean_and_deviation(EVERYWHERE)
    assert np.abs(mean - warm.log_predicted).mean() < 0.04
    assert deviation.min() > 0.03


def test_what_the_past_left_unexplained_is_expected_again(rng):
    """Errors of the past that grow along a feature are predicted of candidates; nothing is without the past."""
    group = group_of(rng, 40, 0.0)
    slope = 0.2 * group.predicted.features[:, 0]
    group = replace(group, step_time_s=group.step_time_s * np.exp(slope))
    predicted = predicted_of(rng)

    *_, warm = step_hypotheses(predicted, FittedHistory(predicted=predicted, groups=(group,)))

    error = after((warm,), seen_at([], [])).mean_and_deviation(EVERYWHERE)[0] - warm.log_predicted
    assert np.corrcoef(error, predicted.features[:, 0])[0, 1] > 0.9


# Memory


def test_running_out_at_half_the_memory_speaks_for_larger_errors(rng):
    """Two candidates that ran out of memory with half of it predicted: the larger a multiple the more it gains, 2 and 4
    together come from 40% to over 95%, and most others are held not to fit, which none was before.
    """
    predicted = predicted_of(rng, share=0.5)
    hypotheses = memory_hypotheses(predicted)
    log_capacity = np.log(predicted.capacity_bytes)

    before = after(hypotheses, seen_at([], []))
    found = after(hypotheses, seen_at([], [], bounded=[0, 1], log_edge=log_capacity[:2]))

    assert before.probabilities == pytest.approx(list(MEMORY_MULTIPLES.values()))
    gained = found.probabilities / before.probabilities
    assert gained[0] < gained[1] < gained[2]
    assert found.probabilities[1:].sum() > 0.95
    assert before.probability_above(log_capacity, EVERYWHERE).mean() < 0.1
    assert found.probability_above(log_capacity, EVERYWHERE)[2:].mean() > 0.5


def test_peaks_as_predicted_speak_for_small_errors(rng):
    """Four measured peaks that are within a percent of the prediction make the smallest multiple more probable, and
    narrow what is believed of the others.
    """
    predicted = predicted_of(rng)
    hypotheses = memory_hypotheses(predicted)
    tried = np.arange(4)
    log_needed = np.log(predicted.needed_bytes)

    found = after(hypotheses, seen_at(tried, log_needed[tried] + rng.normal(0, 0.01, 4)))

    assert found.probabilities[0] > MEMORY_MULTIPLES[1.0] + 0.1
    before = after(hypotheses, seen_at([], [])).mean_and_deviation(EVERYWHERE)[1]
    assert (found.mean_and_deviation(EVERYWHERE)[1][4:] < before[4:]).all()


def test_a_part_of_memory_errs_for_those_that_have_it(rng):
    """Peaks that are too large in proportion to the activations' share teach of that part: candidates with large
    activations are believed to need more, those with hardly any are not.
    """
    predicted = predicted_of(rng)
    share = predicted.memory_shares[:, MEMORY_PARTS.index("activations")]
    truth = np.log(predicted.needed_bytes) + 0.5 * share
    tried = np.argsort(share)[::8]

    found = after(memory_hypotheses(predicted), seen_at(tried, truth[tried]))

    untried = np.setdiff1d(np.arange(NUM_CANDIDATES), tried)
    error = (found.mean_and_deviation(EVERYWHERE)[0] - np.log(predicted.needed_bytes))[untried]
    assert np.corrcoef(error, share[untried])[0, 1] > 0.8
    assert np.abs(error - 0.5 * share[untried]).mean() < 0.05
