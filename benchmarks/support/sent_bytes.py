"""Count the bytes that a device of a mesh sends in a step, by kind and axes, in the same way for plans and for judges.

Bytes are counted for a ring of n devices and a message as hardware/collectives.py defines it: 2 (n-1)/n of the message
for an all-reduce, and (n-1)/n for all others. In a permutation a device sends all that it has. A reduce-scatter counts
as the all-reduce that replaces it on backends without one: the comparison is about the places where partial sums are
added up and their sizes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from costmodels.blocks.operator import OpKind
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.exports.axis_order import AxisOrders
from costmodels.sharding.exports.reorders import way
from costmodels.sharding.graph import CONSTANT
from costmodels.sharding.plan import Plan, PlanCost
from costmodels.xla.groups import Axes

REDUCED, GATHERED, EXCHANGED = KINDS = ("reduced", "gathered", "exchanged")
"""Kinds of collectives: all-reduces and reduce-scatters; all-gathers; all-to-alls and permutations."""

OF_PLAN = {
    OpKind.ALL_REDUCE: REDUCED,
    OpKind.REDUCE_SCATTER: REDUCED,
    OpKind.ALL_GATHER: GATHERED,
    OpKind.ALL_TO_ALL: EXCHANGED,
}

Sent = Counter[tuple[str, Axes]]
"""Bytes by kind and by the axes along which they are sent."""

PERMUTED: Axes = ()
"""Placeholder for the axes of a permutation, which is defined by pairs of devices."""


def ring_bytes(kind: str, message_bytes: float, group: int) -> float:
    """Return the bytes that a device sends of a message in a ring of `group` devices [bytes]."""
    return (2 if kind == REDUCED else 1) * message_bytes * (group - 1) / group


def planned_bytes(cost: PlanCost, mesh: DeviceMesh) -> Sent:
    """Count the bytes that each device sends by a plan [bytes]."""
    found: Sent = Counter()
    for each in cost.collectives:
        # A collective along several axes runs among the devices of all of them.
        group = math.prod(mesh.sizes[axis] for axis in each.move.axes)
        kind = OF_PLAN[each.move.kind]
        axes = tuple(mesh.names[axis] for axis in sorted(each.move.axes))
        found[kind, axes] += each.times * ring_bytes(kind, each.move.message_bytes, group)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Reorder:
    """A tensor whose parts are permuted at one operator.

    Attributes:
        tensor: Number of the permuted tensor.
        op: Number of the operator that writes or reads it.
        permuted_bytes: Bytes that each device sends for the permutation in one execution.
        times: Number of executions in a step.
    """

    tensor: int
    op: int
    permuted_bytes: float
    times: int


def reorders(orders: AxisOrders) -> tuple[Reorder, ...]:
    """Return all permutations of a plan; a tensor that several operators want in one layout counts once."""
    plan = orders.plan
    graph, sizes = plan.graph, plan.mesh.sizes
    found = []
    for tensor in dict.fromkeys(tensor for tensor, _ in orders.broken):
        num_bytes = graph.tensors[tensor].num_bytes
        maker, slot = graph.maker[tensor]
        lies = orders.lying(tensor)
        places = [(maker, orders.written(maker, slot), lies, graph.sums[tensor])]
        if graph.ops[maker].primitive != CONSTANT:
            # Reversed, so that the first reader of each layout remains.
            wanted = {orders.read(use.op, use.operand): use for use in reversed(graph.uses[tensor])}
            places += [(use.op, lies, layout, use.times) for layout, use in wanted.items()]
        for op, before, after, times in places:
            permuted_bytes = way(before, after, num_bytes, sizes).permuted_bytes if before != after else 0.0
            if permuted_bytes:
                found.append(Reorder(tensor=tensor, op=op, permuted_bytes=permuted_bytes, times=times))
    return tuple(found)


def reordered_bytes(orders: AxisOrders) -> Sent:
    """Count the bytes that each device sends beyond its plan [bytes].

    A framework deals contiguous parts in one order of axes, which can require permutations (`reorders`).
    """
    found: Sent = Counter()
    for each in reorders(orders):
        found[EXCHANGED, PERMUTED] += each.times * each.permuted_bytes
    return found


def planned_flop(plan: Plan) -> float:
    """Count the floating-point operations of a device in all products and convolutions of a step."""
    # Every axis that serves a factor of an operator divides its work; -1 marks an axis that serves none.
    return sum(
        op.times * op.flop / math.prod(size for size, factor in zip(plan.mesh.sizes, row, strict=True) if factor >= 0)
        for op, row in zip(plan.graph.ops, plan.served.tolist(), strict=True)
    )


def by_kind(sent: Mapping[tuple[str, Axes], float]) -> dict[str, float]:
    """Sum the bytes over axes, with zeros for kinds that are not sent."""
    found = dict.fromkeys(KINDS, 0.0)
    for (kind, _), num_bytes in sent.items():
        found[kind] += num_bytes
    return found
