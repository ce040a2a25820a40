"""Conversion of a trace's executions into operator samples (costmodels/operators/layer_operators.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from costmodels.blocks.operator import OpKind, Phase
from trials.backend import OperatorSample
from trials.profiling.operator_profile import RankProfile, Unexplained, is_routed, merge_samples
from trials.profiling.trace_events import TraceEvent
from trials.torch_training.profiling.trace_reading import CORE, PRODUCTS, Execution, Node, TraceReader, Work

Sizes = tuple[float, ...]

_GROUPED = ("moe_mlp.up", "moe_mlp.down")
_WEIGHT_FIRST = ("MmBackward0",)
"""Nodes that compute the weight's gradient before that of the data; AddmmBackward0 computes it afterwards."""


def read_profile(events: Iterable[TraceEvent], *, num_steps: int = 1) -> RankProfile:
    """Return the operators of one step, from a rank's events without a parent, in the order of their start."""
    reader = TraceReader(events)
    unexplained = defaultdict(float, reader.unexplained)
    found: dict[tuple[str, Sizes], list[OperatorSample]] = defaultdict(list)
    total_s = dict.fromkeys(Phase, 0.0)
    for execution in reader.executions:
        for sample in _list_samples(execution):
            # Routed operators get other sizes in every execution, so they are grouped by name alone.
            found[sample.name, () if is_routed(sample.name) else sample.shape].append(sample)
            total_s[sample.phase] += sample.time_s
    samples = (merge_samples(each, by_shape=bool(key[1])) for key, each in found.items())
    return RankProfile(
        samples=tuple(replace(sample, count=round(sample.count / num_steps)) for sample in samples),
        forward_s=total_s[Phase.FORWARD] / num_steps,
        backward_s=total_s[Phase.BACKWARD] / num_steps,
        unexplained=tuple(
            Unexplained(phase=phase, name=name, time_s=time_s / num_steps)
            for (phase, name), time_s in unexplained.items()
        ),
    )


def _list_samples(execution: Execution) -> Iterator[OperatorSample]:
    if execution.role in _ELEMENTS:
        yield from _sample_pair(execution, OpKind.ELEMENTWISE, (_ELEMENTS[execution.role](_events(execution.forward)),))
    elif execution.role == "norm":
        normed = execution.forward[0].event
        columns = normed.shapes[0][-1]
        # Rows and columns of the norm; all dims before the last are rows.
        shape = float(normed.elements() // columns), float(columns)
        yield from _sample_pair(execution, OpKind.NORM, shape)
        if execution.fork:
            name = f"{execution.block}.residual.gradient"
            yield _make_sample(
                name, OpKind.ELEMENTWISE, Phase.BACKWARD, (shape[0] * shape[1],), _total_s(execution.fork)
            )
    elif execution.role == "core":
        yield from _sample_pair(execution, OpKind.ATTENTION, _core_shape(execution))
    elif execution.products:
        yield from _list_product_samples(execution)


def _sample_pair(execution: Execution, kind: OpKind, shape: Sizes) -> Iterator[OperatorSample]:
    """Yield the samples of an operator and of its gradient, which has the same shape."""
    yield _make_sample(execution.name, kind, Phase.FORWARD, shape, _total_s(execution.forward))
    works = [work for node in execution.backward for work in node.works]
    if works and execution.role != "residual":
        yield _make_sample(f"{execution.name}.gradient", kind, Phase.BACKWARD, shape, _total_s(works))


def _list_product_samples(execution: Execution) -> Iterator[OperatorSample]:
    """Yield the samples of a product and of its two gradients.

    Other work of the backward nodes, such as a bias, counts as part of the weight's gradient.
    """
    name, products = execution.name, execution.products
    is_grouped = name in _GROUPED
    kind = OpKind.GROUPED_MATMUL if is_grouped else OpKind.MATMUL
    groups = (float(_num_groups(products)),) if is_grouped else ()
    _, k, n = _sizes(products[0])
    yield _make_sample(name, kind, Phase.FORWARD, (*groups, _sum_rows(products, 0), k, n), _total_s(execution.forward))
    of_data: list[Work] = []
    of_weight: list[Work] = []
    beside_s = 0.0
    for node in execution.backward:
        done = [work for work in node.works if work.event.name in PRODUCTS]
        for place, work in enumerate(done):
            (of_weight if _is_of_weight(work.event, place, node) else of_data).append(work)
        # Time of the node's other operations.
        beside_s += _total_s(node.works) - _total_s(done)
    if of_data:
        left, inner, right = _sizes(of_data[0].event)
        shape = *groups, _sum_rows(_events(of_data), 0), inner, right
        yield _make_sample(f"{name}.data_gradient", kind, Phase.BACKWARD, shape, _total_s(of_data))
    if of_weight:
        left, inner, right = _sizes(of_weight[0].event)
        if (left, right) == (n, k):  # torch computes the transposed product
            left, right = right, left
        shape = *groups, left, _sum_rows(_events(of_weight), 1), right
        yield _make_sample(f"{name}.weight_gradient", kind, Phase.BACKWARD, shape, _total_s(of_weight) + beside_s)


def _is_of_weight(product: TraceEvent, place: int, node: Node) -> bool:
    """Return whether a product of a backward node is the weight's gradient; by its sizes if they are unambiguous."""
    if product.name == "aten::_grouped_mm":
        return len(product.shapes[1]) == 2  # for the data's gradient the weights [g, n, k] are an operand
    m, k, n = _sizes(node.made_by)
    left, inner, right = _sizes(product)
    # For a forward product (m, k, n), the weight's gradient sums over m, and the data's has the sizes (m, n, k).
    fits_weight, fits_data = inner == m and {left, right} == {k, n}, (left, inner, right) == (m, n, k)
    return fits_weight if fits_weight != fits_data else (place == 0) == (node.name in _WEIGHT_FIRST)


def _sizes(product: TraceEvent) -> tuple[float, float, float]:
    """Return (m, k, n) of a product [m, k] @ [k, n]."""
    left, right = product.shapes[1:3] if product.name == "aten::addmm" else product.shapes[:2]
    return float(left[0]), float(left[1]), float(right[-1])


def _num_groups(products: Sequence[TraceEvent]) -> int:
    """Return the number of groups, in one kernel for all groups or in products one by one."""
    return products[0].shapes[2][0] if products[0].name == "aten::_grouped_mm" else len(products)


def _sum_rows(products: Iterable[TraceEvent], place: int) -> float:
    """Return the sum over all groups of the size at one place."""
    return sum(_sizes(product)[place] for product in products)


def _core_shape(execution: Execution) -> Sizes:
    """Return the shape (b, h, queries, keys, d) of an attention core.

    A ring has one kernel per block of keys; the first one sees all keys of its rank.
    """
    kernels = [work.event for work in execution.forward if work.event.name.startswith(CORE)]
    (sequences, heads, queries, size), keys = kernels[0].shapes[0], kernels[0].shapes[1][2]
    return float(sequences), float(heads), float(queries), float(keys * len(kernels)), float(size)


def _count_elements(*names: str) -> Callable[[Sequence[TraceEvent]], float]:
    """Return a function that counts the elements of the first operands of all operations with these names."""
    return lambda events: float(sum(event.elements() for event in events if event.name in names))


def _count_looked_up(events: Sequence[TraceEvent]) -> float:
    return float(sum(e.elements(1) * e.shapes[0][1] for e in events if e.name == "aten::embedding"))


def _count_largest(events: Sequence[TraceEvent]) -> float:
    return float(max(event.elements(place) for event in events for place in range(len(event.shapes))))


def _count_permuted(events: Sequence[TraceEvent]) -> float:
    """Return the number of elements that go to experts and back: twice those of the rows that are copied."""
    return 2.0 * sum(event.elements(3) for event in events if event.name == "aten::index_copy")


_ELEMENTS: Mapping[str, Callable[[Sequence[TraceEvent]], float]] = {
    "rotary": _count_elements("aten::chunk"),
    "residual": _count_elements("aten::add"),
    "activation": _count_elements("aten::silu", "aten::gelu"),
    "lookup": _count_looked_up,
    "cross_entropy": _count_largest,
    "permute": _count_permuted,
}
"""Function that counts the elements of an elementwise operator, by its role."""


def _events(works: Iterable[Work]) -> list[TraceEvent]:
    return [work.event for work in works]


def _total_s(works: Iterable[Work]) -> float:
    return sum(work.time_s for work in works)


def _make_sample(name: str, kind: OpKind, phase: Phase, shape: Sizes, time_s: float) -> OperatorSample:
    return OperatorSample(kind=kind, phase=phase, shape=shape, time_s=time_s, count=1, name=name)
