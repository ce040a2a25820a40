"""Synthetic assignment problems: equal seeds, limits that bind, and the solver's way through them."""

import numpy as np
import pytest

from benchmarks.assignment import synthetic
from benchmarks.assignment.contest_file import read_problem
from benchmarks.assignment.synthetic import synthetic_problem

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
