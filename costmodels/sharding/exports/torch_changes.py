"""Changes of the layouts of this rank's part of a tensor, by collectives of torch.

A digit of a dim that the rank holds whole is a dim of its own in a view, [outer, digit, inner]. To cut a dim by an axis
is to take one index of that view, and to gather it is to add that dim back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from costmodels.blocks.operator import OpKind
from costmodels.sharding.exports.layout_changes import Axes, Block, Placement, Step, change_steps, exchange_of

_Cut = tuple[int, int, int]
"""An axis, the dim that it cuts, and the equal parts of the dim above its digit."""

REDUCTIONS: Mapping[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
"""Reductions by DTensor's names of them."""


class Mesh(Protocol):
    """Mesh seen from this rank: its sizes, the rank's coordinates, and groups along axes in the order of the mesh."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of ranks along each axis."""

    @property
    def place(self) -> tuple[int, ...]:
        """Coordinates of the rank."""

    def group(self, axes: Axes) -> dist.ProcessGroup:
        """Return this rank's group along some axes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of a tensor's layout.

    Attributes:
        before: Placement before it.
        after: Placement after it.
        shape: Shape of the whole tensor.
        steps: Its steps in their order.
        reduction: What is done with parts of a sum.
    """

    before: Placement
    after: Placement
    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    reduction: str


def change_of(
    before: Placement, after: Placement, shape: Sequence[int], mesh: Mesh, *, reduction: str = "sum"
) -> Change | None:
    """Return the change of a tensor's layout; None if there is nothing to do.

    Args:
        before: Current placement.
        after: Wanted placement, without PARTIAL.
        shape: Shape of the whole tensor.
        mesh: Mesh.
        reduction: What is done with parts of a sum, one of REDUCTIONS.
    """
    steps = change_steps(before, after, shape, mesh.sizes)
    if not steps:
        return None
    return Change(before=before, after=after, shape=tuple(shape), steps=steps, reduction=reduction)


def cut_part(whole: Tensor, placement: Placement, mesh: Mesh) -> Tensor:
    """Return this rank's part of a whole tensor."""
    part = _Part(mesh, (), whole)
    part.slice([(axis, *cut) for axis, cut in enumerate(placement) if cut[0] >= 0])
    return part.value


def move_part(value: Tensor, change: Change, mesh: Mesh) -> Tensor:
    """Return this rank's part of a tensor in another layout."""
    # memory is sent, in which lazy conjugates and negatives stand as they were
    value = value.resolve_conj().resolve_neg()
    if value.is_complex():
        pairs = move_part(torch.view_as_real(value), change, mesh)
        return torch.view_as_complex(pairs.contiguous())
    if value.dtype == torch.bool:  # processes exchange no booleans
        return move_part(value.to(torch.uint8), change, mesh).to(torch.bool)
    part = _Part(mesh, [(axis, *cut) for axis, cut in enumerate(change.before) if cut[0] >= 0], value)
    reduction = REDUCTIONS[change.reduction]
    for step in change.steps:
        leaves, comes = (
            [(axis, *placement[axis]) for axis in step.axes] for placement in (change.before, change.after)
        )
        match step.kind:
            case None:
                part.slice(comes)
            case OpKind.REDUCE_SCATTER if step.dim is not None:
                part.deal(step.dim, step.axes, reduction)
            case OpKind.REDUCE_SCATTER:
                part.reduce_scatter(comes, reduction)
            case OpKind.ALL_TO_ALL if step.is_direct:
                part.exchange_directly(change)
            case OpKind.ALL_TO_ALL:
                part.exchange(leaves, comes)
            case OpKind.ALL_REDUCE:
                part.all_reduce(step.axes, reduction)
            case OpKind.ALL_GATHER:
                part.gather(leaves)
    # kernels count on it for what autograd keeps (findings/layer-norm-backward-ignores-strides.sh)
    return part.value.contiguous()


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a process group of some ranks, which all of them ask for; no others take part in forming it."""
    world = dist.group.WORLD
    assert world is not None, "a mesh has a process group"
    if len(ranks) == world.size():
        return world
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group


class _Part:
    """Part of a tensor between two layouts.

    Attributes:
        value: The part.
        cuts: Cuts that made it.
    """

    def __init__(self, mesh: Mesh, cuts: Sequence[_Cut], value: Tensor) -> None:
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
        self._add_up(self._spread(cuts), _axes(cuts), reduction)

    def deal(self, dim: int, axes: Axes, reduction: dist.ReduceOp.RedOpType) -> None:
        """Add up parts of a sum, and keep the rank's own share of a dim of the local part."""
        self._add_up(torch.stack(self.value.chunk(self._num_ranks(axes), dim=dim)), axes, reduction)

    def exchange(self, leaves: Sequence[_Cut], comes: Sequence[_Cut]) -> None:
        """Exchange parts, so that axes cut other dims."""
        parts = self._spread(comes)
        found = torch.empty_like(parts)
        dist.all_to_all_single(found.flatten(0, 1), parts.flatten(0, 1), group=self._mesh.group(_axes(comes)))
        self._collect(found, leaves)

    def exchange_directly(self, change: Change) -> None:
        """Receive what the wanted part lacks from the ranks that have it."""
        direct = next(step for step in change.steps if step.is_direct)
        plan = exchange_of(
            change.steps, change.before, change.after, change.shape, tuple(self._mesh.sizes), self._mesh.place
        )
        own = len(change.shape)
        behind = tuple(self.value.shape[own:])  # the two parts of complex numbers
        sent = [_block(self.value, block).flatten() for block in plan.sent if block is not None]
        taken = [0 if block is None else math.prod(map(len, block)) * math.prod(behind) for block in plan.received]
        given = [0 if block is None else math.prod(map(len, block)) * math.prod(behind) for block in plan.sent]
        found = self.value.new_empty(sum(taken))
        dist.all_to_all_single(
            found,
            torch.cat(sent) if sent else self.value.new_empty(0),
            output_split_sizes=taken,
            input_split_sizes=given,
            group=self._mesh.group(direct.axes),
        )
        self.value = self.value.new_empty((*plan.shape, *behind))
        for block, part in zip(plan.received, torch.split(found, taken), strict=True):
            if block is not None:
                self.value[_index(block, found.device)] = part.view(*map(len, block), *behind)

    def all_reduce(self, axes: Axes, reduction: dist.ReduceOp.RedOpType) -> None:
        """Add up parts of a sum on every rank."""
        # a copy, because operators may return a tensor that they have read
        self.value = self.value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(self.value, op=reduction, group=self._mesh.group(axes))

    def gather(self, cuts: Sequence[_Cut]) -> None:
        """Gather the parts along some axes."""
        own = self.value.contiguous()
        found = own.new_empty((self._num_ranks(_axes(cuts)), *own.shape))
        dist.all_gather_into_tensor(found.flatten(0, 1), own, group=self._mesh.group(_axes(cuts)))
        self._collect(found, cuts)

    def _add_up(self, parts: Tensor, axes: Axes, reduction: dist.ReduceOp.RedOpType) -> None:
        found = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(found, parts.flatten(0, 1), op=reduction, group=self._mesh.group(axes))
        self.value = found

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

    def _num_ranks(self, axes: Axes) -> int:
        return math.prod(self._mesh.sizes[axis] for axis in axes)


def _block(value: Tensor, block: Block) -> Tensor:
    return value[_index(block, value.device)]


def _index(block: Block, device: torch.device) -> tuple[Tensor, ...]:
    """Return the index of a block of a tensor."""
    return tuple(
        torch.as_tensor(positions, device=device).view(-1, *(1,) * (len(block) - 1 - dim))
        for dim, positions in enumerate(block)
    )


def _axes(cuts: Sequence[_Cut]) -> Axes:
    return tuple(axis for axis, _, _ in cuts)
