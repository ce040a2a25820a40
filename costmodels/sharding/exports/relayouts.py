"""Layout changes of a plan: after partial sums at the writing operator, and before reading operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from costmodels.sharding.graph import CONSTANT
from costmodels.sharding.layouts import Layout
from costmodels.sharding.plan import Plan

At = Literal["def", "use"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Relayout:
    """A change of a tensor's layout at one operator.

    Attributes:
        at: Side of the change: `def` after an operator that leaves partial sums, `use` before one that reads the tensor
            in another layout.
        op: Number of that operator.
        slot: Index of the tensor among the operator's results (`def`) or operands (`use`).
        tensor: Number of the tensor.
        before: Layout in which the tensor was written or lies.
        after: Layout in which the tensor lies or is read.
    """

    at: At
    op: int
    slot: int
    tensor: int
    before: Layout
    after: Layout


def relayouts(plan: Plan) -> tuple[Relayout, ...]:
    """Return all layout changes in the order of the operators; reads of an operator come before its writes.

    Constants never change their layout, because every device makes the part that it reads.
    """
    graph, found = plan.graph, []
    for number, op in enumerate(graph.ops):
        for slot, tensor in enumerate(op.operands):
            before, after = plan.layout(tensor), plan.wanted(number, slot)
            if before != after and graph.ops[graph.maker[tensor][0]].primitive != CONSTANT:
                found.append(Relayout(at="use", op=number, slot=slot, tensor=tensor, before=before, after=after))
        for slot, tensor in enumerate(op.results):
            # Partial sums become the tensor's own layout.
            before, after = plan.written(number, slot), plan.layout(tensor)
            if before != after:
                found.append(Relayout(at="def", op=number, slot=slot, tensor=tensor, before=before, after=after))
    return tuple(found)
