"""What a device of a mesh sends in a step: bytes by kind and axes, counted alike for a plan and for what judges read.

Bytes are those that a device sends in a ring: of n devices and a message as hardware/collectives.py defines it,
2 (n-1)/n of it for an all-reduce and (n-1)/n for all else; a permutation sends what a device has. A reduce-scatter
counts as the all-reduce that stands for it on backends that have none: what is compared is where partial sums are
added up, and of how much.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from costmodels.operators.layer_operators import OpKind
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.exports.axis_order import AxisOrders
from costmodels.sharding.exports.reorders import reorders
from costmodels.sharding.plan import Plan, PlanCost

REDUCED, GATHERED, EXCHANGED = KINDS = ("reduced", "gathered", "exchanged")
"""All-reduces and reduce-scatters; all-gathers; all-to-alls and permutations."""

OF_PLAN = {
    OpKind.ALL_REDUCE: REDUCED,
    OpKind.REDUCE_SCATTER: REDUCED,
    OpKind.ALL_GATHER: GATHERED,
    OpKind.ALL_TO_ALL: EXCHANGED,
}

Axes = tuple[str, ...]
"""Names of a mesh's axes, in its order."""

Sent = Counter[tuple[str, Axes]]
"""Bytes by kind and the axes along which they go."""

PERMUTED: Axes = ()
"""Stands for the axes of a permutation, which pairs of devices make up."""

ODD_GROUPS: Axes = ("?",)
"""Stands for the axes of groups that no axes of the mesh make."""


def ring_bytes(kind: str, message_bytes: float, group: int) -> float:
    """What a device sends of a message in a group of so many; of what is permuted the group is no matter [bytes]."""
    return (2 if kind == REDUCED else 1) * message_bytes * (group - 1) / group


def planned_bytes(cost: PlanCost, mesh: DeviceMesh) -> Sent:
    """What each device sends by a plan [bytes]."""
    found: Sent = Counter()
    for each in cost.collectives:
        group = math.prod(mesh.sizes[axis] for axis in each.move.axes)
        kind = OF_PLAN[each.move.kind]
        axes = tuple(mesh.names[axis] for axis in sorted(each.move.axes))
        found[kind, axes] += each.times * ring_bytes(kind, each.move.message_bytes, group)
    return found


def reordered_bytes(orders: AxisOrders) -> Sent:
    """What each device sends beyond its plan, since a framework deals contiguous parts (`reorders`) [bytes]."""
    found: Sent = Counter()
    for each in reorders(orders):
        found[EXCHANGED, PERMUTED] += each.times * each.permuted_bytes
    return found


def planned_flop(plan: Plan) -> float:
    """Floating-point operations of a device in all products and convolutions of a step."""
    return sum(
        op.times * op.flop / math.prod(size for size, factor in zip(plan.mesh.sizes, row, strict=True) if factor >= 0)
        for op, row in zip(plan.graph.ops, plan.served.tolist(), strict=True)
    )


def by_kind(sent: Mapping[tuple[str, Axes], float]) -> dict[str, float]:
    """Bytes by kind alone, with a zero where nothing is sent."""
    found = dict.fromkeys(KINDS, 0.0)
    for (kind, _), num_bytes in sent.items():
        found[kind] += num_bytes
    return found
