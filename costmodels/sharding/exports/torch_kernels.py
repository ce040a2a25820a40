"""An operator of a traced torch step as a rank runs it: the layouts of its tensors, and its call on this rank's parts.

Views that were folded into the operator's rule are applied to parts, before and behind the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from costmodels.sharding.dims import FactorKind
from costmodels.sharding.exports.torch_calls import LocalCall, Runs, local_shape, runs_of
from costmodels.sharding.exports.torch_local import can_add_up, can_run, run_local
from costmodels.sharding.exports.torch_ranks import Rank
from costmodels.sharding.frontends.flat_program import Kernel
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout
from costmodels.sharding.plan import NONE, wanted_layout, written_layout
from hardware.io.errors import ConfigError

Held = tuple[int, Layout]
"""A value of the flat program in a layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalKernel:
    """An operator as a rank runs it.

    Attributes:
        kernel: Operator with the views that were folded into it.
        reads: Value and layout of each operand, and then of each unread value.
        layouts: Layouts of these between all views: where the step reads them, behind each view, the last one at the
            operator.
        result_layouts: Layouts of the results in the same way: at the operator first, and last where the step leaves
            them.
        held: What this rank has of each dim of each operand and unread value, at the operator.
        result_held: What this rank has of each dim of each result, at the operator.
    """

    kernel: Kernel
    reads: tuple[Held, ...]
    layouts: tuple[tuple[Layout, ...], ...]
    result_layouts: tuple[tuple[Layout, ...], ...]
    held: tuple[tuple[Runs, ...], ...]
    result_held: tuple[tuple[Runs, ...], ...]

    def read(self, slot: int, part: Tensor, rank: Rank) -> Tensor:
        """Return this rank's part of an operand at the operator, from its part where the step reads it."""
        return _viewed(self.kernel.reads[slot], part, self.layouts[slot], rank)

    def written(self, slot: int, part: Tensor, rank: Rank) -> Tensor:
        """Return this rank's part of a result where the step leaves it, from its part at the operator."""
        return _viewed(self.kernel.writes[slot], part, self.result_layouts[slot], rank)

    def run(self, operands: Sequence[Tensor], rank: Rank) -> tuple[Tensor, ...]:
        """Return this rank's parts of the results, at the operator, from those of operands and unread values."""
        kernel, own = self.kernel, self.kernel.own_rule
        assert own is not None, "operators of a trace have rules of their own"
        slots = sorted(range(len(operands)), key=lambda at: kernel.slots[at])
        return run_local(
            LocalCall(
                op=kernel.node.target,
                params=kernel.step.params,
                operands=[operands[at] for at in slots],
                layouts=[self.layouts[at][-1] for at in slots],
                shapes=[own.operand_shape(at) for at in slots],
                result_layouts=[layouts[0] for layouts in self.result_layouts],
                result_shapes=[
                    local_shape(own.result_shape(slot), layouts[0], rank.sizes)
                    for slot, layouts in enumerate(self.result_layouts)
                ],
                held=[self.held[at] for at in slots],
                result_held=self.result_held,
                sizes=rank.sizes,
                place=rank.place,
                device=rank.device,
            )
        )


def localised(kernel: Kernel, row: Sequence[int], rank: Rank) -> LocalKernel:
    """Return an operator as a rank runs it.

    Args:
        kernel: Operator.
        row: Factor that each axis serves.
        rank: Rank.

    Raises:
        ConfigError: It can't run on such parts.
    """
    values = (*kernel.step.operands, *kernel.unread)
    wanted = [wanted_layout(kernel.rule, slot, row) for slot in range(len(values))]
    written = [_written_layout(kernel, slot, row) for slot in range(len(kernel.step.results))]
    via = [*kernel.reads_via, *((),) * len(kernel.unread)]
    _check(kernel, row, written, rank.device)

    def between(at: int) -> Layout:
        return wanted_layout(kernel.rule, at, row)

    def runs(place: tuple[tuple[int, ...], ...]) -> tuple[Runs, ...]:
        return runs_of(kernel.rule, place, row, rank.sizes, rank.place)

    places = kernel.rule.operands
    return LocalKernel(
        kernel=kernel,
        reads=tuple(zip(values, wanted, strict=True)),
        layouts=tuple((layout, *map(between, own)) for layout, own in zip(wanted, via, strict=True)),
        result_layouts=tuple(
            (*(_with_sums(between(at), layout) for at in own), layout)
            for layout, own in zip(written, kernel.writes_via, strict=True)
        ),
        held=tuple(runs(places[own[-1] if own else slot]) for slot, own in enumerate(via)),
        result_held=tuple(
            runs(places[own[0]] if own else kernel.rule.results[slot]) for slot, own in enumerate(kernel.writes_via)
        ),
    )


def _check(kernel: Kernel, row: Sequence[int], written: Sequence[Layout], device: torch.device) -> None:
    """Raise a ConfigError if an operator can't run on the parts of a plan."""
    op = kernel.node.target
    if any(factor != NONE for factor in row) and not can_run(op, kernel.step.params):
        raise ConfigError(
            f"is cut by the plan, and {op} is no operator that can run on parts",
            key="parallelize",
            value=kernel.step.name,
            nearest="pin its dims, or plan without the axis that cuts it",
        )
    if any(PARTIAL in layout for layout in written) and not can_add_up(op):
        raise ConfigError(
            f"is computed in parts by the plan, and results of {op} can't be combined",
            key="parallelize",
            value=kernel.step.name,
            nearest="pin its dims, or plan without the axis that cuts it",
        )
    if "for_cpu" in str(op) and device.type != "cpu":
        raise ConfigError(
            "is the fused attention of CPUs, which the trace has",
            key="parallelize",
            value=kernel.step.name,
            nearest="plan the module under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
        )


def _written_layout(kernel: Kernel, slot: int, row: Sequence[int]) -> Layout:
    """Return the layout in which a kernel leaves a result.

    A single result without a factor that is a map does not depend on it: each rank has the whole.
    """
    layout = written_layout(kernel.rule, slot, row)
    is_single = len(kernel.step.results) == 1
    return tuple(
        REPLICATED if dim == PARTIAL and is_single and kernel.rule.factors[factor].kind == FactorKind.MAP else dim
        for dim, factor in zip(layout, row, strict=True)
    )


def _with_sums(layout: Layout, written: Layout) -> Layout:
    """Return a layout with the partial sums that another one has."""
    return tuple(PARTIAL if other == PARTIAL else dim for dim, other in zip(layout, written, strict=True))


def _viewed(views: Sequence[Kernel], part: Tensor, layouts: Sequence[Layout], rank: Rank) -> Tensor:
    """Return a view of views of a part; the layouts are those in front of each view, and behind the last one."""
    for view, before, after in zip(views, layouts[:-1], layouts[1:], strict=True):
        own = view.own_rule
        assert own is not None, "views have rules of their own"
        call = LocalCall(
            op=view.node.target,
            params=view.step.params,
            operands=[part],
            layouts=[before],
            shapes=[own.operand_shape(0)],
            result_layouts=[after],
            result_shapes=[local_shape(own.result_shape(0), after, rank.sizes)],
            held=[],  # no view looks elements up
            result_held=[],
            sizes=rank.sizes,
            place=rank.place,
            device=rank.device,
        )
        (part,) = run_local(call)
    return part
