"""Makes a plan better, one mesh axis at a time: each time all operators choose anew what that axis serves, together.

While the other axes stay, an axis has only a few choices in each operator, and a step is a graph that hardly branches,
so that `elimination` finds the best of all their combinations in milliseconds. Axis after axis follows until none finds
anything. What is left is a plan that no change of one axis makes better, in any number of operators at once; on a mesh
of one axis it is the optimum. Where a graph does branch, some operators keep what they have, and others the next time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from costmodels.sharding.plan import Plan, cost_of, live_bytes
from tuner.planners.engine.outcome import ROUNDING
from tuner.planners.sharding.sharding_terms import Charge, Row, ShardingTerms, rows_beside

IsOpen = Callable[[int, int], bool]
"""Whether an operator may choose anew what an axis serves."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Descent:
    """What became of a plan.

    Attributes:
        plan: The best that was found.
        is_optimum: Whether it is known that no plan costs less.
    """

    plan: Plan
    is_optimum: bool


def descended(
    plan: Plan, terms: ShardingTerms, *, is_open: IsOpen | None = None, charge: Charge | None = None
) -> Descent:
    """The plan that axis after axis leads to.

    Args:
        plan: Where it begins.
        terms: What plans of its graph on its mesh cost.
        is_open: Restricts operators; None for no restriction.
        charge: Further costs.
    """
    axes = [axis for axis, size in enumerate(plan.mesh.sizes) if size > 1]
    rows: list[Row] = [tuple(row) for row in plan.served.tolist()]
    best_s, is_known = math.inf, True
    kept: frozenset[int] = frozenset()
    waiting = list(axes)
    while waiting:
        axis = waiting.pop(0)
        found = terms.least(_choices(plan, rows, axis, is_open), rows, charge=charge, spared=kept)
        kept = found.kept
        is_known = is_known and not kept
        if found.cost_s < best_s * (1 - ROUNDING):
            best_s, rows = found.cost_s, list(found.rows)
            later = axes.index(axis) + 1
            waiting = [*axes[later:], *axes[: later if kept else later - 1]]
    best = Plan(graph=plan.graph, mesh=plan.mesh, served=np.array(rows, dtype=np.int64).reshape(plan.served.shape))
    if not terms.is_exact and _priced_s(best, terms, charge) > _priced_s(plan, terms, charge):
        return Descent(plan=plan, is_optimum=False)
    is_optimum = len(axes) <= 1 and is_known and is_open is None and charge is None and terms.is_exact
    return Descent(plan=best, is_optimum=is_optimum)


def charged_s(plan: Plan, charge: Charge | None) -> float:
    """The step time of a plan, and what is charged beside it [s]."""
    step_time_s = cost_of(plan).step_time_s
    if charge is None:
        return step_time_s
    return step_time_s + sum(charge(number, tuple(row)) for number, row in enumerate(plan.served.tolist()))


def _priced_s(plan: Plan, terms: ShardingTerms, charge: Charge | None) -> float:
    """The same with what the tables' prices make of the memory that a plan takes."""
    live: list[float] = live_bytes(plan).tolist()
    return charged_s(plan, charge) + sum(price_s * live[op] for op, price_s in terms.byte_s.items())


def _choices(plan: Plan, rows: list[Row], axis: int, is_open: IsOpen | None) -> list[tuple[Row, ...]]:
    """The rows that each operator may take while the other axes serve what they do."""
    known: dict[tuple[int, Row], tuple[Row, ...]] = {}
    found: list[tuple[Row, ...]] = []
    for number, (op, row) in enumerate(zip(plan.graph.ops, rows, strict=True)):
        if is_open is not None and not is_open(number, axis):
            found.append((row,))
            continue
        key = (id(op.rule), row)
        if key not in known:
            known[key] = rows_beside(op.rule, plan.mesh.sizes, row, axis)
        found.append(known[key])
    return found
