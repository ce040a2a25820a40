"""Intermediate layouts that let a partitioner change the order of axes cheaply: reorder, move, reorder.

If an order is broken (see `axis_order`), XLA gathers more than it needs, in the worst case the whole tensor. It
communicates as the plan says once the intermediate layout is written down. In that layout, the axes that stay on a dim
come first, in one order on both sides, and axes that leave it together stay together. The remaining cost is a
permutation, in which each device sends its part once.

    gather  (a, b) -> (b)       becomes  (a, b) -> (b, a), a permutation, then  (b, a) -> (b)
    slice   (b) -> (a, b)       becomes  (b) -> (b, a), then  (b, a) -> (a, b), a permutation
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.sharding.exports.axis_order import Order

Orders = tuple[Order, ...]
"""Axes on each dim of a tensor, major to minor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Sequence of layouts from one layout of a tensor to another.

    Attributes:
        layouts: Layouts on the way without the first one; the last is the wanted layout.
        permuted_bytes: Bytes that each device sends only to reorder its parts.
    """

    layouts: tuple[Orders, ...]
    permuted_bytes: float


def way(before: Orders, after: Orders, num_bytes: float, sizes: Sequence[int]) -> Way:
    """Return the cheaper of two ways: reorder to the order of the layout before, or to that of the layout after.

    Args:
        before: Current layout; partial sums occupy no dim.
        after: Wanted layout of the tensor.
        num_bytes: Size of the whole tensor [bytes].
        sizes: Number of devices along each axis.
    """
    ways = []
    for leader in (before, after):
        first = _sort_axes(before, after, leader)
        last = _sort_axes(after, before, leader)
        # A permutation costs each device its whole local part, in the layout in which it takes place.
        permuted_bytes = sum(
            num_bytes / math.prod(sizes[axis] for order in orders for axis in order)
            for orders, is_permuted in ((before, first != before), (after, last != after))
            if is_permuted
        )
        layouts = (first, *_find_middle(first, last), last, after)
        ways.append(
            Way(
                layouts=tuple(each for one, each in itertools.pairwise((before, *layouts)) if each != one),
                permuted_bytes=permuted_bytes,
            )
        )
    return min(ways, key=lambda each: each.permuted_bytes)


def _sort_axes(one: Orders, other: Orders, leader: Orders) -> Orders:
    """Return one layout with sorted axes: first those that stay, last those that leave, in the leader's order."""
    rank = {axis: number for order in leader for number, axis in enumerate(order)}
    dim_of = {axis: dim for dim, order in enumerate(other) for axis in order}

    def place(dim: int, order: Order, axis: int) -> tuple[int, int, int]:
        target = dim_of.get(axis)
        if target is None:
            # Axes that are gathered stand between those that stay on the dim and those that leave it for another dim.
            return 1, order.index(axis), 0
        if target == dim:
            return 0, rank[axis], 0
        return 2, next(number for number, mate in enumerate(order) if dim_of.get(mate) == target), rank[axis]

    return tuple(tuple(sorted(order, key=functools.partial(place, dim, order))) for dim, order in enumerate(one))


def _find_middle(first: Orders, last: Orders) -> tuple[Orders, ...]:
    """Return the layout before all gathers, which come last; empty if a dim both gathers axes and receives others."""
    kept = frozenset(axis for order in last for axis in order)
    found = list[Order]()
    for one, other in zip(first, last, strict=True):
        # The axes that stay lead, those to be gathered follow, and those that arrive come last.
        gathered = tuple(axis for axis in one if axis not in kept)
        stays = tuple(axis for axis in other if axis in one)
        if gathered and len(stays) < len(other):
            return ()
        found.append(stays + gathered + tuple(axis for axis in other if axis not in one))
    return (tuple(found),)
