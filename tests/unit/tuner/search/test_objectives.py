import numpy as np
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.surrogates.predicted import Predicted
from trials.backend import Observation, Status
from tuner.forecast.pareto import pareto_front
from tuner.search.objectives import COST, GIB, MEMORY, STEP_TIME, MinimizedValue, Objective, label_of
from tuner.search.posterior import posterior_of
from tuner.search.sampler import ThompsonSampler

optuna.logging.set_verbosity(optuna.logging.WARNING)
logs = arrays(
    np.float64, st.tuples(st.integers(2, 7), st.just(2)), elements=st.floats(-2, 2).map(lambda x: round(x, 1))
)


def objective_of(*pairs):
    """An objective of pairs of a value's name and its rates."""
    return Objective(
        values=tuple(
            MinimizedValue(name=name, label=label_of(name, "EUR"), log_rate=np.log(np.asarray(rate, dtype=float)))
            for name, rate in pairs
        )
    )


def observed(step_time_s, peak_bytes=None):
    """The observation of a completed trial."""
    return Observation(status=Status.OK, step_times_s=(step_time_s,), peak_memory_bytes=peak_bytes)


def test_one_value_is_the_step_time_times_its_rate():
    """A draw of step times is one of costs, and a completed trial's value is its step time times the rate."""
    objective = objective_of((COST, [2.0, 5.0]))
    log_step_s = np.log(np.array([[3.0, 1.0], [1.0, np.inf]], dtype=np.float32))

    drawn = objective.scalarized(log_step_s, {}, np.random.default_rng(0))

    assert np.exp(drawn) == pytest.approx(np.array([[6.0, 5.0], [2.0, np.inf]]))
    assert objective.measured(1, observed(4.0)) == pytest.approx([20.0])
    assert objective.step_time_s(1, [20.0]) == pytest.approx(4.0)
    assert objective.labels == ["cost of a million tokens [EUR]"]


def test_a_measured_peak_stands_for_the_predicted_one():
    """Memory is the predicted peak until a trial has measured it."""
    objective = objective_of((STEP_TIME, [1.0, 1.0]), (MEMORY, [10.0, 20.0]))
    _, memory = objective.values

    known = memory.logs(np.zeros((3, 2)), {1: 15 * GIB})

    assert np.exp(known) == pytest.approx(np.broadcast_to([10.0, 15.0], (3, 2)))
    assert objective.measured(0, observed(1.0)) == pytest.approx([1.0, 10.0])
    assert objective.measured(0, observed(1.0, 12 * GIB)) == pytest.approx([1.0, 12.0])
    assert objective.step_time_s(0, [7.0, 12.0]) == pytest.approx(7.0)


@given(values=logs, seed=st.integers(0, 99))
def test_each_draw_names_a_candidate_of_the_front(values, seed):
    """Whatever the direction, the candidate that a draw names is one that no other beats in both values."""
    objective = objective_of((STEP_TIME, np.ones(len(values))), (MEMORY, np.exp(values[:, 1])))
    drawn = objective.scalarized(np.tile(values[:, 0], (50, 1)).astype(np.float32), {}, np.random.default_rng(seed))

    named = np.unique(drawn.argmin(axis=1))

    rounded = np.stack([values[:, 0].astype(np.float32), values[:, 1]], axis=1)
    assert pareto_front(rounded)[named].all()


@given(values=logs)
def test_the_draws_name_the_whole_front(values):
    """With many directions every point of a front is named, also where the front is not convex."""
    spread = np.unique(values, axis=0)
    front = spread[pareto_front(spread)]
    objective = objective_of((STEP_TIME, np.ones(len(front))), (MEMORY, np.exp(front[:, 1])))
    drawn = objective.scalarized(np.tile(front[:, 0], (4000, 1)).astype(np.float32), {}, np.random.default_rng(0))

    named = np.unique(drawn.argmin(axis=1))

    # of a point very near to a neighbour only few directions are its own
    range_of = front.max(axis=0) - front.min(axis=0) if len(front) > 1 else np.ones(2)
    gaps = np.abs(np.diff(np.sort(front[:, 0]))) / np.maximum(range_of[0], 1e-9)
    if len(front) == 1 or (gaps.min() > 0.1 and np.abs(np.diff(np.sort(front[:, 1]))).min() / range_of[1] > 0.1):
        assert len(named) == len(front)


def test_what_cannot_run_is_never_named():
    """A candidate that cannot run in a draw is infinite there, and a draw in which none runs names none."""
    objective = objective_of((STEP_TIME, [1.0, 1.0]), (MEMORY, [1.0, 2.0]))
    log_step_s = np.array([[np.inf, 0.0], [np.inf, np.inf]], dtype=np.float32)

    drawn = objective.scalarized(log_step_s, {}, np.random.default_rng(0))

    assert np.isfinite(drawn).tolist() == [[False, True], [False, False]]


@pytest.fixture
def world():
    """Twelve candidates whose step times rise while their memory falls, but for three that others dominate."""
    grid = ConfigGrid.from_configs([ParallelConfig(dp=dp, mbs=mbs) for dp in (1, 2, 4) for mbs in (1, 2, 4, 8)])
    memory = np.array([12.0, 11, 10, 9, 8, 7, 6, 5, 4, 9, 10, 11])
    times_s = np.array([1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0, 2.4, 3.0, 3.1, 3.2, 3.3])
    features = np.stack([np.log2(grid.dp), np.log2(grid.mbs)], axis=1)
    sampler = ThompsonSampler(
        grid,
        posterior_of(Predicted.of_times(times_s, features), grid),
        objective=objective_of((STEP_TIME, np.ones(12)), (MEMORY, memory)),
    )
    return sampler, times_s, memory


def test_a_study_of_two_values_is_one_of_optunas(world):
    """The sampler drives a multi-objective study, whose best trials are the front, and tries what is dominated last."""
    sampler, times_s, memory = world
    study = optuna.create_study(sampler=sampler, directions=["minimize", "minimize"])

    order = []
    for _ in range(9):
        trial = study.ask(fixed_distributions=sampler.search_space)
        order.append(sampler.position_of(trial.params))
        study.tell(trial, [times_s[order[-1]], memory[order[-1]]])

    on_front = set(np.flatnonzero(pareto_front(np.stack([times_s, memory], axis=1))).tolist())
    assert on_front == set(range(9))
    assert len(set(order)) == 9
    assert len(set(order) & on_front) >= 8
    assert {sampler.position_of(trial.params) for trial in study.best_trials} == set(order) & on_front


@pytest.mark.parametrize("directions", [["minimize"], ["minimize", "maximize"], ["minimize"] * 3])
def test_a_study_of_other_directions_is_refused(world, directions):
    """A study must minimize as many values as the objective has, and is told which."""
    study = optuna.create_study(sampler=world[0], directions=directions)

    with pytest.raises(ValueError, match=r"two values, the step time \[s\] and the peak memory \[GiB\]"):
        study.ask()


def test_an_own_loop_tells_costs_alone():
    """In a loop without observations the sampler learns step times from the costs that it is told."""
    grid = ConfigGrid.from_configs([ParallelConfig(dp=1), ParallelConfig(dp=2), ParallelConfig(dp=4)])
    rates = np.array([1.0, 4.0, 2.0])
    posterior = posterior_of(Predicted.of_times(np.ones(3), np.zeros((3, 1))), grid)
    sampler = ThompsonSampler(grid, posterior, objective=objective_of((COST, rates)))
    study = optuna.create_study(sampler=sampler)

    for position in range(3):
        trial = study.ask(fixed_distributions=sampler.search_space)
        study.tell(trial, 3.0 * rates[sampler.position_of(trial.params)])
        assert position + 1 == len(sampler.observations(study.trials).explored)

    assert np.exp(sampler.observations(study.trials).log_step_s) == pytest.approx([3.0] * 3)
