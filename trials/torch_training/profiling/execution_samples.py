"""From the executions that a trace shows to samples, in the terms of costmodels/operators/layer_operators.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from costmodels.operators.layer_operators import OpKind, Phase
from trials.backend import OperatorSample
from trials.profiling.operator_profile import RankProfile, Unexplained, is_routed, merge_samples
from trials.profiling.trace_events import TraceEvent
from trials.torch_training.profiling.trace_reading import CORE, PRODUCTS, Execution, Node, TraceReader, Work

Sizes = tuple[float, ...]

_GROUPED = ("moe_mlp.up", "moe_mlp.down")
_WEIGHT_FIRST = ("MmBackward0",)
"""Nodes that compute the weight's gradient before that of the data; AddmmBackward0 does not."""


def read_profile(events: Iterable[TraceEvent], *, num_steps: int = 1) -> RankProfile:
    """The operators of one step.

    Args:
        events: Those of a rank's threads that nothing contains, in the order of their begin.
        num_steps: Steps that they are of.
    """
    reader = TraceReader(events)
    unexplained = defaultdict(float, reader.unexplained)
    found: dict[tuple[str, Sizes], list[OperatorSample]] = defaultdict(list)
    total_s = dict.fromkeys(Phase, 0.0)
    for execution in reader.executions:
        for sample in _samples(execution):
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


def _samples(execution: Execution) -> Iterator[OperatorSample]:
    """The execution itself, and those of its gradients."""
    if execution.role in _ELEMENTS:
        yield from _pair(execution, OpKind.ELEMENTWISE, (_ELEMENTS[execution.role](_events(execution.forward)),))
    elif execution.role == "norm":
        normed = execution.forward[0].event
        columns = normed.shapes[0][-1]
        shape = float(normed.elements() // columns), float(columns)
        yield from _pair(execution, OpKind.NORM, shape)
        if execution.fork:
            name = f"{execution.block}.residual.gradient"
            yield _sample(name, OpKind.ELEMENTWISE, Phase.BACKWARD, (shape[0] * shape[1],), _total_s(execution.fork))
    elif execution.role == "core":
        yield from _pair(execution, OpKind.ATTENTION, _core_shape(execution))
    elif execution.products:
        yield from _product_samples(execution)


def _pair(execution: Execution, kind: OpKind, shape: Sizes) -> Iterator[OperatorSample]:
    """An operator whose gradient has its shape."""
    yield _sample(execution.name, kind, Phase.FORWARD, shape, _total_s(execution.forward))
    works = [work for node in execution.backward for work in node.works]
    if works and execution.role != "residual":
        yield _sample(f"{execution.name}.gradient", kind, Phase.BACKWARD, shape, _total_s(works))


def _product_samples(execution: Execution) -> Iterator[OperatorSample]:
    """A product and those of its backward pass; what its nodes do beside them (a bias) counts as the weight's."""
    name, products = execution.name, execution.products
    is_grouped = name in _GROUPED
    kind = OpKind.GROUPED_MATMUL if is_grouped else OpKind.MATMUL
    groups = (float(_num_groups(products)),) if is_grouped else ()
    _, k, n = _sizes(products[0])
    yield _sample(name, kind, Phase.FORWARD, (*groups, _summed(products, 0), k, n), _total_s(execution.forward))
    of_data: list[Work] = []
    of_weight: list[Work] = []
    beside_s = 0.0
    for node in execution.backward:
        done = [work for work in node.works if work.event.name in PRODUCTS]
        for place, work in enumerate(done):
            (of_weight if _is_of_weight(work.event, place, node) else of_data).append(work)
        beside_s += _total_s(node.works) - _total_s(done)
    if of_data:
        left, inner, right = _sizes(of_data[0].event)
        shape = *groups, _summed(_events(of_data), 0), inner, right
        yield _sample(f"{name}.data_gradient", kind, Phase.BACKWARD, shape, _total_s(of_data))
    if of_weight:
        left, inner, right = _sizes(of_weight[0].event)
        if (left, right) == (n, k):  # torch multiplies the other way round
            left, right = right, left
        shape = *groups, left, _summed(_events(of_weight), 1), right
        yield _sample(f"{name}.weight_gradient", kind, Phase.BACKWARD, shape, _total_s(of_weight) + beside_s)


def _is_of_weight(product: TraceEvent, place: int, node: Node) -> bool:
    """Whether a product of a backward node gives the weight's gradient; by its sizes if they tell."""
    if product.name == "aten::_grouped_mm":
        return len(product.shapes[1]) == 2  # else the weights [g, n, k] are an operand
    m, k, n = _sizes(node.made_by)
    left, inner, right = _sizes(product)
    fits_weight, fits_data = inner == m and {left, right} == {k, n}, (left, inner, right) == (m, n, k)
    return fits_weight if fits_weight != fits_data else (place == 0) == (node.name in _WEIGHT_FIRST)


def _sizes(product: TraceEvent) -> tuple[float, float, float]:
    """(m, k, n) of [m, k] @ [k, n]."""
    left, right = product.shapes[1:3] if product.name == "aten::addmm" else product.shapes[:2]
    return float(left[0]), float(left[1]), float(right[-1])


def _num_groups(products: Sequence[TraceEvent]) -> int:
    """Of one kernel for all groups, or of products one by one."""
    return products[0].shapes[2][0] if products[0].name == "aten::_grouped_mm" else len(products)


def _summed(products: Iterable[TraceEvent], place: int) -> float:
    """The rows of all groups, which stand at one place of the sizes."""
    return sum(_sizes(product)[place] for product in products)


def _core_shape(execution: Execution) -> Sizes:
    """(b, h, queries, keys, d); a ring has one kernel for each place's keys, of which the first sees all of one's."""
    kernels = [work.event for work in execution.forward if work.event.name.startswith(CORE)]
    (sequences, heads, queries, size), keys = kernels[0].shapes[0], kernels[0].shapes[1][2]
    return float(sequences), float(heads), float(queries), float(keys * len(kernels)), float(size)


def _elements_of(*names: str) -> Callable[[Sequence[TraceEvent]], float]:
    """Elements of the first operands of all operations of some names."""
    return lambda events: float(sum(event.elements() for event in events if event.name in names))


def _looked_up(events: Sequence[TraceEvent]) -> float:
    """Elements of what an embedding gives."""
    return float(sum(e.elements(1) * e.shapes[0][1] for e in events if e.name == "aten::embedding"))


def _largest(events: Sequence[TraceEvent]) -> float:
    """Elements of the largest operand."""
    return float(max(event.elements(place) for event in events for place in range(len(event.shapes))))


def _permuted(events: Sequence[TraceEvent]) -> float:
    """Elements that go to experts and come back: twice those of the rows that answers are copied from."""
    return 2.0 * sum(event.elements(3) for event in events if event.name == "aten::index_copy")


_ELEMENTS: Mapping[str, Callable[[Sequence[TraceEvent]], float]] = {
    "rotary": _elements_of("aten::chunk"),
    "residual": _elements_of("aten::add"),
    "activation": _elements_of("aten::silu", "aten::gelu"),
    "lookup": _looked_up,
    "cross_entropy": _largest,
    "permute": _permuted,
}
"""How many elements an elementwise operator of each role has."""


def _events(works: Iterable[Work]) -> list[TraceEvent]:
    return [work.event for work in works]


def _total_s(works: Iterable[Work]) -> float:
    return sum(work.time_s for work in works)


def _sample(name: str, kind: OpKind, phase: Phase, shape: Sizes, time_s: float) -> OperatorSample:
    return OperatorSample(kind=kind, phase=phase, shape=shape, time_s=time_s, count=1, name=name)
