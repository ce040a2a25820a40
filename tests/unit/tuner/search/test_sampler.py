import itertools
import pickle
import time
from dataclasses import replace

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.step.error_models import MemoryErrorModel
from costmodels.surrogates.predicted import Predicted
from trials.backend import Status
from tuner.search.acquisition import UNMEASURED, UnexploredDraws
from tuner.search.failures import failure_conclusions
from tuner.search.observations import STATUS
from tuner.search.population import P_STAR, read_moments
from tuner.search.posterior import posterior_of
from tuner.search.sampler import CONFIRMATIONS, ThompsonSampler
from tuner.search.stopping import StopReason
from tuner.search.waiting import Wait

optuna.logging.set_verbosity(optuna.logging.ERROR)


def grid_of(num_devices=16, opened=("zero_stage",)):
    """All (pp, tp, dp) of the devices with both ZeRO stages: 30 candidates on 16 devices."""
    powers = [2**i for i in range(num_devices.bit_length())]
    configs = [
        ParallelConfig(pp=pp, tp=tp, dp=dp, zero_stage=zero)
        for pp, tp, dp in itertools.product(powers, repeat=3)
        if pp * tp * dp == num_devices
        for zero in (0, 1)
    ]
    return ConfigGrid.from_configs(configs, opened)


def features_of(grid):
    """Logarithms of the degrees and the ZeRO stage."""
    return np.stack([np.log2(grid.pp), np.log2(grid.tp), np.log2(grid.dp), grid.zero_stage], axis=1) / 3


def world(grid, seed=0):
    """Predicted step times, and true ones that differ by a smooth factor."""
    rng = np.random.default_rng(seed)
    predicted = 1.0 + 0.3 * np.log2(grid.tp) ** 1.5 + 0.1 * np.log2(grid.pp)
    slope = rng.normal(0, 0.15, 3)
    true = predicted * np.exp(features_of(grid)[:, :3] @ slope * 2)
    return predicted, true


@pytest.fixture(scope="module")
def grid():
    """The 30 candidates of 16 devices."""
    return grid_of()


def make(grid, **options):
    """A sampler with the world's predictions."""
    return sampler_of(grid, world(grid)[0], **options)


def sampler_of(grid, predicted_s, *, memory_share=None, memory_error=0.1, **options):
    """A sampler with such predictions."""
    predicted = Predicted.of_times(predicted_s, features_of(grid))
    if memory_share is not None:
        needed = {"needed_bytes": memory_share, "peak_bytes": memory_share, "capacity_bytes": np.ones(len(grid))}
        predicted = replace(predicted, **needed, memory_error=MemoryErrorModel(scale=memory_error))
    return ThompsonSampler(grid, posterior_of(predicted, grid), **options)


def run(sampler, true, num_trials):
    """An ask/tell loop; returns the study and the positions in the order of the trials."""
    study = optuna.create_study(sampler=sampler)
    order = []
    for _ in range(num_trials):
        trial = study.ask(fixed_distributions=sampler.search_space)
        order.append(sampler.position_of(trial.params))
        study.tell(trial, true[order[-1]])
    return study, order


@pytest.fixture(scope="module")
def undisturbed(grid):
    """The first eight choices of a sampler that nothing disturbs."""
    return run(make(grid), world(grid)[1], 8)[1]


@pytest.fixture(scope="module")
def exhausted():
    """Twenty candidates, a study in which all were tried and three again, and its choices."""
    grid = grid_of(8)
    return grid, *run(make(grid), world(grid)[1], len(grid) + 3)


def known_to(sampler, study):
    """What the trials of a study tell its sampler."""
    return sampler.observations(study.get_trials(deepcopy=False))


def fail(sampler, *statuses):
    """A study whose trials failed with these statuses, and the positions in their order; None is a plain failure."""
    study = optuna.create_study(sampler=sampler)
    failed = []
    for status in statuses:
        trial = study.ask(fixed_distributions=sampler.search_space)
        if status is not None:
            trial.set_user_attr(STATUS, status.value)
        failed.append(sampler.position_of(trial.params))
        study.tell(trial, state=TrialState.FAIL)
    return study, failed


def test_it_finds_the_best_in_a_plain_optimize_loop(grid):
    """Whoever uses only the sampler tunes with study.optimize; it stops by itself, within 5% of the best."""
    predicted, true = world(grid, seed=3)
    sampler = sampler_of(grid, predicted, stop_when_confident=True)
    study = optuna.create_study(sampler=sampler)

    def objective(trial):
        config = sampler.suggest(trial)
        return float(true[sampler.position_of(config.values(grid.dimensions))])

    study.optimize(objective, n_trials=len(grid))

    assert study.best_value <= 1.05 * true.min()
    assert len(study.trials) < len(grid) / 2
    assert study.user_attrs[P_STAR] > 0.9


@pytest.mark.slow
def test_candidates_are_repeated_once_all_were_tried(exhausted):
    """The sampler names each candidate once; in a loop that goes on, the best ones are repeated, and nothing raised."""
    grid, _, order = exhausted

    assert sorted(order[: len(grid)]) == list(range(len(grid)))
    assert set(order[len(grid) :]) <= set(np.argsort(world(grid)[1])[:3].tolist())


def test_close_candidates_are_measured_again_side_by_side(grid):
    """A settled search has one trial of each close candidate at a time; it waits for what may change who is close."""
    sampler = make(grid, repeats=2, confidence=0.01)
    study = optuna.create_study(sampler=sampler)
    first, second = (study.ask(fixed_distributions=sampler.search_space) for _ in range(2))
    study.tell(first, 1.0)
    waits_for_a_new_one = sampler.waits(known_to(sampler, study))
    study.tell(second, 1.001)

    replicates = []
    while (wait := sampler.waits(known_to(sampler, study))) is None:
        replicates.append(study.ask(fixed_distributions=sampler.search_space).params)

    assert waits_for_a_new_one is Wait.SETTLED
    assert wait is Wait.REPLICATES
    assert replicates == [first.params, second.params]


def test_pending_candidates_are_closed_and_prove_nothing(grid):
    """Trials asked for before any is told all have different candidates, and do not raise p_star."""
    sampler = make(grid)
    study = optuna.create_study(sampler=sampler)

    asked = [sampler.position_of(study.ask(fixed_distributions=sampler.search_space).params) for _ in range(12)]

    assert len(set(asked)) == 12
    assert sampler.population(known_to(sampler, study)).p_star == 0.0
    assert sampler.decide(known_to(sampler, study)).reason is None


@pytest.mark.slow
def test_confidence_is_confirmed_by_further_draws(exhausted):
    """Where a hundred draws exceed the confidence, further ones take part in p_star; below it they are not made."""
    grid, study, _ = exhausted
    observations = known_to(study.sampler, study)

    assert study.sampler.decide(observations).reason is StopReason.CONFIDENT
    assert len(study.sampler.population(observations).fastest) == (1 + CONFIRMATIONS) * 100
    assert len(make(grid, confidence=1.0).population(observations).fastest) == 100


def test_nobody_pays_trials_for_less_than_the_tolerance(grid):
    """A draw names a tried candidate that is within the tolerance of its fastest, with tolerance 0 only the fastest;
    p_star is the share of draws that do (FlexParallel equation 6).
    """
    _, true = world(grid)
    shares = []
    for tolerance in (0.0, 0.01, 0.9):
        sampler = make(grid, tolerance=tolerance, confidence=1.0)
        study, order = run(sampler, true, 3)
        population = sampler.population(known_to(sampler, study))
        drawn = population.log_step_s
        drawn[:, order] += np.log1p(tolerance)
        near = drawn[:, order].min(axis=1) <= drawn.min(axis=1) + np.log1p(tolerance) + 1e-6
        assert population.p_star == pytest.approx(near.mean())
        assert set(population.fastest[near].tolist()) <= set(order)
        shares.append(population.p_star)

    assert shares[0] <= shares[-1]
    assert shares[-1] > 0.9


def test_the_choice_is_uniform_over_the_unexplored_draws(grid):
    """A candidate that many draws name is chosen in proportion (FlexParallel 3.2), over 400 numbered decisions."""
    sampler = make(grid, acquisition=UnexploredDraws())
    study, _ = run(sampler, world(grid)[1], 4)
    observations = known_to(sampler, study)
    open_draws = [at for at in sampler.population(observations).fastest.tolist() if at not in observations.explored]

    chosen = [sampler.choose(replace(observations, num_decisions=decision)) for decision in range(400)]

    for position in set(open_draws):
        expected = open_draws.count(position) / len(open_draws)
        assert chosen.count(position) / 400 == pytest.approx(expected, abs=0.1)


def test_endings_without_an_observation_count(grid):
    """What crashed, ran out of memory or failed in a plain loop is never the fastest of a draw, what ran into the time
    limit is not tried again, and an incident is not held against its candidate.
    """
    sampler = make(grid)
    study, failed = fail(sampler, Status.CRASHED, Status.OUT_OF_MEMORY, None, Status.TIMEOUT, Status.INCIDENT)

    observations = known_to(sampler, study)

    assert observations.impossible == set(failed[:3])
    assert observations.explored == {failed[3]}
    assert observations.num_decisions == 5
    assert not set(sampler.population(observations).fastest.tolist()) & set(failed[:3])
    assert sampler.choose(observations) not in failed[:4]


@pytest.mark.parametrize("acquisition", [None, UnexploredDraws()])
def test_the_first_trial_is_the_current_one_or_loses_least(grid, acquisition):
    """The first decision is the current configuration, whatever the draws say; without one it is the candidate that is
    least behind each draw's fastest on average, whatever chooses the trials after it.
    """
    _, true = world(grid)

    assert run(make(grid, first=grid.config(len(grid) - 1)), true, 1)[1] == [len(grid) - 1]
    for seed in range(3):
        sampler = make(grid, seed=seed, acquisition=acquisition)
        drawn = sampler.population(sampler.observations([])).log_step_s
        loss = np.minimum(drawn - drawn.min(axis=1, keepdims=True), np.log(UNMEASURED)).mean(axis=0)
        assert run(sampler, true, 1)[1] == [np.argmin(loss)]


def test_the_population_is_kept_before_and_after_every_trial(grid):
    """The study holds how probable each candidate is to be the best, from before the first trial on, and p_star."""
    study, order = run(make(grid), world(grid)[1], 3)
    assert all(tuple(trial.params) == grid.dimensions for trial in study.trials)

    moments = read_moments(study)

    assert [moment.trial for moment in moments] == [None, 0, 1, 2]
    assert moments[-1].p_star == pytest.approx(study.user_attrs[P_STAR])
    assert [trial.user_attrs[P_STAR] for trial in study.trials] == pytest.approx([one.p_star for one in moments[1:]])
    tried = {share.key for moment in moments for share in moment.shares if share.tried}
    assert tried <= {tuple(grid.values(position).values()) for position in order}


def test_failures_leave_their_lesson_on_the_study(grid):
    """After trials that ran out of memory the study says what that means for the others."""
    sampler = make(grid, memory_share=np.full(len(grid), 0.9))
    study, _ = fail(sampler, *[Status.OUT_OF_MEMORY] * 3)

    (conclusion,) = failure_conclusions(study.user_attrs)

    assert conclusion.kind == "memory"
    assert conclusion.text.startswith("3 trials ran out of memory")


@pytest.mark.parametrize("is_pickled", [False, True])
def test_another_sampler_continues_as_the_old_one_would_have(grid, undisturbed, is_pickled):
    """The state is the study alone: after 5 trials a fresh sampler, or one from a pickle as Optuna's own samplers can
    be, makes the decisions of the undisturbed run.
    """
    _, true = world(grid)
    study, order = run(make(grid), true, 5)

    study.sampler = pickle.loads(pickle.dumps(study.sampler)) if is_pickled else make(grid)  # noqa: S301 # its own
    for _ in range(3):
        trial = study.ask(fixed_distributions=study.sampler.search_space)
        order.append(study.sampler.position_of(trial.params))
        study.tell(trial, true[order[-1]])

    assert order == undisturbed[:8]


def test_seeds_differ(grid, undisturbed):
    """Another seed explores in another order."""
    assert run(make(grid, seed=1), world(grid)[1], 6)[1] != undisturbed[:6]


def test_foreign_parameters_are_left_to_chance(grid):
    """A parameter that is no dimension can be suggested beside the configuration."""
    sampler = make(grid)
    study = optuna.create_study(sampler=sampler)

    def objective(trial):
        sampler.suggest(trial)
        return trial.suggest_float("learning_rate", 1e-4, 1e-3)

    study.optimize(objective, n_trials=3)

    assert all("learning_rate" in trial.params for trial in study.trials)


@pytest.mark.parametrize("directions", [["maximize"], ["minimize", "minimize"]])
def test_other_directions_are_refused(grid, directions):
    """A study that does not minimize one value ends before its objective is called, and leaves no trial running."""
    study = optuna.create_study(sampler=make(grid), directions=directions)
    called = []

    with pytest.raises(ValueError, match=r"must minimize one value.*directions are"):
        study.optimize(called.append, n_trials=3)

    assert not called
    assert [trial.state for trial in study.trials] == [TrialState.FAIL]


POWERS = [1, 2, 4, 8, 16]
KINDS = {
    "categorical": lambda trial, name: trial.suggest_categorical(name, POWERS),
    "int": lambda trial, name: trial.suggest_int(name, 1, 16),
    "log": lambda trial, name: trial.suggest_int(name, 1, 16, log=True),
    "float": lambda trial, name: trial.suggest_float(name, 1, 16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_dimension_may_be_suggested_by_any_distribution(grid, undisturbed, kind):
    """The candidates of a study do not depend on the kind of distribution that its objective suggests."""
    _, true = world(grid)
    sampler = make(grid)
    order = []

    def objective(trial):
        params = {name: KINDS[kind](trial, name) for name in ("pp", "tp", "dp")}
        params["zero_stage"] = trial.suggest_categorical("zero_stage", [0, 1])
        order.append(sampler.position_of(params))
        return true[order[-1]]

    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=5)

    assert order == undisturbed[:5]
    assert sampler.observations(study.trials).num_decisions == 5


def test_a_distribution_without_the_candidates_value_is_refused(grid):
    """The message names the dimension, the value, and the distribution that does not hold it."""
    study = optuna.create_study(sampler=make(grid, first=ParallelConfig(pp=16, tp=1, dp=1)))

    with pytest.raises(ValueError, match=r"`pp` must be .* but 16 .* is not in CategoricalDistribution.*\(1, 2\)"):
        study.optimize(lambda trial: trial.suggest_categorical("pp", [1, 2]), n_trials=1)


def test_threads_never_get_the_same_candidate(grid):
    """Trials of several threads have different candidates, although their parameters are stored one by one."""
    _, true = world(grid)
    sampler = make(grid)

    def objective(trial):
        params = {}
        for name in ("pp", "tp", "dp", "zero_stage"):
            params[name] = trial.suggest_int(name, 0 if name == "zero_stage" else 1, 16)
            time.sleep(0.002)
        return true[sampler.position_of(params)]

    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=12, n_jobs=4)

    assert len({tuple(trial.params.values()) for trial in study.trials}) == 12
    assert not sampler._chosen


def test_a_constraint_on_memory_is_a_failure_of_memory(grid):
    """A trial whose constraint `memory` is above zero counts as one that ran out, whatever value it returned."""
    _, true = world(grid)
    sampler = make(grid, memory_share=np.full(len(grid), 0.9))

    def objective(trial):
        position = sampler.position_of(sampler.suggest(trial).values(grid.dimensions))
        trial.set_constraint("memory", 0.2 if trial.number == 0 else -0.1)
        return true[position]

    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=3)
    observations = sampler.observations(study.trials)

    assert observations.misfits == {sampler.position_of(study.trials[0].params)}
    assert len(observations.measured) == 2


ENDS = st.one_of(
    st.floats(-9, 9).map(lambda exponent: 10.0**exponent),
    st.just(1.0),
    st.sampled_from([Status.OUT_OF_MEMORY, Status.CRASHED, Status.TIMEOUT, Status.INCIDENT]),
)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1), ends=st.lists(ENDS, min_size=1, max_size=10), predicted=st.sampled_from([0, -9, 9])
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_any_ends_leave_proposals_among_what_is_left(seed, ends, predicted):
    """Whatever trials end with, equal, tiny or huge times or failures, the next is a candidate, and none that has ended
    for good; p_star stays a share.
    """
    grid = grid_of(8)
    sampler = sampler_of(grid, 10.0**predicted * world(grid)[0], seed=seed, draws=10)
    study = optuna.create_study(sampler=sampler)
    closed = set()
    for end in ends:
        trial = study.ask(fixed_distributions=sampler.search_space)
        position = sampler.position_of(trial.params)
        assert position in range(len(grid))
        assert position not in closed
        if isinstance(end, Status):
            trial.set_user_attr(STATUS, end.value)
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, end)
        if end is not Status.INCIDENT:
            closed.add(position)
        if len(closed) == len(grid):
            break

    for trial in study.trials:
        assert 0.0 <= trial.user_attrs[P_STAR] <= 1.0
