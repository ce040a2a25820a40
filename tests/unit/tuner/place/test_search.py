import math

import numpy as np
import pytest

from tests.oracles.placement_exhaustive import best_step_s
from tests.support.settings.placements import drawn_problem, module, option
from tuner.place.options import Pool, kinds_of
from tuner.place.search.baselines import baselines_of
from tuner.place.search.bounds import Bounds
from tuner.place.search.branch_and_bound import PlacementSearch, improve, search_placements
from tuner.place.search.problem import problem_of
from tuner.place.search.program import solve_program
from tuner.place.search.state import bonds_of, empty_state, finish_s, options_chosen
from tuner.place.workload import EMBEDDINGS, Edge, Workload
from tuner.planners.engine.outcome import Known, Limits


@pytest.mark.parametrize("seed", range(15))
def test_finds_the_best_of_everything(seed):
    """Branch and bound proves the step time that trying everything finds, and the root's bound is below it."""
    problem = drawn_problem(np.random.default_rng(seed))
    expected = best_step_s(problem)
    found = search_placements(problem, limits=Limits())

    if math.isinf(expected):
        assert found.known is Known.INFEASIBLE
        return
    root = Bounds(problem, bonds_of(problem, {})).bound_s(empty_state(problem), 0.0, math.inf)
    assert found.known is Known.OPTIMAL
    assert found.best.cost == pytest.approx(expected, rel=1e-6)
    assert root <= expected * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40, 52))
def test_no_known_placement_is_faster(seed):
    """An answer is never slower than the placements it was given, even without time to search."""
    problem = drawn_problem(np.random.default_rng(seed))
    known = [one for one in baselines_of(problem, time_s=5.0) if one.state is not None]
    found = search_placements(problem, limits=Limits(nodes=0), known=[one.state for one in known])

    for one in known:
        improved = improve(problem, one.state, time_s=0.5)
        assert finish_s(problem, improved) <= one.step_time_s
        assert found.best.cost <= one.step_time_s


def two_modules(edge, *, times_s, micro_batches=1, busy_bytes=1.0, idle_bytes=0.0):
    """Two modules on two hosts, each with one option for one host and one for both."""
    pools = (Pool(hosts=2, cells=1, devices=1, capacity_bytes=10.0),)
    kinds = kinds_of(pools)
    workload = Workload(
        name="two",
        cluster=drawn_problem(np.random.default_rng(0)).workload.cluster,
        modules=(module("a", "train"), module("b", "train")),
        edges=(edge,) if edge else (),
        headroom=0.0,
        overlap_steps=0,
    )
    own = tuple(
        option(kind, [times_s[kind.devices]], micro_batches=micro_batches, busy_bytes=busy_bytes, idle_bytes=idle_bytes)
        for kind in kinds
    )
    return problem_of(workload, pools, kinds, (own, own))


def test_runs_what_scales_badly_side_by_side():
    """Two modules without a flow that gain little from a second host run beside each other."""
    found = search_placements(two_modules(None, times_s={1: 10.0, 2: 7.0}), limits=Limits())

    assert found.best.cost == 10.0
    assert found.best.solution.where[0] != found.best.solution.where[1]


def test_runs_what_scales_well_one_after_the_other():
    """Two modules that halve their time on two hosts, with a shorter sum, share both hosts."""
    found = search_placements(two_modules(None, times_s={1: 10.0, 2: 4.0}), limits=Limits())

    assert found.best.cost == 8.0
    assert found.best.solution.where[0] == found.best.solution.where[1] == 3


def test_memory_keeps_modules_apart():
    """Modules whose states do not fit beside the other's work get hosts of their own, although sharing is faster."""
    problem = two_modules(None, times_s={1: 10.0, 2: 4.0}, busy_bytes=6.0, idle_bytes=5.0)
    found = search_placements(problem, limits=Limits())

    assert found.best.cost == 10.0


def test_a_gang_is_a_pipeline_of_its_modules():
    """Two modules on two hosts that pass M micro-batches take (a + b + (M - 1) max(a, b)) / M, by arithmetic."""
    edge = Edge(source=0, target=1, sends=EMBEDDINGS, data_bytes=0.0)
    problem = two_modules(edge, times_s={1: 10.0, 2: 9.0}, micro_batches=8)
    found = search_placements(problem, limits=Limits())

    assert found.best.cost == pytest.approx((10 + 10 + 7 * 10) / 8, rel=1e-5)


@pytest.mark.parametrize("seed", range(200, 212))
def test_the_integer_program_is_no_better(seed):
    """HiGHS, whose sets are a part of the family and whose transfers are free, finds nothing that the oracle lacks.

    Its placement keeps the memory limits and is priced like any other; without transfers, on sets that are all
    aligned, its optimum is that of branch and bound.
    """
    problem = drawn_problem(np.random.default_rng(seed))
    best = search_placements(problem, limits=Limits()).best
    if best is None:
        return
    outcome = solve_program(problem, longest_s=10 * best.cost, limits=Limits(time_s=20.0))
    if outcome is None or outcome.best is None:
        return
    state = outcome.best.solution
    chosen = options_chosen(problem, state)

    assert outcome.best.cost >= best.cost * (1 - 1e-6)
    for cell, held in enumerate(state.held):
        assert problem.fits(held, problem.pools[problem.pool_of_cell[cell]].capacity_bytes * (1 + 1e-6), chosen)
    if problem.num_cells == 2 and not any(edge.data_bytes for edge in problem.workload.edges):
        assert outcome.best.cost == pytest.approx(best.cost, rel=1e-5)


def test_a_known_placement_is_the_answer_when_the_time_is_spent(monkeypatch):
    """Where a placement is known, a search without time asks for no further one, however many devices there are."""
    problem = two_modules(None, times_s={1: 10.0, 2: 7.0})
    known = search_placements(problem, limits=Limits()).best.solution
    search = PlacementSearch(problem, known=[known], is_over=lambda: True)
    monkeypatch.setattr(search, "children", lambda *_: pytest.fail("it looked for a placement"))

    assert search.greedy(search.root()).solution == known
    assert search_placements(problem, limits=Limits(time_s=0.0), known=[known]).best.solution == known
