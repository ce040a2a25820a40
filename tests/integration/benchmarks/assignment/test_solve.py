"""Solved assignment problems against trying all assignments, and against HiGHS."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.settings.assignment_problems import least_by_milp, least_by_trying_all, problems, random_problem
from tuner.planners.assignment.contraction import contract
from tuner.planners.assignment.problem import problem_of
from tuner.planners.assignment.solve import solve
from tuner.planners.assignment.timeline import timeline_of
from tuner.planners.engine.outcome import Known, Limits, Stop
from tuner.planners.sharding.messages import Messages


def solved(problem, nodes=800, seed=0):
    """What the solver ends with after some sweeps and moves."""
    return solve(problem, limits=Limits(nodes=nodes), rng=np.random.default_rng(seed))


@given(problem=problems())
@settings(max_examples=60, deadline=None, derandomize=True)  # no proof within so few nodes: some draw fails
def test_it_finds_the_optimum_of_small_problems(problem):
    """The assignment is feasible, costs what is said and no more than any other; the bound is not above it."""
    optimum = least_by_trying_all(problem)
    found = solved(problem)

    if math.isinf(optimum):
        assert found.best is None
        assert found.known in {Known.INFEASIBLE, Known.UNKNOWN}
    else:
        assert problem.is_feasible(found.best.solution)
        assert found.best.cost == problem.cost_of(found.best.solution) == optimum
        assert found.bound <= optimum + 1e-9 * abs(optimum)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_highs_on_chains_with_skips(seed):
    """On thirty nodes the cost is HiGHS's optimum or within 2% of it, never below, and the bound is never above."""
    rng = np.random.default_rng(seed)
    problem = random_problem([int(size) for size in rng.integers(2, 6, 30)], rng, num_edges=40, tightness=0.2)
    optimum, found = least_by_milp(problem), solved(problem, nodes=1500)

    if math.isinf(optimum):
        assert found.best is None
    else:
        assert optimum <= found.best.cost <= 1.02 * optimum
        assert found.bound <= optimum + 1e-6


@given(problem=problems())
def test_contraction_keeps_what_is_allowed(problem):
    """The core's assignments are those with nothing forbidden, at the same costs, none lost and none new."""
    sizes = np.diff(problem.starts)
    allowed = {each for each in itertools.product(*map(range, sizes)) if problem.is_allowed(each)}
    core = contract(problem)

    if core is None:
        assert not allowed
        return
    lifted = {}
    for states in itertools.product(*map(range, np.diff(core.starts))):
        cost = core.constant + sum(core.costs[start + state] for start, state in zip(core.starts, states, strict=False))
        cost += sum(table[states[first], states[second]] for (first, second), table in core.edges.items())
        if math.isfinite(cost):
            lifted[tuple(core.lift(np.array(states, dtype=np.int64)).tolist())] = cost
    assert set(lifted) == allowed
    assert all(cost == problem.cost_of(each) for each, cost in lifted.items())


@given(problem=problems())
def test_the_times_looked_at_tell_the_peak(problem):
    """An assignment holds too much at some time if and only if it does at one of those that are looked at."""
    timeline = timeline_of(problem)
    for each in itertools.islice(itertools.product(*map(range, np.diff(problem.starts))), 50):
        held = timeline.held(problem.usages[problem.starts[:-1] + np.array(each)])

        assert (held.max(initial=0.0) > problem.limit) == (problem.peak_usage(each) > problem.limit)


@given(problem=problems(), seed=st.integers(0, 100))
def test_sweeps_never_lower_the_bound(problem, seed):
    """In any order of visits each sweep's bound is at least the last one's, and no assignment costs less."""
    core = contract(problem)
    if core is None or len(core.starts) == 1:
        return
    order = np.random.default_rng(seed).permutation(len(core.starts) - 1)
    messages = Messages(core.starts, core.costs, core.edges, order)
    bounds = [messages.sweep(is_forward=number % 2 == 0) + core.constant for number in range(8)]
    unlimited = problem_of(
        problem.intervals,
        np.split(problem.costs, problem.starts[1:-1]),
        np.split(problem.usages, problem.starts[1:-1]),
        problem.edges,
        np.split(problem.edge_costs, problem.edge_starts[1:-1]) if len(problem.edges) else [],
        math.inf,
    )

    assert all(then >= now - 1e-9 for now, then in itertools.pairwise(bounds))
    assert bounds[-1] <= least_by_trying_all(unlimited) + 1e-9


def test_equal_arguments_give_equal_assignments():
    """Without a limit on the time the outcome depends on nothing but the arguments."""
    problem = random_problem([4] * 20, np.random.default_rng(3), num_edges=30, tightness=0.3)
    one, other = solved(problem, nodes=300).best, solved(problem, nodes=300).best

    assert (one.cost, one.solution.tolist()) == (other.cost, other.solution.tolist())


def test_leanest_strategies_above_the_limit_are_proof():
    """Where even the leanest strategies hold too much, the problem is known to be infeasible."""
    problem = problem_of([(0, 2), (1, 3)], [[1.0, 2.0], [1.0]], [[4.0, 3.0], [3.0]], [(0, 1)], [[[0.0], [0.0]]], 5.0)
    found = solved(problem)

    assert (found.known, found.bound, found.best) == (Known.INFEASIBLE, math.inf, None)


def test_a_stop_returns_what_was_found():
    """Once it is told to stop, the search returns its best assignment, however much time is left."""
    rng = np.random.default_rng(5)
    problem = random_problem([5] * 40, rng, num_edges=80, tightness=0.4)
    asked = []

    def is_stopped():
        asked.append(True)
        return len(asked) > 100

    found = solve(problem, limits=Limits(time_s=1e6), rng=rng, is_stopped=is_stopped)

    assert len(asked) < 110
    assert problem.is_feasible(found.best.solution)
    assert found.stop is Stop.TIME
