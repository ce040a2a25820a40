"""Changes of layouts between the ranks of a plan: exactly the collectives of `costmodels/sharding/layouts.py: moves`.

The part of a rank is a tensor with the dims of the whole. A digit of a dim that the rank holds whole is a dim of its
own in a view, [outer, digit, inner]. To cut a dim by an axis is to take one index of that view, and to gather it is to
add that dim back.

If digits of two axes overlap on a dim that both cut while the tensor is moved, no rank can hold the part that the order
of `moves` wants in between. All axes that leave a dim are gathered first then, which sends more than the plan says. The
same is done with axes that stay on a dim under another digit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from costmodels.blocks.operator import OpKind
from costmodels.sharding.exports.relayouts import relayouts
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout, moves
from trials.torch_training.planned.digits import Digits, Placement, overlap
from trials.torch_training.planned.mesh import PlanMesh
from trials.torch_training.planned.traffic import Axes

Steps = tuple[tuple[OpKind | None, Axes], ...]
"""Kinds and axes of the collectives of a change, in their order; None is a local slice."""


def change_steps(before: Placement, after: Placement, sizes: Sequence[int]) -> Steps:
    """Return the collectives that change a placement into another, in the order in which they run."""
    pairs = list(enumerate(zip(before, after, strict=True)))
    old_layout, new_layout = (tuple(dim for dim, _ in each) for each in (before, after))
    planned = [(move.kind, move.axes) for move in moves(old_layout, new_layout, 1.0, sizes)]
    # axes that cut another dim before, or the same one by another digit
    leaving = tuple(axis for axis, (old, new) in pairs if old[0] >= 0 and old != new)
    coming = tuple(axis for axis, (old, new) in pairs if new[0] >= 0 and old != new)
    if not _is_crowded(before, after, leaving, coming, sizes):
        sliced = tuple(axis for axis in coming if before[axis][0] == REPLICATED)
        return ((None, sliced), *planned) if sliced else tuple(planned)
    sliced = tuple(axis for axis in coming if before[axis][0] != PARTIAL)
    reduced = [(kind, axes) for kind, axes in planned if kind in (OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE)]
    return ((OpKind.ALL_GATHER, leaving), (None, sliced), *reduced)


def group_axes(digits: Digits) -> set[Axes]:
    """Return the axes of all groups that the layout changes of a plan need."""
    sizes = digits.plan.mesh.sizes
    return {
        axes
        for each in relayouts(digits.plan)
        for kind, axes in change_steps(
            digits.placement(each.tensor, each.before), digits.placement(each.tensor, each.after), sizes
        )
        if kind is not None
    }


def _is_crowded(before: Placement, after: Placement, leaving: Axes, coming: Axes, sizes: Sequence[int]) -> bool:
    """Return whether an axis comes to a dim whose digit overlaps that of one that leaves the dim."""
    return any(
        before[old][0] == after[new][0]
        and (old == new or overlap((before[old][1], sizes[old]), (after[new][1], sizes[new])))
        for old in leaving
        for new in coming
    )


_Cut = tuple[int, int, int]
"""An axis, the dim that it cuts, and the equal parts of the dim above its digit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of a tensor's layout.

    Attributes:
        cuts: Cuts of the part before.
        steps: Collectives in their order: their kind, or None for a slice, and by their axes the cuts before and after.
        reduction: What is done with parts of a sum.
    """

    cuts: tuple[_Cut, ...]
    steps: tuple[tuple[OpKind | None, tuple[_Cut, ...], tuple[_Cut, ...]], ...]
    reduction: dist.ReduceOp.RedOpType


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
        part = _Part(self._mesh, (), whole)
        part.slice([(axis, *cut) for axis, cut in enumerate(self._digits.placement(tensor, layout)) if cut[0] >= 0])
        return part.value

    def change(self, tensor: int, before: Layout, after: Layout, *, is_maximum: bool = False) -> Change | None:
        """Return the change of a tensor's layout; None if there is nothing to do.

        Args:
            tensor: Number of the tensor.
            before: Current layout.
            after: Wanted layout.
            is_maximum: Whether parts of a sum are parts of a maximum instead.
        """
        old, new = (self._digits.placement(tensor, layout) for layout in (before, after))
        steps = change_steps(old, new, self._mesh.sizes)
        if not steps:
            return None
        return Change(
            cuts=tuple((axis, *cut) for axis, cut in enumerate(old) if cut[0] >= 0),
            steps=tuple(
                (kind, tuple((axis, *old[axis]) for axis in axes), tuple((axis, *new[axis]) for axis in axes))
                for kind, axes in steps
            ),
            reduction=dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM,
        )

    def move(self, value: Tensor, change: Change) -> Tensor:
        """Return this rank's part of a tensor in another layout."""
        part = _Part(self._mesh, change.cuts, value)
        for kind, leaves, comes in change.steps:
            match kind:
                case None:
                    part.slice(comes)
                case OpKind.REDUCE_SCATTER:
                    part.reduce_scatter(comes, change.reduction)
                case OpKind.ALL_TO_ALL:
                    part.exchange(leaves, comes)
                case OpKind.ALL_REDUCE:
                    part.all_reduce(_axes(leaves), change.reduction)
                case OpKind.ALL_GATHER:
                    part.gather(leaves)
        return part.value


class _Part:
    """Part of a tensor between two layouts.

    Attributes:
        value: The part.
        cuts: Cuts that made it.
    """

    def __init__(self, mesh: PlanMesh, cuts: Sequence[_Cut], value: Tensor) -> None:
        self._mesh = mesh
        self.value = value
        self.cuts = list(cuts)

    def slice(self, cuts: Sequence[_Cut]) -> None:
        """Keep the rank's own part along some axes."""
        for cut in cuts:
            axis, dim, _ = cut
            opened = torch.unflatten(self.value, dim, (self._outer(cut), self._mesh.sizes[axis], -1))
            self.value = opened.select(dim + 1, self._mesh.place[axis]).flatten(dim, dim + 1)
            self.cuts.append(cut)

    def reduce_scatter(self, cuts: Sequence[_Cut], reduction: dist.ReduceOp.RedOpType) -> None:
        """Add up parts of a sum, and keep the rank's own part."""
        parts = self._spread(cuts)
        found = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(found, parts.flatten(0, 1), op=reduction, group=self._mesh.group(_axes(cuts)))
        self.value = found

    def exchange(self, leaves: Sequence[_Cut], comes: Sequence[_Cut]) -> None:
        """Exchange parts, so that axes cut other dims."""
        parts = self._spread(comes)
        found = torch.empty_like(parts)
        dist.all_to_all_single(found.flatten(0, 1), parts.flatten(0, 1), group=self._mesh.group(_axes(comes)))
        self._collect(found, leaves)

    def all_reduce(self, axes: Axes, reduction: dist.ReduceOp.RedOpType) -> None:
        """Add up parts of a sum on every rank."""
        # a copy, because operators may return a tensor that they have read
        self.value = self.value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(self.value, op=reduction, group=self._mesh.group(axes))

    def gather(self, cuts: Sequence[_Cut]) -> None:
        """Gather the parts along some axes."""
        own = self.value.contiguous()
        found = own.new_empty((self._mesh.size(_axes(cuts)), *own.shape))
        dist.all_gather_into_tensor(found.flatten(0, 1), own, group=self._mesh.group(_axes(cuts)))
        self._collect(found, cuts)

    def _spread(self, cuts: Sequence[_Cut]) -> Tensor:
        """Return the parts for all ranks of a group [ranks, ...], and note the cuts."""
        value = self.value
        for lead, cut in enumerate(cuts):
            axis, dim, _ = cut
            at = lead + dim
            opened = torch.unflatten(value, at, (self._outer(cut), self._mesh.sizes[axis], -1))
            # the digit becomes a dim behind those of the cuts before
            value = opened.movedim(at + 1, lead).flatten(at + 1, at + 2)
            self.cuts.append(cut)
        return value.flatten(0, len(cuts) - 1).contiguous()

    def _collect(self, parts: Tensor, cuts: Sequence[_Cut]) -> None:
        """Put parts of all ranks of a group [ranks, ...] together along the dims that some axes cut."""
        value = torch.unflatten(parts, 0, [self._mesh.sizes[axis] for axis in _axes(cuts)])
        for lead, cut in zip(range(len(cuts) - 1, -1, -1), cuts, strict=True):
            # the first of the remaining digits goes to its dim, before which `lead` digits remain
            self.cuts.remove(cut)
            at = lead + 1 + cut[1]
            opened = torch.unflatten(value, at, (self._outer(cut), -1))
            value = opened.movedim(0, at).flatten(at - 1, at + 1)
        self.value = value

    def _outer(self, cut: _Cut) -> int:
        """Return the number of parts of the local dim above the digit of a cut that the part does not have."""
        _, dim, above = cut
        sizes = self._mesh.sizes
        return above // math.prod(sizes[axis] for axis, other, high in self.cuts if other == dim and high < above)


def _axes(cuts: Sequence[_Cut]) -> Axes:
    return tuple(axis for axis, _, _ in cuts)
