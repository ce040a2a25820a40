"""Layouts of tensors on a mesh, and the collectives that change one layout into another.

A layout has one entry per mesh axis: the dim of the tensor that the axis partitions, REPLICATED if all devices along
the axis hold the same data, or PARTIAL if they hold parts of a sum. Every axis partitions a dim by a digit of its own:
an index along the dim is read as a number with one digit per axis, in the order of the mesh, and an axis deals by its
digit whether or not other axes partition the dim. This has three consequences. A part under more axes lies inside a
part under fewer axes, a slice moves nothing, and other axes take no part in a collective. If an axis partitions a dim
alone, its parts are contiguous. Beside another axis they may be strided, like those of FSDP over tensor parallelism.

Sources: sections 2.2 and 2.3 of ManuMatic; `moves` is its mismatch classifier with two corrections. A replicated tensor
becomes sharded by a local slice, which moves nothing; the paper counts a reduce-scatter. A reduce-scatter is used for
partial sums that shall be sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.blocks.operator import OpKind
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.fusion import LAUNCH_S
from costmodels.sharding.joining import MOST_BYTES, Joining, packing_s

REPLICATED, PARTIAL = -1, -2

Layout = tuple[int, ...]
"""Dim that each axis partitions, or REPLICATED or PARTIAL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A collective that changes a layout.

    Attributes:
        kind: Kind of collective.
        axes: Axes of the mesh that form its groups together.
        message_bytes: Size of its message, as hardware/collectives.py defines it for the kind [bytes].
        turns: How often a device turns its part, so that the dim that is gathered or scattered lies outermost, unless
            it is the first dim. An exchange gathers one dim and scatters another.
    """

    kind: OpKind
    axes: tuple[int, ...]
    message_bytes: float
    turns: int = 0

    def seconds(self, mesh: DeviceMesh, latency_share: float = 1.0, joining: Joining | None = None) -> float:
        """Return the time of this collective on a mesh [s].

        Args:
            mesh: Mesh of devices.
            latency_share: Part of the latency that its tensor pays (`joining.latency_shares`) if its kind is joined.
            joining: What is joined in its program; None for nothing.
        """
        turning_s = self.turning_s(mesh) if joining is not None and joining.is_packed else 0.0
        if joining is None or self.kind not in joining.kinds:
            return mesh.seconds(self.kind, self.message_bytes, self.axes) + turning_s
        together = max(MOST_BYTES // max(self.message_bytes, 1.0), 1.0)  # messages of this size in a joint one
        share = max(latency_share, 1.0 / together)
        found = mesh.seconds(self.kind, self.message_bytes, self.axes, share)
        is_packed = joining.is_packed and found > 0 and share < 1
        return found + turning_s + (packing_s(self.kind, self.message_bytes, mesh) if is_packed else 0.0)

    def turning_s(self, mesh: DeviceMesh) -> float:
        """Return the time of the kernels that turn the parts of an array for the collective, or behind it [s]."""
        launched_s, s_per_byte = self.turning_line(mesh)
        return launched_s + s_per_byte * self.message_bytes

    def turning_line(self, mesh: DeviceMesh) -> tuple[float, float]:
        """Return the time of the launches in `turning_s` [s], and that for each byte of the message [s/byte]."""
        ways = mesh.size_along(self.axes)
        if not self.turns or ways == 1:
            return 0.0, 0.0
        parts = 1 if self.kind is OpKind.ALL_TO_ALL else ways
        return self.turns * LAUNCH_S, self.turns * 2 / (parts * mesh.memory_bandwidth_bytes_per_s)


def local_share(layout: Layout, sizes: Sequence[int]) -> float:
    """Return the share of the tensor that one device holds, on axes of the given sizes."""
    # Only axes with a dim (>= 0) reduce the local part; REPLICATED and PARTIAL hold the whole.
    share = 1.0
    for dim, size in zip(layout, sizes, strict=True):
        if dim >= 0:
            share /= size
    return share


def _turns(layout: Layout, axes: Sequence[int]) -> int:
    """Return whether some axes cut another dim than the first, as a number."""
    return int(any(layout[axis] for axis in axes))


def moves(before: Layout, after: Layout, num_bytes: float, sizes: Sequence[int]) -> tuple[Move, ...]:
    """Return the collectives that change one layout into another, ordered so that messages are smallest.

    Slices come first, then reduce-scatters, all-to-alls and all-reduces, and finally all-gathers. Axes that need the
    same kind of collective form one group.

    Args:
        before: Current layout of the tensor.
        after: Wanted layout of the tensor; it holds no PARTIAL.
        num_bytes: Size of the whole tensor [bytes].
        sizes: Number of devices along each axis.

    Returns:
        The collectives in their order; empty if nothing moves.
    """
    if before == after:
        return ()
    pairs = list(enumerate(zip(before, after, strict=True)))
    # `local_bytes` follows the size of one device's part from step to step; each message is a multiple of it.
    local_bytes = num_bytes * local_share(before, sizes)
    for axis, (old, new) in pairs:
        # A local slice: the part shrinks without a message.
        if old == REPLICATED and new >= 0:
            local_bytes /= sizes[axis]
    found: list[Move] = []
    scattered = tuple(axis for axis, (old, new) in pairs if old == PARTIAL and new >= 0)
    if scattered:
        found.append(
            Move(kind=OpKind.REDUCE_SCATTER, axes=scattered, message_bytes=local_bytes, turns=_turns(after, scattered))
        )
        for axis in scattered:
            local_bytes /= sizes[axis]
    exchanged = tuple(axis for axis, (old, new) in pairs if old >= 0 and new >= 0 and old != new)
    # An all-to-all keeps the size of the local part.
    if exchanged:
        found.append(
            Move(
                kind=OpKind.ALL_TO_ALL,
                axes=exchanged,
                message_bytes=local_bytes,
                turns=_turns(before, exchanged) + _turns(after, exchanged),
            )
        )
    reduced = tuple(axis for axis, (old, new) in pairs if old == PARTIAL and new == REPLICATED)
    if reduced:
        found.append(Move(kind=OpKind.ALL_REDUCE, axes=reduced, message_bytes=local_bytes))
    gathered = tuple(axis for axis, (old, new) in pairs if old >= 0 and new == REPLICATED)
    if gathered:
        for axis in gathered:
            local_bytes *= sizes[axis]
        found.append(
            Move(kind=OpKind.ALL_GATHER, axes=gathered, message_bytes=local_bytes, turns=_turns(before, gathered))
        )
    return tuple(found)
