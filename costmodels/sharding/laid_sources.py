"""Layouts of inputs and constants, which follow from their readers.

A slice moves nothing, so a whole input costs no time even where all its readers cut it alike, and a planner that looks
at time alone has no reason to cut it. Laid as its readers want it, it takes less memory, and a loader sends each device
only its part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from costmodels.sharding.graph import CONSTANT, INPUT
from costmodels.sharding.layouts import Layout
from costmodels.sharding.plan import NONE, Plan


def lay_sources(plan: Plan, *, kept: Collection[int] = ()) -> Plan:
    """Return a plan whose inputs and constants lie in the layout in which all their readers want them.

    An axis on which the readers differ, or which leaves them whole, is not changed. Neither the time of a step nor the
    memory at any operator grows.

    Args:
        plan: Plan of a graph.
        kept: Numbers of the operators whose layouts stay as they are.
    """
    graph = plan.graph
    served = plan.served.copy()
    for number, op in enumerate(graph.ops):
        if op.primitive not in (INPUT, CONSTANT) or number in kept:
            continue
        (tensor,), (place,) = op.results, op.rule.results
        wanted = {plan.wanted(use.op, use.operand) for use in graph.uses[tensor]}
        row = _agreed(served[number].tolist(), place, wanted)
        if _divides(row, [factor.size for factor in op.rule.factors], plan.mesh.sizes):
            served[number] = row
    return plan if np.array_equal(served, plan.served) else Plan(graph=graph, mesh=plan.mesh, served=served)


def _agreed(row: list[int], place: Sequence[Sequence[int]], wanted: Collection[Layout]) -> list[int]:
    """Return the factors of a source that the axes serve where its readers agree; `place` holds one for each dim."""
    found = list(row)
    for axis in range(len(row)):
        dims = {layout[axis] for layout in wanted}
        dim = dims.pop() if len(dims) == 1 else NONE
        if dim >= 0 and place[dim]:
            found[axis] = place[dim][0]
    return found


def _divides(row: Sequence[int], lengths: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether the axes that serve a factor divide its length."""
    return all(
        length % math.prod(size for size, factor in zip(sizes, row, strict=True) if factor == number) == 0
        for number, length in enumerate(lengths)
    )
