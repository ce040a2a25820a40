from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scipy.stats import kendalltau

from costmodels.blocks.operator import COLLECTIVES, OpKind, Phase
from costmodels.job.runtime import CONSTANTS
from costmodels.surrogates.error_terms import step_terms
from costmodels.surrogates.operator_surrogate import timing_variance
from costmodels.surrogates.predicted import predict
from trials.backend import OperatorSample
from trials.simulated.backend import SimulatedBackend
from tuner.search.observations import observations_of
from tuner.search.operator_posterior import TOLD_BY, OperatorPosterior, errors_of, predicted_times
from tuner.search.posterior import posterior_of

NUM_DRAWS = 100


@pytest.fixture(scope="module")
def operators(problem):
    """The operators of all candidates."""
    measured, grid = problem
    return OperatorPosterior(terms_of=partial(step_terms, measured.setting, grid))


def world_of(setting, seed, **options):
    """A simulated world of the setting."""
    return SimulatedBackend(job=setting.job, cluster=setting.cluster, runtime=setting.runtime, seed=seed, **options)


def sample_of(kind=OpKind.MATMUL, phase=Phase.FORWARD, shape=(1.0, 2.0), name="", time_s=1.0, count=10):
    """A measured operator."""
    return OperatorSample(kind=kind, phase=phase, shape=shape, time_s=time_s, count=count, name=name)


# Measured beside predicted


@pytest.mark.slow
def test_every_operator_is_found_with_its_name_and_without(operators):
    """Each shape of each term has a predicted time under its name and under none; a collective has no phase."""
    for term in operators.terms.terms:
        phase = None if term.kind in COLLECTIVES else term.phase
        for shape in term.shape.tolist():
            assert (term.name, term.kind, phase, tuple(shape)) in operators.predicted_s
            assert ("", term.kind, phase, tuple(shape)) in operators.predicted_s
    named = predicted_times(operators.terms)
    first = operators.terms.terms[0]
    phase = None if first.kind in COLLECTIVES else first.phase
    assert named[first.name, first.kind, phase, tuple(first.shape[0].tolist())] == pytest.approx(first.time_s[0])


def test_errors_are_logarithms_of_measured_over_predicted():
    """Rows of one kind and phase stay together, in the order in which they were measured, with the variance of their
    counts.
    """
    predicted_s = {
        ("qkv", OpKind.MATMUL, Phase.FORWARD, (1.0, 2.0)): 2.0,
        ("", OpKind.MATMUL, Phase.FORWARD, (1.0, 3.0)): 4.0,
        ("", OpKind.MATMUL, Phase.BACKWARD, (1.0, 2.0)): 8.0,
    }
    timings = [
        sample_of(name="qkv", time_s=3.0, count=5),
        sample_of(phase=Phase.BACKWARD, time_s=8.0),
        sample_of(shape=(1.0, 3.0), time_s=2.0, count=50),
    ]

    forward, backward = errors_of(timings, predicted_s)

    assert (forward.kind, forward.phase, backward.phase) == (OpKind.MATMUL, Phase.FORWARD, Phase.BACKWARD)
    assert forward.shape.tolist() == [[1.0, 2.0], [1.0, 3.0]]
    assert forward.log_error == pytest.approx(np.log([1.5, 0.5]))
    assert forward.variance == pytest.approx(timing_variance(np.array([5, 50])))
    assert backward.log_error == pytest.approx([0.0])


def test_an_unknown_name_is_known_by_its_shape():
    """An operator that a trace calls by another name is predicted by its shape; of two names each has its own time.
    Shapes and kinds that no candidate has, and times that are predicted as zero, are no errors.
    """
    forward = OpKind.MATMUL, Phase.FORWARD
    predicted_s = {("qkv", *forward, (1.0, 2.0)): 2.0, ("", *forward, (1.0, 2.0)): 4.0, ("", *forward, (5.0,)): 0.0}

    (found,) = errors_of([sample_of(name="gemm_kernel"), sample_of(name="qkv")], predicted_s)

    assert found.log_error == pytest.approx(-np.log([4.0, 2.0]))
    strange = [sample_of(shape=(5.0,)), sample_of(kind=OpKind.NORM), sample_of(shape=(9.0, 9.0))]
    assert errors_of(strange, predicted_s) == ()


def test_a_collective_is_one_in_both_phases():
    """All-reduces of forward and backward are rows of one kind without a phase."""
    predicted_s = {("", OpKind.ALL_REDUCE, None, (1.0, 2.0)): 1.0}
    timings = [sample_of(kind=OpKind.ALL_REDUCE, phase=phase) for phase in Phase]

    (found,) = errors_of(timings, predicted_s)

    assert found.phase is None
    assert len(found.log_error) == len(timings)


# What they change


def test_nothing_is_taken_apart_before_something_is_measured(problem):
    """The candidates' steps are taken apart at the first measured time, and only once; times of operators that no
    candidate has are as good as none.
    """
    measured, grid = problem
    calls = []

    def terms_of():
        calls.append(1)
        return step_terms(measured.setting, grid.take(np.arange(3)))

    lazy = OperatorPosterior(terms_of=terms_of)
    rng = np.random.default_rng(0)

    assert lazy.compose((), 5, rng) is None
    assert calls == []
    samples = samples_of(problem, 0, [0])
    assert lazy.compose(samples, 5, rng) is not None
    assert lazy.compose(samples, 5, rng) is not None
    assert lazy.compose([sample_of(shape=(3.0, 3.0, 3.0, 3.0))], 5, rng) is None
    assert calls == [1]


def samples_of(problem, seed, positions, **options):
    """Operator times of some candidates in a simulated world."""
    measured, grid = problem
    world = world_of(measured.setting, seed, **options)
    return tuple(
        sample for at in positions for sample in world.measure(grid.config(int(at)), trial_number=0).operator_samples
    )


@pytest.mark.slow
def test_slow_kernels_slow_their_candidates(problem, operators):
    """Matrix products that all take half again as long lengthen every step, most of all where they are most of it, and
    least where devices wait for their hosts.
    """
    slow = [
        replace(sample, time_s=1.5 * sample.time_s)
        for sample in samples_of(problem, 0, np.arange(0, len(problem[1]), 40), operator_error=0.0, noise=0.0)
        if sample.kind is OpKind.MATMUL
    ]

    composition, told = operators.compose(slow, NUM_DRAWS, np.random.default_rng(0))

    assert (composition.mean > 0).all()
    assert np.median(composition.mean) > 0.05
    assert composition.mean.max() == pytest.approx(np.log(1.5), abs=0.15)
    assert told == {"matmul_efficiency", "grouped_matmul_efficiency"}  # a dense model has no grouped ones to measure


@pytest.mark.slow
def test_a_constant_is_told_by_all_its_kinds(problem, operators):
    """The network's efficiency is told once every collective of the candidates is measured, and not before."""
    samples = samples_of(problem, 0, np.arange(0, len(problem[1]), 60))
    used = {term.kind for term in operators.terms.terms if term.kind in COLLECTIVES}
    rng = np.random.default_rng(0)

    told_by_all = operators.compose(samples, 2, rng)[1]

    assert len(used) > 1
    assert "network_efficiency" in told_by_all
    for kind in used:
        some = [sample for sample in samples if sample.kind is not kind]
        assert "network_efficiency" not in operators.compose(some, 2, rng)[1]


def test_only_constants_of_profiles_are_told():
    """Every name in TOLD_BY is a constant that the surrogate has a column for."""
    assert set(TOLD_BY) <= set(CONSTANTS)


@pytest.mark.slow
def test_what_was_measured_before_the_study_counts(problem, operators):
    """Times of the past change predictions before any trial, as the same times of the study's own trials do."""
    samples = samples_of(problem, 3, [0, 100, 200])
    past = replace(operators, past=errors_of(samples, operators.predicted_s))

    from_past, told = past.compose((), NUM_DRAWS, np.random.default_rng(0))
    from_trials, told_by_trials = operators.compose(samples, NUM_DRAWS, np.random.default_rng(0))

    assert from_past.mean == pytest.approx(from_trials.mean)
    assert told == told_by_trials


def error_and_rank(posterior, found, rest, truth):
    """Error of the median draw of the untried, and how well it ranks them (Kendall's tau)."""
    median = np.median(posterior.draw(found, NUM_DRAWS, np.random.default_rng(0))[:, rest], axis=0)
    return np.sqrt(np.mean((median - truth[rest]) ** 2)), kendalltau(median, truth[rest])[0]


@pytest.mark.slow
def test_operators_of_three_trials_improve_the_ranking_of_the_rest(problem, operators):
    """In eight worlds whose operators err by 30%, and where nothing else slows single runs down, the operator times of
    three trials lower the error of the untried below what the step times alone tell, and rank them better.
    """
    measured, grid = problem
    predicted = predict(measured, grid)
    posterior = posterior_of(predicted, grid, operators=operators)
    posterior = replace(posterior, steps=tuple(replace(one, outliers=None) for one in posterior.steps))
    fits = np.flatnonzero(predicted.needed_bytes < 0.8 * predicted.capacity_bytes)
    tried = fits[np.argsort(predicted.step_time_s[fits])[[0, 10, 60]]]
    rest = np.setdiff1d(fits, tried)
    by_steps, by_operators = [], []
    for seed in range(8):
        world = world_of(measured.setting, seed, operator_error=0.3)
        outcomes = [world.measure(grid.config(int(at)), trial_number=0) for at in tried]
        steps = replace(
            observations_of([], lambda _: None),
            measured=tried,
            log_step_s=np.log([outcome.step_time_s for outcome in outcomes]),
            variance=np.full(3, 0.01**2),
            explored=frozenset(tried.tolist()),
        )
        samples = tuple(sample for outcome in outcomes for sample in outcome.operator_samples)
        truth = np.log(world.hidden_step(grid).step_time_s)
        by_steps.append(error_and_rank(posterior, steps, rest, truth))
        by_operators.append(error_and_rank(posterior, replace(steps, samples=samples), rest, truth))

    (error, tau), (better_error, better_tau) = np.mean(by_steps, axis=0), np.mean(by_operators, axis=0)
    assert better_error < 0.99 * error
    assert better_tau > tau


@pytest.mark.slow
def test_a_world_of_exact_predictions_stays_as_predicted(problem, operators):
    """Where operators take what was predicted, their times change no step by more than 2%, and leave little open."""
    samples = samples_of(problem, 0, np.arange(0, len(problem[1]), 60), operator_error=0.0, noise=0.0)

    composition, _ = operators.compose(samples, NUM_DRAWS, np.random.default_rng(0))

    assert np.abs(composition.mean).max() < 0.02
    assert np.median(composition.deviation.std(axis=0)) < 0.03
