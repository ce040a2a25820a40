"""Totals of a plan's collectives by kind and axes, for reports and terminal output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from costmodels.sharding.plan import Plan, PlanCost


def collectives_by_kind(plan: Plan, cost: PlanCost) -> list[dict[str, Any]]:
    """Return times, message bytes and seconds per step for each kind and group of axes, the longest first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for each in cost.collectives:
        key = (each.move.kind.value, "*".join(plan.mesh.names[axis] for axis in each.move.axes))
        total = found.setdefault(key, {"kind": key[0], "axes": key[1], "times": 0, "bytes": 0.0, "seconds": 0.0})
        total["times"] += each.times
        total["bytes"] += each.times * each.move.message_bytes
        total["seconds"] += each.times * each.seconds
    return sorted(found.values(), key=lambda total: -total["seconds"])


def collective_lines(totals: Iterable[Mapping[str, Any]]) -> list[str]:
    """Format these totals as text, one line each."""
    rows = list(totals)
    # Align the columns of all lines.
    width = max((len(each["axes"]) for each in rows), default=0)
    return [
        f"  {each['kind']:<15} {each['axes']:<{width}} {each['times']:>6,} x  {each['bytes'] / 1e6:12,.1f} MB  "
        f"{each['seconds']:10.4g} s"
        for each in rows
    ]
