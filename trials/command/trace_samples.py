"""Find the operators of costmodels/operators/ in a trace of any program, by the names and shapes of its operations.

It finds matrix products, attention kernels and norms. Their samples have no name, because the trace does not tell the
role of an operator. Elementwise operators can only be told apart by their role, and the router decides how many rows
grouped products have; neither is read. An operation inside a node of the backward pass is a gradient, unless it has a
sequence number: then it is a forward operation that is recomputed. A product inside a node is the gradient of the data
or of the weight of a forward product of the same trace whose sizes fit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from costmodels.blocks.operator import OpKind, Phase
from trials.backend import OperatorSample
from trials.command.kineto import Trace
from trials.profiling.operator_profile import merge_samples
from trials.profiling.trace_events import TraceEvent

Sizes = tuple[float, ...]

_NODE = "autograd::engine::evaluate_function: "
_NOT_LAYERS = ("Optimizer.", "c10d::", "_c10d_functional::", "nccl:", "gloo:", "record_param_comms")
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0}
"""Products of two matrices, and the position of their left operand."""
_BATCHED = {"aten::bmm": 0, "aten::baddbmm": 1}
_NORMS = {
    "aten::native_layer_norm": 0,
    "aten::native_layer_norm_backward": 1,
    "aten::_fused_rms_norm": 0,
    "aten::_fused_rms_norm_backward": 1,
}
"""Norms, and the position of their input."""
_SDPA = "aten::_scaled_dot_product_"
_FLASH = ("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_backward")
"""Operators of the package flash_attn, with shapes [sequences, positions, heads, size]; torch has heads first."""
_WANTED = frozenset({*_PRODUCTS, *_BATCHED, *_NORMS, *_FLASH})


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSamples:
    """Operators that a trace shows.

    Attributes:
        samples: One sample per operator and shape; `count` is that of one step of the rank that wrote the trace.
        num_left_out: Number of products, attention kernels and norms that could not be mapped.
        share: Share of the samples in the time of all kernels, or of all operations if there are no kernels.
    """

    samples: tuple[OperatorSample, ...]
    num_left_out: int
    share: float


class _Call(NamedTuple):
    """Call of a library's operator."""

    event: TraceEvent
    node: str
    time_s: float


def find_samples(trace: Trace) -> TraceSamples:
    """Return the operators of one step."""
    calls = _Reader(trace).calls
    products = [(call, _product_sizes(call.event)) for call in calls if call.event.name in _PRODUCTS]
    forward = {sizes for call, sizes in products if sizes and not call.node}
    found: dict[tuple[OpKind, Phase, Sizes], list[OperatorSample]] = defaultdict(list)
    num_left_out, mapped_s = 0, 0.0
    for call in calls:
        phase = Phase.BACKWARD if call.node else Phase.FORWARD
        kind, shape = _map_call(call, forward)
        if not shape or not call.time_s > 0:
            num_left_out += 1
            continue
        mapped_s += call.time_s
        sample = OperatorSample(kind=kind, phase=phase, shape=shape, time_s=call.time_s, count=1)
        found[kind, phase, shape].append(sample)
    each = (merge_samples(samples, by_shape=True) for samples in found.values())
    return TraceSamples(
        samples=tuple(replace(one, count=max(round(one.count / trace.num_steps), 1)) for one in each),
        num_left_out=num_left_out,
        share=min(mapped_s / trace.total_s, 1.0) if trace.total_s else 0.0,
    )


class _Reader:
    """Collector of the calls that can be operators.

    Torch's checkpoints stop at the last operation that they would recompute, before it computes anything. On a device
    it launches no kernel; on a CPU it is removed here.
    """

    def __init__(self, trace: Trace) -> None:
        self.calls: list[_Call] = []
        self._has_kernels = trace.has_kernels
        self._stopped_at: int | None = None  # the place of the last operation of a recomputation, if it is a call
        for event in trace.events:
            self._visit(event, "", is_again=False)

    def _visit(self, event: TraceEvent, node: str, *, is_again: bool) -> None:
        """Collect the calls of an event, which lies in a node of the backward pass, or in none if `node` is empty."""
        if event.name.startswith(_NOT_LAYERS):
            return
        if event.name.startswith(_NODE):
            self._stopped_at = None
            self._visit_all(event.children, event.name.removeprefix(_NODE), is_again=False)
            if self._stopped_at is not None and not self._has_kernels:
                del self.calls[self._stopped_at]
                self._stopped_at = None
            return
        if node and event.sequence >= 0 and event.name not in (node, node.removesuffix("Backward")):
            node, is_again = "", True
        is_wanted = event.name in _WANTED or event.name.startswith(_SDPA)
        if is_again and event.is_operation and event.sequence >= 0:
            self._stopped_at = len(self.calls) if is_wanted else None
        if is_wanted:
            self.calls.append(_Call(event, node, sum(part.own_s for part in event.whole())))
        else:
            self._visit_all(event.children, node, is_again=is_again)

    def _visit_all(self, events: Sequence[TraceEvent], node: str, *, is_again: bool) -> None:
        for event in events:
            self._visit(event, node, is_again=is_again)


def _map_call(call: _Call, forward: set[Sizes]) -> tuple[OpKind, Sizes]:
    """Return kind and shape of a call; an empty shape if the trace does not tell it or its forward product."""
    event = call.event
    if event.name in _NORMS:
        (rows,) = _operands(event, _NORMS[event.name], 1, least=1) or ((),)
        return OpKind.NORM, (float(math.prod(rows[:-1])), float(rows[-1])) if rows else ()
    if event.name in _BATCHED:
        operands = _operands(event, _BATCHED[event.name], 2, least=3)
        if not operands:
            return OpKind.MATMUL, ()
        (batch, rows_each, inner), columns = operands[0][:3], operands[1][-1]
        return OpKind.MATMUL, (float(batch * rows_each), float(inner), float(columns))
    if event.name in _PRODUCTS:
        sizes = _product_sizes(event)
        return OpKind.MATMUL, _gradient_sizes(sizes, forward) if call.node and sizes else sizes
    return OpKind.ATTENTION, _attention_sizes(event)


def _operands(event: TraceEvent, first: int, number: int, *, least: int) -> Sequence[tuple[int, ...]]:
    """Return the shapes of some operands; empty if one is missing, or has fewer than `least` dims."""
    shapes = event.shapes[first : first + number]
    return shapes if len(shapes) == number and all(len(shape) >= least for shape in shapes) else ()


def _product_sizes(event: TraceEvent) -> Sizes:
    """Return (m, k, n) of a product [m, k] @ [k, n]."""
    operands = _operands(event, _PRODUCTS[event.name], 2, least=2)
    return (float(operands[0][0]), float(operands[0][1]), float(operands[1][-1])) if operands else ()


def _gradient_sizes(sizes: Sizes, forward: set[Sizes]) -> Sizes:
    """Return a product of the backward pass as the cost model writes it; empty if no forward product fits.

    The forward product [m, k] @ [k, n] has the data gradient [m, n] @ [n, k] and the weight gradient [k, m] @ [m, n].
    Weights of torch are [n, k], so torch computes the transposed weight gradient, [n, m] @ [m, k].
    """
    left, inner, right = sizes
    if (left, right, inner) in forward or (inner, left, right) in forward:
        return sizes
    return (right, inner, left) if (inner, right, left) in forward else ()


def _attention_sizes(event: TraceEvent) -> Sizes:
    """Return (b, h, queries, keys, d) of an attention kernel; empty if the trace does not tell them."""
    first = 1 if event.name.endswith("_backward") else 0
    operands = _operands(event, first, 2, least=4)
    if not operands:
        return ()
    heads, positions = (2, 1) if event.name in _FLASH else (1, 2)
    queries, keys = operands
    return tuple(float(size) for size in (queries[0], queries[heads], queries[positions], keys[positions], queries[3]))
