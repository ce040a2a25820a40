"""Collectives that are joined to one message, as XLA and torch's buckets do, and what each then pays of the latency.

XLA joins collectives of one kind among the same devices of which none depends on another, up to a size of the result
(openxla/xla, `xla/service/collective_combiner_utils.h`; the size is `kDefaultAllReduceCombineThreshold` and its like in
`xla/backends/gpu/transforms/collectives/`). A joint message pays its latency once. Sums are copied into one array and
out of it (`xla_gpu_all_reduce_contiguous`), others are sent from where they are. A planned torch module joins sums that
nothing reads yet, such as gradients, in buckets (`exports/torch_buckets.py`). Two rules say which these are:

    under a plan     Collectives at the same place in the order of dependences are joined (`joint_messages`). Those that
                     follow no other are at the first place, and the others at their distance from the end. A timeline
                     joins so (`overlap.py`).
    before any plan  Tensors at the same place of the graph would be joined if the same axes moved them. Each pays the
                     latency for its part of their bytes (`latency_shares`). A plan's cost charges this, so that it
                     remains a sum over tensors, for every planner, bound and proof alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from costmodels.blocks.operator import OpKind
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.fusion import LAUNCH_S
from costmodels.sharding.graph import CONSTANT, Graph, Op, TensorKind

MOST_BYTES = 30 * 2**20
"""Most bytes of the result of a joint collective, and of a bucket."""

JOINED = (OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER)
"""Kinds of collectives that XLA joins; elsewhere, only sums are joined."""

FIRST = -(2**31)
"""Place of what follows no other collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Joining:
    """What is joined in a program.

    Attributes:
        kinds: Kinds of collectives.
        is_packed: Whether kernels bring joint sums into one array and out of it, and turn the parts of what is moved
            along another dim than the first (`Move.turning_s`).
    """

    kinds: tuple[OpKind, ...] = ()
    is_packed: bool = False


def joining_of(graph: Graph, mesh: DeviceMesh) -> Joining:
    """Return what is joined in a program on the devices of a mesh: on processors, XLA joins sums where they are."""
    if graph.is_fused and not mesh.has_processors:
        return Joining(kinds=JOINED, is_packed=True)
    return Joining(kinds=JOINED[:1]) if graph.is_fused or graph.is_bucketed else Joining()


def packing_s(kind: OpKind, message_bytes: float, mesh: DeviceMesh) -> float:
    """Return the time in which kernels bring a message into a joint one, and out of it again [s].

    Joint sums are read and written once before and once after; each part of them takes one more kernel.
    """
    return LAUNCH_S + 4 * message_bytes / mesh.memory_bandwidth_bytes_per_s if kind is OpKind.ALL_REDUCE else 0.0


def joint_messages(
    keys: Sequence[Hashable], result_bytes: Sequence[float], ranks: Sequence[int], places: Sequence[int]
) -> list[list[int]]:
    """Return the collectives that are joined, by their numbers.

    Args:
        keys: What equals in collectives that can be joined: kind, axes, type of the elements, number of executions;
            None for one that is never joined.
        result_bytes: Size of each one's result on a device [bytes].
        ranks: Place of each in the program, in the order of which messages are filled.
        places: Place in the order of dependences; of two that depend on each other, the later one's is greater.
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    found: list[list[int]] = []
    for number, key in enumerate(keys):
        if key is None or result_bytes[number] > MOST_BYTES:
            found.append([number])
        else:
            alike[key, places[number]].append(number)
    for numbers in alike.values():
        filled_bytes = MOST_BYTES + 1.0
        for number in sorted(numbers, key=lambda number: ranks[number]):
            filled_bytes += result_bytes[number]
            if filled_bytes > MOST_BYTES:
                found.append([])
                filled_bytes = result_bytes[number]
            found[-1].append(number)
    return found


@lru_cache(maxsize=8)
def latency_shares(graph: Graph) -> tuple[float, ...]:
    """Return the part of a collective's latency that each tensor pays [t]; 1 where nothing is joined.

    Tensors between which there is no path can be moved together. These are tensors at the same distance from the start,
    as far as they come from sources alone or may be left as partial sums, and at the same distance from the end, as far
    as no arithmetic follows, such as gradients. Each pays for its part of their bytes, and for one of as many of its
    size as fit into MOST_BYTES if that is more (`Move.seconds`).
    """
    if not (graph.is_fused or graph.is_bucketed):
        return (1.0,) * len(graph.tensors)
    place_of = _places(graph)
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for tensor in range(len(graph.tensors)):
        alike[place_of(tensor)].append(tensor)
    found = [1.0] * len(graph.tensors)
    for tensors in alike.values():
        all_bytes = sum(graph.tensors[tensor].num_bytes for tensor in tensors)
        for tensor in tensors:
            found[tensor] = graph.tensors[tensor].num_bytes / all_bytes if all_bytes else 1.0
    return tuple(found)


def _places(graph: Graph) -> Callable[[int], Hashable]:
    """Return the function that gives tensors that can be moved together one key."""
    ops, makers = graph.ops, [maker for maker, _ in graph.maker]
    level, computes_before = [0] * len(ops), [False] * len(ops)
    for number, op in enumerate(ops):
        before = [makers[tensor] for tensor in op.operands if makers[tensor] < number]
        level[number] = max((level[each] + 1 for each in before), default=0)
        computes_before[number] = op.flop > 0 or any(computes_before[each] for each in before)
    height, computes_after = [0] * len(ops), [False] * len(ops)
    for number in reversed(range(len(ops))):
        for each in (makers[tensor] for tensor in ops[number].operands):
            if each < number:
                height[each] = max(height[each], height[number] + 1)
                computes_after[each] = computes_after[each] or computes_after[number] or ops[number].flop > 0

    def place_of(tensor: int) -> Hashable:
        array, each = graph.tensors[tensor], makers[tensor]
        kind = (array.kind, array.element_bytes, graph.sums[tensor])
        if ops[each].primitive == CONSTANT:
            return tensor
        if graph.is_bucketed:
            # Gradients wait for each other, wherever they stand.
            is_gradient = array.kind is TensorKind.GRADIENT and _may_be_partial(ops[each])
            return kind if is_gradient and not computes_after[each] else tensor
        if not computes_after[each]:
            return ("end", height[each], *kind)
        return ("start", level[each], *kind) if _may_be_partial(ops[each]) or not computes_before[each] else tensor

    return place_of


def _may_be_partial(op: Op) -> bool:
    """Return whether an operator can leave a result as partial sums."""
    return any(dims[factor] is None for dims in op.rule.result_dims for factor in op.rule.cuttable)
