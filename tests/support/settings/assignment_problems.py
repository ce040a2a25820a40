"""Strategy assignment problems small enough for exhaustive search, and two oracles for them."""

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from tuner.planners.assignment.problem import FORBIDDEN, problem_of
from tuner.planners.engine.mixed_integer import MixedInteger
from tuner.planners.engine.outcome import Limits

EXAMPLE = {
    "name": "example",
    "nodes": {
        "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
        "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
        "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
    },
    "edges": {
        "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
        "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
    },
    "usage_limit": 50,
}
"""The contest's own example (google/iopddl, Apache-2.0); its optimum is not published."""


@st.composite
def problems(draw, *, most_nodes=6):
    """Draw nodes with up to four strategies, edges (some are matchings), and a limit that may or may not bind."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=most_nodes))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    return random_problem(sizes, rng, num_edges=draw(st.integers(0, 2 * len(sizes))), tightness=draw(st.floats(0, 1)))


def random_problem(sizes, rng, *, num_edges, tightness):
    """Draw a problem with a memory limit between the leanest and the largest assignment, or just below the leanest."""
    begins = rng.integers(0, 8, len(sizes))
    intervals = np.stack([begins, begins + rng.integers(0, 6, len(sizes))], axis=1)
    costs = [_with_forbidden(rng.integers(0, 30, size).astype(float), rng, 0.05) for size in sizes]
    usages = [rng.integers(0, 20, size).astype(float) for size in sizes]
    edges, edge_costs = [], []
    for _ in range(num_edges if len(sizes) > 1 else 0):
        first, second = (int(node) for node in rng.choice(len(sizes), 2, replace=False))
        edges.append((first, second))
        edge_costs.append(_edge_costs(sizes[first], sizes[second], rng))
    problem = problem_of(intervals, costs, usages, edges, edge_costs, math.inf)
    leanest = problem.peak_usage([int(own.argmin()) for own in usages])
    most = problem.peak_usage([int(own.argmax()) for own in usages])
    limit = float(math.floor(leanest + tightness * (most - leanest + 2)) - 1)
    return problem_of(intervals, costs, usages, edges, edge_costs, max(0.0, limit))


def least_by_trying_all(problem):
    """Return the least cost of all feasible assignments by exhaustive search; inf if there is none."""
    sizes = np.diff(problem.starts)
    return min(
        (problem.cost_of(each) for each in itertools.product(*map(range, sizes)) if _holds(problem, each)),
        default=math.inf,
    )


def least_by_milp(problem):
    """Return the least cost that HiGHS proves, with a binary per strategy and a variable per pair on an edge."""
    program = MixedInteger()
    starts = problem.starts.tolist()
    allowed, pair_allowed = problem.costs < FORBIDDEN, problem.edge_costs < FORBIDDEN
    take = [
        program.variables((end - start,), upper=allowed[start:end].astype(float), integer=True)
        for start, end in itertools.pairwise(starts)
    ]
    for node, own in enumerate(take):
        program.add([(var, 1.0) for var in own], at_least=1.0, at_most=1.0)
        costs = np.where(allowed, problem.costs, 0.0)[starts[node] : starts[node + 1]]
        program.cost(list(zip(own, costs, strict=True)))
    for edge, (first, second) in enumerate(problem.edges.tolist()):
        entries = slice(problem.edge_starts[edge], problem.edge_starts[edge + 1])
        shape = (len(take[first]), len(take[second]))
        both = program.variables(shape, upper=pair_allowed[entries].reshape(shape).astype(float))
        for var, row in zip(take[first], both, strict=True):
            program.add([*((each, 1.0) for each in row), (var, -1.0)], at_least=0.0, at_most=0.0)
        for var, column in zip(take[second], both.T, strict=True):
            program.add([*((each, 1.0) for each in column), (var, -1.0)], at_least=0.0, at_most=0.0)
        costs = np.where(pair_allowed, problem.edge_costs, 0.0)[entries]
        program.cost(list(zip(both.ravel(), costs, strict=True)))
    for time in range(int(problem.intervals.max(initial=0))):
        held = [node for node, (begin, end) in enumerate(problem.intervals.tolist()) if begin <= time < end]
        program.add(
            [
                (var, usage)
                for node in held
                for var, usage in zip(take[node], problem.usages[starts[node] : starts[node + 1]], strict=True)
            ],
            at_most=problem.limit,
        )

    def read(values):
        strategies = [int(np.argmax(values[own])) for own in take]
        return problem.cost_of(strategies), strategies

    best = program.solve(Limits(), read).best
    return math.inf if best is None or not problem.is_feasible(best.solution) else best.cost


def _holds(problem, strategies):
    """Check whether an assignment is feasible, separately at every time."""
    for time in range(int(problem.intervals.max(initial=0))):
        held = sum(
            problem.usages[problem.starts[node] + strategy]
            for node, strategy in enumerate(strategies)
            if problem.intervals[node, 0] <= time < problem.intervals[node, 1]
        )
        if held > problem.limit:
            return False
    return problem.cost_of(strategies) < FORBIDDEN


def _edge_costs(first, second, rng):
    kind = rng.integers(4)
    table = rng.integers(0, 30, (first, second)).astype(float)
    if kind == 0:  # one partner each
        table[np.arange(first)[:, None] % second != np.arange(second)] = 1e18
    elif kind == 1:  # a part for each end
        table = table[:, :1] + table[:1]
    elif kind == 2:
        table = _with_forbidden(table, rng, 0.3)
    return table


def _with_forbidden(costs, rng, share):
    forbidden = rng.random(costs.shape) < share
    return np.where(forbidden, 1e18, costs)
