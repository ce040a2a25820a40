"""Where a plan changes the layout of a tensor: where it is written and its partial sums go, and where it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from costmodels.sharding.graph import CONSTANT
from costmodels.sharding.layouts import Layout
from costmodels.sharding.plan import Plan

At = Literal["def", "use"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Relayout:
    """A tensor that changes its layout.

    Attributes:
        at: `def` where an operator leaves partial sums, `use` where one reads the tensor otherwise than it lies.
        op: Number of that operator.
        slot: Which of its results, or operands.
        tensor: Number of the tensor.
        before: As it was written, or lies.
        after: As it lies, or is read.
    """

    at: At
    op: int
    slot: int
    tensor: int
    before: Layout
    after: Layout


def relayouts(plan: Plan) -> tuple[Relayout, ...]:
    """All of them, in the order of the operators; what an operator reads comes before what it writes.

    Constants change no layout: every device makes what it reads.
    """
    graph, found = plan.graph, []
    for number, op in enumerate(graph.ops):
        for slot, tensor in enumerate(op.operands):
            before, after = plan.layout(tensor), plan.wanted(number, slot)
            if before != after and graph.ops[graph.maker[tensor][0]].primitive != CONSTANT:
                found.append(Relayout(at="use", op=number, slot=slot, tensor=tensor, before=before, after=after))
        for slot, tensor in enumerate(op.results):
            before, after = plan.written(number, slot), plan.layout(tensor)
            if before != after:
                found.append(Relayout(at="def", op=number, slot=slot, tensor=tensor, before=before, after=after))
    return tuple(found)
