"""The way from one order of axes to another that a partitioner finds cheap: reorder, move, reorder.

Where an order is broken (`axis_order`), XLA gathers more than it needs, at worst everything. It does as the plan says
once the layout in between is written down: axes that stay on a dim come first there, in one order on both sides, and
those that leave it together too. What is left to pay is a permutation: each device sends what it has, once.

    gather  (a, b) -> (b)       as  (a, b) -> (b, a), a permutation, and  (b, a) -> (b)
    slice   (b) -> (a, b)       as  (b) -> (b, a), and  (b, a) -> (a, b), a permutation
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.sharding.exports.axis_order import AxisOrders, Order
from costmodels.sharding.graph import CONSTANT

Orders = tuple[Order, ...]
"""The axes on each dim of a tensor, major to minor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How a tensor gets from one layout to another.

    Attributes:
        layouts: Those that it takes, without the first one; the last is where it shall lie.
        permuted_bytes: What each device sends only to reorder its parts.
    """

    layouts: tuple[Orders, ...]
    permuted_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reorder:
    """A place where parts are permuted.

    Attributes:
        tensor: Number of what is.
        op: Number of the operator that writes or reads it.
        permuted_bytes: What each device sends for that in one execution.
        times: How often it runs in a step.
    """

    tensor: int
    op: int
    permuted_bytes: float
    times: int


def way(before: Orders, after: Orders, num_bytes: float, sizes: Sequence[int]) -> Way:
    """The cheaper of both ways that reorder to what the one side has.

    Args:
        before: How the tensor lies; partial sums cut no dim.
        after: How it shall lie.
        num_bytes: Of the whole tensor.
        sizes: Devices along each axis.
    """
    ways = []
    for leader in (before, after):
        first = _reordered(before, after, leader)
        last = _reordered(after, before, leader)
        permuted_bytes = sum(
            num_bytes / math.prod(sizes[axis] for order in orders for axis in order)
            for orders, is_permuted in ((before, first != before), (after, last != after))
            if is_permuted
        )
        layouts = (first, *_between(first, last), last, after)
        ways.append(
            Way(
                layouts=tuple(each for one, each in itertools.pairwise((before, *layouts)) if each != one),
                permuted_bytes=permuted_bytes,
            )
        )
    return min(ways, key=lambda each: each.permuted_bytes)


def reorders(orders: AxisOrders) -> tuple[Reorder, ...]:
    """Every place of a plan where parts are permuted, a tensor that several operators want in one layout once."""
    plan = orders.plan
    graph, sizes = plan.graph, plan.mesh.sizes
    found = []
    for tensor in dict.fromkeys(tensor for tensor, _ in orders.broken):
        num_bytes = graph.tensors[tensor].num_bytes
        maker, slot = graph.maker[tensor]
        lies = orders.lying(tensor)
        places = [(maker, orders.written(maker, slot), lies, graph.sums[tensor])]
        if graph.ops[maker].primitive != CONSTANT:
            wanted = {orders.read(use.op, use.operand): use for use in reversed(graph.uses[tensor])}
            places += [(use.op, lies, layout, use.times) for layout, use in wanted.items()]
        for op, before, after, times in places:
            permuted_bytes = way(before, after, num_bytes, sizes).permuted_bytes if before != after else 0.0
            if permuted_bytes:
                found.append(Reorder(tensor=tensor, op=op, permuted_bytes=permuted_bytes, times=times))
    return tuple(found)


def _reordered(one: Orders, other: Orders, leader: Orders) -> Orders:
    """The dims of one side: first the axes that stay and last those that leave, both in the leader's order."""
    rank = {axis: number for order in leader for number, axis in enumerate(order)}
    dim_of = {axis: dim for dim, order in enumerate(other) for axis in order}

    def place(dim: int, order: Order, axis: int) -> tuple[int, int, int]:
        target = dim_of.get(axis)
        if target is None:
            return 1, order.index(axis), 0
        if target == dim:
            return 0, rank[axis], 0
        return 2, next(number for number, mate in enumerate(order) if dim_of.get(mate) == target), rank[axis]

    return tuple(tuple(sorted(order, key=functools.partial(place, dim, order))) for dim, order in enumerate(one))


def _between(first: Orders, last: Orders) -> tuple[Orders, ...]:
    """The layout before all gathers, which come last; none where a dim is gathered that others come to."""
    kept = frozenset(axis for order in last for axis in order)
    found = list[Order]()
    for one, other in zip(first, last, strict=True):
        gathered = tuple(axis for axis in one if axis not in kept)
        stays = tuple(axis for axis in other if axis in one)
        if gathered and len(stays) < len(other):
            return ()
        found.append(stays + gathered + tuple(axis for axis in other if axis not in one))
    return (tuple(found),)
