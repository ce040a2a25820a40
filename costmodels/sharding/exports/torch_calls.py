"""A call of an ATen operator on one rank's parts of its tensors, and where these parts lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from costmodels.sharding.dims import Place, Rule
from costmodels.sharding.frontends.torch.calls import Operand
from costmodels.sharding.layouts import PARTIAL, Layout

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive iterations of a loop that a rank has: `length` of `size`, from `first` on."""

    size: int
    first: int
    length: int

    @property
    def is_whole(self) -> bool:
        """Whether the rank has all iterations."""
        return self.length == self.size


Runs = tuple[Run, ...]
"""Loops of a dim, the slowest first: a rank has the elements whose place in each loop is in its run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalCall:
    """A call of an operator on one rank.

    Attributes:
        op: Operator.
        params: Its parameters by name; tensors are `Operand`s.
        operands: Parts of the tensors that it takes.
        layouts: Layout of each of them.
        shapes: Shape of each whole tensor that it takes.
        result_layouts: Layout in which each result is left.
        result_shapes: Shape of this rank's part of each result.
        held: What this rank has of each dim of each tensor that the operator takes.
        result_held: What this rank has of each dim of each result.
        sizes: Number of ranks along each axis.
        place: Coordinates of the rank in the mesh.
        device: Device of the rank.
    """

    op: OpOverload[..., Any]
    params: Mapping[str, Any]
    operands: Sequence[Tensor]
    layouts: Sequence[Layout]
    shapes: Sequence[Shape]
    result_layouts: Sequence[Layout]
    result_shapes: Sequence[Shape]
    held: Sequence[Sequence[Runs]]
    result_held: Sequence[Sequence[Runs]]
    sizes: Sequence[int]
    place: Sequence[int]
    device: torch.device

    def run(self, **changes: Any) -> tuple[Tensor, ...]:
        """Call the operator, with some parameters changed, and return its results that are tensors."""
        params = {**self.params, **changes}
        if "device" in params and "device" not in changes:
            params["device"] = self.device
        given = {key: self._tensors_in(value) for key, value in params.items()}
        arguments = self.op._schema.arguments
        rest = {one.name: given[one.name] for one in arguments if one.kwarg_only}
        made = self.op(*(given[one.name] for one in arguments if not one.kwarg_only), **rest)
        several = made if isinstance(made, (tuple, list)) else [made]
        return tuple(one for one in several if isinstance(one, Tensor))

    def is_cut(self, slot: int, dim: int) -> bool:
        """Return whether an axis cuts a dim of a tensor that the operator takes."""
        return dim in self.layouts[slot]

    def adds_once(self) -> bool:
        """Return whether this rank adds the one term, such as a bias, of a sum whose parts lie on several ranks."""
        return all(self.place[axis] == 0 for axis, dim in enumerate(self.result_layouts[0]) if dim == PARTIAL)

    def with_operand(self, slot: int, value: Tensor) -> LocalCall:
        """Return the call with another tensor in one place."""
        operands = list(self.operands)
        operands[slot] = value
        return replace(self, operands=operands)

    def _tensors_in(self, value: Any) -> Any:
        if isinstance(value, Operand):
            return self.operands[value.slot]
        return [self._tensors_in(one) for one in value] if isinstance(value, list) else value


def runs_of(rule: Rule, place: Place, row: Sequence[int], sizes: Sequence[int], at: Sequence[int]) -> tuple[Runs, ...]:
    """Return what a rank has of each dim of a tensor.

    Views may have hidden that a dim has several loops. A part of one that isn't the slowest is no stretch of the dim.

    Args:
        rule: Rule of the operator.
        place: Factors of each dim of the tensor.
        row: Factor that each axis serves.
        sizes: Number of ranks along each axis.
        at: Coordinates of the rank in the mesh.
    """
    found = []
    for factors in place:
        runs: list[Run] = []
        for factor in factors:
            size, number, ways = rule.factors[factor].size, 0, 1
            for axis, served in enumerate(row):
                if served == factor:
                    number, ways = number * sizes[axis] + at[axis], ways * sizes[axis]
            length = size // ways
            run = Run(size, number * length, length)
            if runs and run.is_whole:
                before = runs.pop()
                run = Run(before.size * size, before.first * size, before.length * size)
            runs.append(run)
        found.append(tuple(runs) or (Run(1, 0, 1),))
    return tuple(found)


def held_indices(runs: Runs, device: torch.device) -> Tensor:
    """Return the indices along a dim of the elements that a rank has [n], in ascending order."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for run in runs:
        own = torch.arange(run.first, run.first + run.length, device=device)
        found = (found[:, None] * run.size + own).flatten()
    return found


def in_part(index: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Return indices along a whole dim as those along a part, and whether the part has them; the others become 0."""
    whole = math.prod(run.size for run in runs)
    left = torch.where(index < 0, index + whole, index)
    local, is_own, stride = torch.zeros_like(left), torch.ones_like(left, dtype=torch.bool), 1
    for number, run in reversed(list(enumerate(runs))):
        own, left = (left % run.size, left // run.size) if number else (left, left)
        own = own - run.first
        is_own = is_own & (own >= 0) & (own < run.length)
        local, stride = local + own * stride, stride * run.length
    return torch.where(is_own, local, 0), is_own


def local_shape(shape: Shape, layout: Layout, sizes: Sequence[int]) -> Shape:
    """Return the shape of each rank's part of a tensor whose dims divide."""
    return tuple(
        size // math.prod(sizes[axis] for axis, cut in enumerate(layout) if cut == dim)
        for dim, size in enumerate(shape)
    )
