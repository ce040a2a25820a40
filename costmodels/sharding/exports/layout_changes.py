"""Changes of layouts between ranks: the collectives of `costmodels/sharding/layouts.py: moves`, where parts allow it.

An axis cuts a dim by a digit of the dim's indices. The digit of an axis of size s lies behind `above` equal parts:

    digit = index // (size / (above * s)) % s

Contiguous parts, such as those of DTensor, have the digits of the axes one behind the other. If digits of two axes
overlap on a dim that both cut while the tensor is moved, no rank can hold the part that the order of `moves` wants in
between. Then what is left after sums goes directly from the ranks that have it to those that want it, in one exchange.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from costmodels.blocks.operator import OpKind
from costmodels.sharding.layouts import REPLICATED, Layout, moves
from hardware.arrays import IntArray

Axes = tuple[int, ...]
"""Axes of a mesh, in its order."""

Placement = tuple[tuple[int, int], ...]
"""Layout of a tensor by axis: the dim that it cuts, or REPLICATED or PARTIAL, and the equal parts above its digit."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a change.

    Attributes:
        kind: Kind of its collective; None for a local slice.
        axes: Axes of its groups.
        is_direct: Whether it is the exchange that makes all of the rest of the change at once.
        dim: Dim of the local part that a reduce-scatter in front of that exchange deals; None for others.
    """

    kind: OpKind | None
    axes: Axes
    is_direct: bool = False
    dim: int | None = None


def contiguous(layout: Layout, sizes: Sequence[int]) -> Placement:
    """Return a layout in which the axes of a dim deal contiguous parts, the earlier one the larger parts."""
    return tuple(
        (dim, math.prod(sizes[other] for other in range(axis) if layout[other] == dim) if dim >= 0 else 1)
        for axis, dim in enumerate(layout)
    )


def change_steps(before: Placement, after: Placement, shape: Sequence[int], sizes: Sequence[int]) -> tuple[Step, ...]:
    """Return the steps that change a placement into another, in the order in which they run.

    Args:
        before: Current placement.
        after: Wanted placement, without PARTIAL.
        shape: Shape of the whole tensor.
        sizes: Number of ranks along each axis.
    """
    planned = _planned(before, after, sizes)
    if is_crowded(before, after, sizes):
        return _direct_steps(before, after, planned, shape, sizes)
    sliced = tuple(
        axis for axis, (old, new) in enumerate(zip(before, after, strict=True)) if old[0] == REPLICATED and new[0] >= 0
    )
    found = tuple(Step(kind, axes) for kind, axes in planned)
    return (Step(None, sliced), *found) if sliced else found


def sends_as_planned(before: Layout, after: Layout, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether a change of contiguous parts has the collectives of the plan's list."""
    old, new = contiguous(before, sizes), contiguous(after, sizes)
    sent = {(step.kind, step.axes) for step in change_steps(old, new, shape, sizes) if step.kind is not None}
    return sent == set(_planned(old, new, sizes))


def is_crowded(before: Placement, after: Placement, sizes: Sequence[int]) -> bool:
    """Return whether an axis comes to a dim whose digit overlaps that of one that leaves the dim.

    An axis that stays on a dim under another digit leaves it and comes back.
    """
    changed = [axis for axis, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    leaving = [axis for axis in changed if before[axis][0] >= 0]
    coming = [axis for axis in changed if after[axis][0] >= 0]
    return any(
        before[old][0] == after[new][0]
        and (old == new or overlap((before[old][1], sizes[old]), (after[new][1], sizes[new])))
        for old in leaving
        for new in coming
    )


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether two digits of a dim overlap, each given by the equal parts above it and its size."""
    (low, low_size), (high, _) = sorted([one, other])
    return high % (low * low_size) != 0


def held(placement: Placement, size: int, dim: int, sizes: Sequence[int], place: Sequence[int]) -> IntArray:
    """Return the indices of a dim that a rank holds, in increasing order.

    Args:
        placement: Placement of the tensor.
        size: Size of the dim.
        dim: Dim of the tensor.
        sizes: Number of ranks along each axis.
        place: Coordinates of the rank.
    """
    found = np.arange(size)
    for axis, (cut, above) in enumerate(placement):
        if cut == dim:
            found = found[found // (size // (above * sizes[axis])) % sizes[axis] == place[axis]]
    return found


Block = tuple[IntArray, ...]
"""Positions along each dim of a part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What a rank sends to each rank of its group in a direct exchange, and what it receives.

    Attributes:
        sent: Block of the own part for each rank, in the order of the mesh; None for nothing.
        received: Block of the wanted part from each rank; None for nothing.
        shape: Shape of the wanted part.
    """

    sent: tuple[Block | None, ...]
    received: tuple[Block | None, ...]
    shape: tuple[int, ...]


@lru_cache(maxsize=4096)
def exchange_of(
    steps: tuple[Step, ...],
    before: Placement,
    after: Placement,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    place: tuple[int, ...],
) -> Exchange:
    """Return the direct exchange of a change for one rank.

    Of several ranks that have what another lacks, each sends an equal share.

    Args:
        steps: Steps of the change, of which one is direct.
        before: Placement before the change.
        after: Placement after it.
        shape: Shape of the whole tensor.
        sizes: Number of ranks along each axis.
        place: Coordinates of the rank.
    """
    direct = next(step for step in steps if step.is_direct)
    dealt = next((step for step in steps if step.dim is not None), None)
    # axes along which ranks hold the same before the exchange
    alike = [axis for axis in direct.axes if before[axis][0] < 0 and (dealt is None or axis not in dealt.axes)]

    def has(rank: tuple[int, ...]) -> Block:
        parts = [held(before, size, dim, sizes, rank) for dim, size in enumerate(shape)]
        if dealt is not None and dealt.dim is not None:
            number = 0
            for axis in dealt.axes:
                number = number * sizes[axis] + rank[axis]
            ways = math.prod(sizes[axis] for axis in dealt.axes)
            parts[dealt.dim] = np.split(parts[dealt.dim], ways)[number]
        return tuple(parts)

    def wants(rank: tuple[int, ...]) -> Block:
        return tuple(held(after, size, dim, sizes, rank) for dim, size in enumerate(shape))

    def given(source: tuple[int, ...], target: tuple[int, ...]) -> Block | None:
        """Return the indices that one rank sends to another."""
        blocks = [np.intersect1d(one, other) for one, other in zip(has(source), wants(target), strict=True)]
        if not all(map(len, blocks)):
            return None
        if all(source[axis] == target[axis] for axis in direct.axes if axis not in alike):
            return tuple(blocks) if source == target else None  # the target has it
        number, ways = 0, 1
        for axis in alike:
            # each target begins with another rank, so that none sends all odd shares
            number, ways = number * sizes[axis] + (source[axis] - target[axis]) % sizes[axis], ways * sizes[axis]
        longest = max(range(len(blocks)), key=lambda dim: len(blocks[dim]))
        blocks[longest] = np.array_split(blocks[longest], ways)[number]
        return tuple(blocks) if len(blocks[longest]) else None

    def positions(whole: Block, part: Block | None) -> Block | None:
        return None if part is None else tuple(map(np.searchsorted, whole, part))

    ranks = [
        tuple(dict(zip(direct.axes, own, strict=True)).get(axis, at) for axis, at in enumerate(place))
        for own in product(*(range(sizes[axis]) for axis in direct.axes))
    ]
    return Exchange(
        sent=tuple(positions(has(place), given(place, other)) for other in ranks),
        received=tuple(positions(wants(place), given(other, place)) for other in ranks),
        shape=tuple(map(len, wants(place))),
    )


def _planned(before: Placement, after: Placement, sizes: Sequence[int]) -> list[tuple[OpKind, Axes]]:
    old, new = (tuple(dim for dim, _ in each) for each in (before, after))
    return [(move.kind, move.axes) for move in moves(old, new, 1.0, sizes)]


def _direct_steps(
    before: Placement,
    after: Placement,
    planned: Sequence[tuple[OpKind, Axes]],
    shape: Sequence[int],
    sizes: Sequence[int],
) -> tuple[Step, ...]:
    """Return sums, and one exchange for all else; parts of sums that nobody keeps whole are dealt before."""
    summed = {kind: axes for kind, axes in planned if kind in (OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE)}
    scattered, reduced = summed.get(OpKind.REDUCE_SCATTER, ()), summed.get(OpKind.ALL_REDUCE, ())
    changed = tuple(axis for axis, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
    direct = Step(OpKind.ALL_TO_ALL, tuple(axis for axis in changed if axis not in reduced), is_direct=True)
    found: list[Step] = []
    if scattered:
        ways = math.prod(sizes[axis] for axis in scattered)
        local = [len(held(before, size, dim, sizes, (0,) * len(sizes))) for dim, size in enumerate(shape)]
        # best the dim that the axis shall cut, which most of the share already suits
        wanted = after[scattered[0]][0]
        dims = [dim for dim in (wanted, *range(len(shape))) if local[dim] % ways == 0]
        found.append(
            Step(OpKind.REDUCE_SCATTER, scattered, dim=dims[0]) if dims else Step(OpKind.ALL_REDUCE, scattered)
        )
    if not reduced:
        return (*found, direct)
    summed_up = Step(OpKind.ALL_REDUCE, reduced)
    is_smaller_after = _num_parts(after, sizes) > _num_parts(before, sizes)
    return (*found, direct, summed_up) if is_smaller_after else (*found, summed_up, direct)


def _num_parts(placement: Placement, sizes: Sequence[int]) -> int:
    return math.prod(size for (dim, _), size in zip(placement, sizes, strict=True) if dim >= 0)
