"""Synthetic assignment problems: equal seeds, limits that bind, and the solver's way through them."""

import numpy as np
import pytest

from benchmarks.assignment import synthetic
from benchmarks.assignment.contest_file import read_problem
from benchmarks.assignment.contraction import contract
from benchmarks.assignment.multipliers import Ascent
from benchmarks.assignment.solve import solve
from benchmarks.assignment.synthetic import synthetic_problem
from benchmarks.assignment.timeline import timeline_of
from benchmarks.assignment.work import Meter
from tuner.planners.engine.outcome import Limits

SMALL = (2, 17)
"""Seeds of problems with some hundred nodes."""


@pytest.mark.parametrize("seed", SMALL)
def test_a_seed_is_a_problem(seed, tmp_path):
    """A seed's file holds the problem that the seed draws, whatever was drawn before."""
    synthetic_problem(seed + 1)
    assert synthetic.main([str(tmp_path), "--from", str(seed), "--seeds", "1"]) == 0
    written, drawn = read_problem(tmp_path / f"synthetic-{seed}.json.gz"), synthetic_problem(seed)

    assert written.limit == drawn.limit
    assert np.array_equal(written.costs, drawn.costs)
    assert np.array_equal(written.edge_costs, drawn.edge_costs)


@pytest.mark.parametrize("seed", SMALL)
def test_the_limit_is_tight(seed):
    """The leanest strategies fit, within a tenth of the way to the largest ones, which do not."""
    problem = synthetic_problem(seed)
    leanest = [int(own.argmin()) for own in np.split(problem.usages, problem.starts[1:-1])]
    largest = [int(own.argmax()) for own in np.split(problem.usages, problem.starts[1:-1])]
    lean_usage, large_usage = problem.peak_usage(leanest), problem.peak_usage(largest)

    assert problem.is_feasible(leanest)
    assert lean_usage <= problem.limit < lean_usage * (large_usage / lean_usage) ** 0.1


@pytest.mark.parametrize("seed", SMALL)
def test_large_steps_soon_lead_to_a_feasible_assignment(seed):
    """Twenty sweeps with large steps of the prices are enough for an assignment that fits."""
    problem = synthetic_problem(seed)
    meter = Meter(Limits(nodes=20), 0.0, lambda: False, lambda: 0.0)
    core = contract(problem)
    ascent = Ascent(core, timeline_of(problem), problem.limit)
    ascent.dive(meter.phase(np.inf))

    assert problem.is_feasible(core.lift(ascent.states))


def test_a_limit_only_cuts_the_way_off():
    """The assignments on the way to 150 sweeps and moves are also the first ones of a run with 300."""
    problem = synthetic_problem(SMALL[0])
    short, long = (
        [
            (each.nodes, each.cost)
            for each in solve(problem, limits=Limits(nodes=nodes), rng=np.random.default_rng(1)).trace
        ]
        for nodes in (150, 300)
    )

    # The last entry tells where the search ended.
    assert short[:-1] == long[: len(short) - 1]
    assert len(short) > 3
