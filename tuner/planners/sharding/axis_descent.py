"""Improvement of a plan one mesh axis at a time: all operators choose together what that axis serves.

While the other axes are fixed, an axis has only a few choices in each operator, and the graph of a step hardly
branches. `elimination` then finds the best of all combinations in milliseconds. Axis follows axis until none improves
the plan. No change of one axis, in any number of operators at once, then makes the plan better; on a mesh of one axis
it is the optimum. Where a graph does branch, some operators keep what they have, and others the next time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from costmodels.sharding.plan import Plan, live_bytes, step_time_of
from hardware.collector import without_collector
from tuner.planners.engine.outcome import ROUNDING
from tuner.planners.sharding.sharding_terms import Charge, ShardingTerms, total_charge_s
from tuner.planners.sharding.table_forms import Row

IsOpen = Callable[[int, int], bool]
"""Whether an operator, the first argument, may change the factor that an axis, the second, serves."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Descent:
    """Result of a descent.

    Attributes:
        plan: Best plan that was found.
        is_optimum: Whether it is proven that no plan costs less.
    """

    plan: Plan
    is_optimum: bool


@without_collector
def descend(
    plan: Plan, terms: ShardingTerms, *, is_open: IsOpen | None = None, charge: Charge | None = None
) -> Descent:
    """Improve a plan axis by axis until no axis improves it any more.

    Args:
        plan: Plan to begin with.
        terms: Cost tables of the plan's graph on its mesh.
        is_open: Restriction of operators; None for no restriction.
        charge: Further costs per operator; None for no further costs.
    """
    axes = [axis for axis, size in enumerate(plan.mesh.sizes) if size > 1]
    rows: list[Row] = [tuple(row) for row in plan.served.tolist()]
    best_s, is_known = math.inf, True
    kept: frozenset[int] = frozenset()
    waiting = list(axes)
    while waiting:
        axis = waiting.pop(0)
        found = terms.least(_choices(terms, rows, axis, is_open), rows, charge=charge, spared=kept)
        kept = found.kept
        is_known = is_known and not kept
        if found.cost_s < best_s * (1 - ROUNDING):
            best_s, rows = found.cost_s, list(found.rows)
            # All other axes may gain from the change; this one only if some operators had to keep their row.
            later = axes.index(axis) + 1
            waiting = [*axes[later:], *axes[: later if kept else later - 1]]
    best = Plan(graph=plan.graph, mesh=plan.mesh, served=np.array(rows, dtype=np.int64).reshape(plan.served.shape))
    # Inexact tables may prefer a plan that is in fact worse than the first one.
    if not terms.is_exact and _priced_s(best, terms, charge) > _priced_s(plan, terms, charge):
        return Descent(plan=plan, is_optimum=False)
    is_optimum = len(axes) <= 1 and is_known and is_open is None and charge is None and terms.is_exact
    return Descent(plan=best, is_optimum=is_optimum)


def charged_s(plan: Plan, charge: Charge | None) -> float:
    """Return the step time of a plan, with a charge [s]."""
    return step_time_of(plan) + total_charge_s(plan, charge)


def _priced_s(plan: Plan, terms: ShardingTerms, charge: Charge | None) -> float:
    """Return the step time of a plan, with a charge and with the tables' prices of its memory [s]."""
    if not terms.byte_s:
        return charged_s(plan, charge)
    live: list[float] = live_bytes(plan).tolist()
    return charged_s(plan, charge) + sum(price_s * live[op] for op, price_s in terms.byte_s.items())


def _choices(terms: ShardingTerms, rows: list[Row], axis: int, is_open: IsOpen | None) -> list[tuple[Row, ...]]:
    """Return the rows that each operator may take while the other axes keep their factors."""
    return [
        terms.rows_beside(number, row, axis) if is_open is None or is_open(number, axis) else (row,)
        for number, row in enumerate(rows)
    ]
