"""Changes of layouts between the ranks of a plan: exactly the collectives of `costmodels/sharding/layouts.py: moves`.

The part of a rank is a tensor with the dims of the whole. A digit of a dim that the rank holds whole is a dim of its
own in a view, [outer, digit, inner]. To cut a dim by an axis is to take one index of that view, and to gather it is to
add that dim back.

If digits of two axes overlap on a dim that both cut while the tensor is moved, no rank can hold the part that the order
of `moves` wants in between. All axes that leave a dim are gathered first then, which sends more than the plan says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from costmodels.operators.layer_operators import OpKind
from costmodels.sharding.exports.relayouts import relayouts
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout, moves
from trials.torch_training.planned.digits import Digits
from trials.torch_training.planned.mesh import PlanMesh
from trials.torch_training.planned.traffic import Axes

Steps = tuple[tuple[OpKind | None, Axes], ...]
"""Kinds and axes of the collectives of a change, in their order; None is a local slice."""


def change_steps(digits: Digits, tensor: int, before: Layout, after: Layout) -> Steps:
    """Return the collectives that change the layout of a tensor, in the order in which they run."""
    sizes = digits.plan.mesh.sizes
    pairs = list(enumerate(zip(before, after, strict=True)))
    sliced = tuple(axis for axis, (old, new) in pairs if old == REPLICATED and new >= 0)
    planned = [(move.kind, move.axes) for move in moves(before, after, 1.0, sizes)]
    if not _is_crowded(digits, tensor, before, after):
        return ((None, sliced), *planned) if sliced else tuple(planned)
    leaving = tuple(axis for axis, (old, new) in pairs if old >= 0 and new != old)
    cut = tuple(axis for axis, (old, new) in pairs if new >= 0 and old not in (new, PARTIAL))
    reduced = [(kind, axes) for kind, axes in planned if kind in (OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE)]
    return ((OpKind.ALL_GATHER, leaving), (None, cut), *reduced)


def group_axes(digits: Digits) -> set[Axes]:
    """Return the axes of all groups that the layout changes of a plan need."""
    return {
        axes
        for each in relayouts(digits.plan)
        for kind, axes in change_steps(digits, each.tensor, each.before, each.after)
        if kind is not None
    }


def _is_crowded(digits: Digits, tensor: int, before: Layout, after: Layout) -> bool:
    """Return whether an axis that leaves a dim and one that comes to it have digits that overlap."""
    return any(
        old >= 0
        and old == new
        and before[coming] != new
        and after[leaving] != old
        and digits.overlap(tensor, old, leaving, coming)
        for leaving, old in enumerate(before)
        for coming, new in enumerate(after)
        if leaving != coming
    )


class Relayout:
    """Layout changes of this rank's parts.

    Args:
        digits: Digits of the plan.
        mesh: Mesh of the plan.
    """

    def __init__(self, digits: Digits, mesh: PlanMesh) -> None:
        self._digits, self._mesh = digits, mesh

    def cut(self, whole: Tensor, tensor: int, layout: Layout) -> Tensor:
        """Return this rank's part of a whole tensor."""
        part = _Part(self._digits, self._mesh, tensor, (REPLICATED,) * len(layout), whole)
        part.slice([(axis, dim) for axis, dim in enumerate(layout) if dim >= 0])
        return part.value

    def move(self, value: Tensor, tensor: int, before: Layout, after: Layout, *, is_maximum: bool = False) -> Tensor:
        """Return this rank's part of a tensor in another layout.

        Args:
            value: Part of the tensor in the layout `before`.
            tensor: Number of the tensor.
            before: Current layout.
            after: Wanted layout.
            is_maximum: Whether parts of a sum are parts of a maximum instead.
        """
        part = _Part(self._digits, self._mesh, tensor, before, value)
        reduction = dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM
        for kind, axes in change_steps(self._digits, tensor, before, after):
            match kind:
                case None:
                    part.slice([(axis, after[axis]) for axis in axes])
                case OpKind.REDUCE_SCATTER:
                    part.reduce_scatter([(axis, after[axis]) for axis in axes], reduction)
                case OpKind.ALL_TO_ALL:
                    part.exchange([(axis, before[axis], after[axis]) for axis in axes])
                case OpKind.ALL_REDUCE:
                    part.all_reduce(axes, reduction)
                case OpKind.ALL_GATHER:
                    part.gather([(axis, before[axis]) for axis in axes])
        return part.value


class _Part:
    """Part of a tensor between two layouts.

    Attributes:
        value: The part.
        cuts: Pairs of an axis and the dim that it cuts.
    """

    def __init__(self, digits: Digits, mesh: PlanMesh, tensor: int, layout: Layout, value: Tensor) -> None:
        self._digits, self._mesh, self._tensor = digits, mesh, tensor
        self.value = value
        self.cuts = [(axis, dim) for axis, dim in enumerate(layout) if dim >= 0]

    def slice(self, cuts: Sequence[tuple[int, int]]) -> None:
        """Keep the rank's own part along some axes."""
        for axis, dim in cuts:
            opened = torch.unflatten(self.value, dim, (self._outer(axis, dim), self._mesh.sizes[axis], -1))
            self.value = opened.select(dim + 1, self._mesh.place[axis]).flatten(dim, dim + 1)
            self.cuts.append((axis, dim))

    def reduce_scatter(self, cuts: Sequence[tuple[int, int]], reduction: dist.ReduceOp.RedOpType) -> None:
        """Add up parts of a sum, and keep the rank's own part."""
        parts = self._spread_all(cuts)
        found = torch.empty_like(parts[0])
        axes = tuple(axis for axis, _ in cuts)
        dist.reduce_scatter_tensor(found, parts.flatten(0, 1), op=reduction, group=self._mesh.group(axes))
        self.value = found

    def exchange(self, cuts: Sequence[tuple[int, int, int]]) -> None:
        """Exchange parts, so that each axis cuts another dim."""
        parts = self._spread_all([(axis, new) for axis, _, new in cuts])
        found = torch.empty_like(parts)
        group = self._mesh.group(tuple(axis for axis, _, _ in cuts))
        dist.all_to_all_single(found.flatten(0, 1), parts.flatten(0, 1), group=group)
        self._collect(found, [(axis, old) for axis, old, _ in cuts])

    def all_reduce(self, axes: Axes, reduction: dist.ReduceOp.RedOpType) -> None:
        """Add up parts of a sum on every rank."""
        # a copy, because operators may return a tensor that they have read
        self.value = self.value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(self.value, op=reduction, group=self._mesh.group(axes))

    def gather(self, cuts: Sequence[tuple[int, int]]) -> None:
        """Gather the parts along some axes."""
        axes = tuple(axis for axis, _ in cuts)
        own = self.value.contiguous()
        found = own.new_empty((self._mesh.size(axes), *own.shape))
        dist.all_gather_into_tensor(found.flatten(0, 1), own, group=self._mesh.group(axes))
        self._collect(found, cuts)

    def _spread_all(self, cuts: Sequence[tuple[int, int]]) -> Tensor:
        """Return the parts for all ranks of a group [ranks, ...]."""
        for lead, (axis, dim) in enumerate(cuts):
            self.value = self._spread(axis, dim, lead=lead)
        return self.value.flatten(0, len(cuts) - 1).contiguous()

    def _spread(self, axis: int, dim: int, *, lead: int) -> Tensor:
        """Make the digit of an axis a dim behind `lead` such dims, and note that the axis cuts the dim."""
        outer, size, at = self._outer(axis, dim), self._mesh.sizes[axis], lead + dim
        self.cuts.append((axis, dim))
        return torch.unflatten(self.value, at, (outer, size, -1)).movedim(at + 1, lead).flatten(at + 1, at + 2)

    def _collect(self, parts: Tensor, cuts: Sequence[tuple[int, int]]) -> None:
        """Put parts of all ranks of a group [ranks, ...] together along the dims that some axes cut."""
        value = torch.unflatten(parts, 0, [self._mesh.sizes[axis] for axis, _ in cuts])
        for lead, (axis, dim) in zip(range(len(cuts) - 1, -1, -1), cuts, strict=True):
            # the first of the remaining digits goes to its dim, before which `lead` digits remain
            self.cuts.remove((axis, dim))
            at = lead + 1 + dim
            opened = torch.unflatten(value, at, (self._outer(axis, dim), -1))
            value = opened.movedim(0, at).flatten(at - 1, at + 1)
        self.value = value

    def _outer(self, axis: int, dim: int) -> int:
        beside = [other for other, cut in self.cuts if cut == dim and other != axis]
        return self._digits.outer(self._tensor, dim, axis, beside)
