"""How a tensor lies on a mesh, and what moves it from one such layout to another.

A layout says of every mesh axis which dim of the tensor it cuts; or that all devices along it hold the same
(REPLICATED), or parts of a sum (PARTIAL). An axis cuts a dim by a digit of its own: an index is a number with a digit
for each axis, in the mesh's order, and the axis deals by its digit whether others cut the dim or not. So what is cut by
more axes is a part of what is cut by fewer, a slice moves nothing, and other axes take no part in a collective. Where
an axis cuts a dim alone its parts are contiguous; beside another one they may be strided, as those of FSDP over tensor
parallelism are.

Sources: sections 2.2 and 2.3 of ManuMatic, whose mismatch classifier is `moves`. Two things there are mended: what is
replicated becomes sharded by a local slice, which moves nothing, and a reduce-scatter is what partial sums need that
shall be sharded. `as_printed` is the paper's own reading, in which the slice counts as a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.operators.layer_operators import OpKind
from costmodels.sharding.device_mesh import DeviceMesh

REPLICATED, PARTIAL = -1, -2

Layout = tuple[int, ...]
"""Of each axis the dim that it cuts, REPLICATED or PARTIAL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A collective that changes a layout.

    Attributes:
        kind: Which.
        axes: Along which axes, together.
        message_bytes: Its message, as hardware/collectives.py defines that for its kind.
    """

    kind: OpKind
    axes: tuple[int, ...]
    message_bytes: float

    def seconds(self, mesh: DeviceMesh) -> float:
        """What it takes [s]."""
        return mesh.seconds(self.kind, self.message_bytes, self.axes)


def local_share(layout: Layout, sizes: Sequence[int]) -> float:
    """The part of the tensor that one device holds, on axes of those sizes."""
    share = 1.0
    for dim, size in zip(layout, sizes, strict=True):
        if dim >= 0:
            share /= size
    return share


def moves(before: Layout, after: Layout, num_bytes: float, sizes: Sequence[int]) -> tuple[Move, ...]:
    """What makes one layout into another, in the order in which the messages are smallest; empty if nothing moves.

    Slices come first, then reduce-scatters, exchanges, all-reduces, and at last the gathers. Axes that need the same
    are one group.

    Args:
        before: How the tensor lies.
        after: How it shall lie; nothing wants partial sums.
        num_bytes: Of the whole tensor.
        sizes: Devices along each axis.
    """
    if before == after:
        return ()
    pairs = list(enumerate(zip(before, after, strict=True)))
    local_bytes = num_bytes * local_share(before, sizes)
    for axis, (old, new) in pairs:
        if old == REPLICATED and new >= 0:
            local_bytes /= sizes[axis]
    found: list[Move] = []
    scattered = tuple(axis for axis, (old, new) in pairs if old == PARTIAL and new >= 0)
    if scattered:
        found.append(Move(kind=OpKind.REDUCE_SCATTER, axes=scattered, message_bytes=local_bytes))
        for axis in scattered:
            local_bytes /= sizes[axis]
    exchanged = tuple(axis for axis, (old, new) in pairs if old >= 0 and new >= 0 and old != new)
    if exchanged:
        found.append(Move(kind=OpKind.ALL_TO_ALL, axes=exchanged, message_bytes=local_bytes))
    reduced = tuple(axis for axis, (old, new) in pairs if old == PARTIAL and new == REPLICATED)
    if reduced:
        found.append(Move(kind=OpKind.ALL_REDUCE, axes=reduced, message_bytes=local_bytes))
    gathered = tuple(axis for axis, (old, new) in pairs if old >= 0 and new == REPLICATED)
    if gathered:
        for axis in gathered:
            local_bytes *= sizes[axis]
        found.append(Move(kind=OpKind.ALL_GATHER, axes=gathered, message_bytes=local_bytes))
    return tuple(found)


def as_printed(before: Layout, after: Layout, num_bytes: float, sizes: Sequence[int]) -> tuple[Move, ...]:
    """The same by ManuMatic's section 2.3: what is replicated and shall be sharded counts as a reduce-scatter."""
    cut = tuple(
        axis for axis, (old, new) in enumerate(zip(before, after, strict=True)) if old == REPLICATED and new >= 0
    )
    found = moves(before, after, num_bytes, sizes)
    if not cut:
        return found
    message_bytes = num_bytes * local_share(before, sizes)
    return (Move(kind=OpKind.REDUCE_SCATTER, axes=cut, message_bytes=message_bytes), *found)
