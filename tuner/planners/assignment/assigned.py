"""Plans by strategy assignment: all axes of all operators at once, under costs of pairs of operators alone.

A node is an operator, its strategies are all factors that the axes may serve, and edges hold the shares of moves
between two operators (`ShardingTerms.pairwise`). Their sum is no more than a step takes, because several readers of a
tensor may share a move. A descent from such a plan, which counts in full but changes one axis at a time, makes up for
that, and begins where no change of one axis leads from plans by hand.
"""

from __future__ import annotations

import time

import numpy as np

from costmodels.sharding.plan import Plan
from tuner.planners.assignment.problem import problem_of
from tuner.planners.assignment.solve import solve
from tuner.planners.engine.outcome import Limits
from tuner.planners.sharding.sharding_milp import choices_of
from tuner.planners.sharding.sharding_terms import ShardingTerms

_UNITS_PER_S = 1e9
"""Costs of the assignment's unit in a second."""


def assigned_plan(terms: ShardingTerms, limits: Limits) -> Plan:
    """Return the plan whose pairwise terms are cheapest, without a limit of memory.

    Args:
        terms: Cost tables of a graph on a mesh.
        limits: Limits of the CPU time, or of counted work (`nodes`), which leads to the same plan on every machine.
    """
    graph, mesh = terms.graph, terms.mesh
    rows = [choices_of(op, mesh.sizes) for op in graph.ops]
    own = [np.zeros(len(each)) for each in rows]
    edges, tables = [], []
    for term in terms.pairwise(rows):
        if len(term.scope) == 1:
            own[term.scope[0]] = own[term.scope[0]] + _UNITS_PER_S * term.table
        elif term.scope:
            edges.append(term.scope)
            tables.append(_UNITS_PER_S * term.table)
    # Nodes that never hold memory make any limit hold.
    problem = problem_of([(0, 0)] * len(rows), own, [np.zeros(len(each)) for each in rows], edges, tables, 0.0)
    best = solve(problem, limits=limits, rng=np.random.default_rng(0), clock=time.process_time).best
    assert best is not None, "without memory and forbidden choices every assignment is feasible"
    served = [own_rows[choice] for own_rows, choice in zip(rows, best.solution.tolist(), strict=True)]
    return Plan(graph=graph, mesh=mesh, served=np.array(served, dtype=np.int64))
