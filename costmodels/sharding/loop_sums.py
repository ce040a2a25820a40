"""Sums that a loop needs only at its end, such as the gradient of a weight that every iteration reads.

What a loop does nothing with but add it to a value that it carries can stay a partial sum until the loop is over. XLA
adds it up over devices once then, if the sum leaves it whole (openxla/xla,
`xla/service/while_loop_all_reduce_code_motion.h`): not if an axis scatters it, and not on processors.
"""

from __future__ import annotations

import math
from functools import lru_cache

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import CARRY, NEXT, FusionKind, Graph, Op
from costmodels.sharding.layouts import PARTIAL, Layout

ADDITIONS = ("add", "add_any")
CONVERSIONS = ("convert_element_type",)
"""Primitives that pass partial sums on."""


def whole_sums(graph: Graph, mesh: DeviceMesh) -> tuple[int, ...]:
    """Return how often partial sums of each tensor are added up in a step if all axes leave them whole [t]."""
    return _sums_behind_loops(graph) if graph.is_fused and not mesh.has_processors else graph.sums


@lru_cache(maxsize=8)
def _sums_behind_loops(graph: Graph) -> tuple[int, ...]:
    return tuple(
        graph.sums[tensor] if (carry := _added_to(graph, tensor)) is None else graph.ops[carry].times
        for tensor in range(len(graph.tensors))
    )


def sums_under(graph: Graph, mesh: DeviceMesh, tensor: int, written: Layout, lies: Layout) -> int:
    """Return how often partial sums of a tensor are added up in a step, from the layout in which it is written."""
    is_whole = all(after < 0 for before, after in zip(written, lies, strict=True) if before == PARTIAL)
    return whole_sums(graph, mesh)[tensor] if is_whole else graph.sums[tensor]


def _added_to(graph: Graph, tensor: int) -> int | None:
    """Return the number of the `carry` whose value a loop adds a tensor to, and does nothing else with; or None."""
    times = graph.ops[graph.maker[tensor][0]].times
    while times > 1:
        uses = graph.uses[tensor]
        if len(uses) != 1 or uses[0].is_back:
            return None
        reader = graph.ops[uses[0].op]
        if reader.times != times:
            return None
        if reader.primitive in ADDITIONS:
            return _carry_of_sum(graph, reader, uses[0].operand)
        before, tensor = tensor, reader.results[0]
        sizes = [math.prod(graph.tensors[each].shape) for each in (before, tensor)]
        is_same = reader.primitive == "reduce_sum" and sizes[0] == sizes[1]
        if not (is_same or reader.fusion is FusionKind.VIEW or reader.primitive in CONVERSIONS):
            return None
    return None


def _carry_of_sum(graph: Graph, op: Op, slot: int) -> int | None:
    """Return the `carry` that an addition reads beside a slot, if its result alone takes the carry's place; or None."""
    if len(op.operands) < 2:  # the other one is a number
        return None
    carry, _ = graph.maker[op.operands[1 - slot]]
    ends = graph.uses[op.results[0]]
    if graph.ops[carry].primitive != CARRY or len(graph.uses[op.operands[1 - slot]]) != 1 or len(ends) != 1:
        return None
    end = graph.ops[ends[0].op]
    is_next = end.primitive == NEXT and graph.ops[carry].operands[1:] == end.results
    return carry if is_next else None
