"""Improvement of a plan for devices that run collectives beside the compute.

The tables of a descent charge each tensor's moves in full, and cannot know which of them other work hides. So the
plan's timeline is looked at: the share of each tensor's moves that was exposed, and for tensors that do not move, how
long their readers had to wait anyway. A descent under these shares leads to another plan, whose own timeline decides
whether it is better, and gives the shares of the next round. Shares are rounded, so that equal layers share tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from costmodels.sharding.laid_sources import lay_sources
from costmodels.sharding.overlap import Timeline, timeline_of
from costmodels.sharding.plan import Plan, PlanCost, cost_of
from hardware.arrays import FloatArray
from tuner.planners.engine.outcome import ROUNDING
from tuner.planners.sharding.axis_descent import descend
from tuner.planners.sharding.pins import Pinned
from tuner.planners.sharding.sharding_terms import ShardingTerms, total_charge_s

ROUNDS = 4
"""Most descents from one plan."""

MOST_STARTS = 2
"""Most plans that are improved, unless a caller asks for more."""

SHARES = (0.1, 0.4, 0.7, 1.0)
"""Shares to which exposed ones are rounded up; hidden moves keep a small one, for they delay those behind them."""


def hide_moves(
    plans: Sequence[Plan],
    terms: ShardingTerms,
    *,
    memory_bytes: float = math.inf,
    pins: Pinned | None = None,
    most: int = MOST_STARTS,
) -> tuple[Plan, PlanCost]:
    """Return the fastest plan with overlap that descents find from the fastest of some plans, and its cost.

    Args:
        plans: Plans to begin with, of which at least one fits.
        terms: Cost tables of their graph on their mesh.
        memory_bytes: Most memory that a device may hold.
        pins: Pins that hold in these plans and in the one that is found.
        most: Most plans that are improved.
    """
    is_open, charge = (None, None) if pins is None else (pins.restriction, pins.charge)
    kept = () if pins is None else {op for factors in pins.factors for op in factors}
    seen: dict[bytes, tuple[float, Plan, PlanCost, Timeline]] = {}

    def look(plan: Plan) -> tuple[float, Plan, PlanCost, Timeline] | None:
        key = plan.served.tobytes()
        if key in seen:
            return None
        cost = cost_of(plan)
        if cost.peak_memory_bytes > memory_bytes:
            return None
        timeline = timeline_of(plan, cost)
        seen[key] = (timeline.step_time_s + total_charge_s(plan, charge), plan, cost, timeline)
        return seen[key]

    begun = sorted(filter(None, map(look, plans)), key=lambda one: one[0])
    for start in begun[:most]:
        best = start
        for _ in range(ROUNDS):
            _, plan, _, timeline = best
            end = descend(plan, terms.with_exposed(_shares(timeline)), is_open=is_open, charge=charge)
            found = look(lay_sources(end.plan, kept=kept))
            if found is None or found[0] >= best[0] * (1 - ROUNDING):
                break
            best = found
    _, plan, cost, _ = min(seen.values(), key=lambda one: one[0])
    return plan, cost


def _shares(timeline: Timeline) -> FloatArray:
    """Return the share of each tensor's moves that a plan with such a timeline would show [t]."""
    moved_s, exposed_s = timeline.moved_s, timeline.exposed_s
    is_moved = moved_s > 0
    usual_s = float(moved_s[is_moved].mean()) if is_moved.any() else 0.0
    # What does not move could move for as long as its first reader does not need it.
    others = 1.0 - np.minimum(timeline.slack_s / usual_s, 1.0) if usual_s else np.ones_like(moved_s)
    shares = np.where(is_moved, exposed_s / np.where(is_moved, moved_s, 1.0), others)
    levels = np.array(SHARES)
    found: FloatArray = levels[np.minimum(np.searchsorted(levels, shares - ROUNDING), len(levels) - 1)]
    return found
