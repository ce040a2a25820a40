"""Sharding plans: the factor of each operator that each mesh axis serves, and the cost of the step under a plan.

Tensors have no layout of their own in a plan. The factors served at an operator determine the layouts in which it
writes its results and needs its operands. If both ends of an edge differ, a collective stands between them. If several
operators want a tensor in one layout, it is moved there once and kept until the last of them has run. States are an
exception: their copies are not kept from the forward to the backward pass, so a parameter that is sharded to save
memory is gathered once in each pass. A partial sum is added up once. This is a reduce-scatter if all readers want the
same dim sharded and the dim can be cut into so many equal parts; otherwise it is an all-reduce, after which a slice is
free.

Compute time follows the roofline model, with the traffic and the launches that remain where a compiler fuses operators
(`fusion.py`).
Collectives run one after the other and never overlap with compute, so that plans are compared by everything they send;
those that a compiler joins pay their latency together (`joining.py`). `overlap.py` has the timeline of a step with
overlap. Sources: section 2.3 of ManuMatic (collectives, redistribution,
objective).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from costmodels.blocks.operator import OpKind
from costmodels.sharding.device_mesh import DeviceMesh, Lines
from costmodels.sharding.dims import Rule
from costmodels.sharding.fusion import LAUNCH_S, fused_on, lifetimes, traffic_of
from costmodels.sharding.graph import CONSTANT, STATE, Graph, Use
from costmodels.sharding.joining import MOST_BYTES, joining_of, latency_shares, packing_s
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout, Move, local_share, moves
from costmodels.sharding.loop_sums import sums_under
from hardware.arrays import FloatArray, IntArray

NONE = -1
"""Marks an axis that serves no factor of an operator: all devices along it do the same work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Copy of a tensor in a layout that differs from its own.

    Attributes:
        layout: Layout of the copy.
        uses: Reads of the copy, the first one first.
    """

    layout: Layout
    uses: tuple[Use, ...]

    @property
    def readers(self) -> tuple[int, ...]:
        """Numbers of the operators that read the copy."""
        return tuple(use.op for use in self.uses)

    @property
    def times(self) -> int:
        """Number of times that the copy is made in a step."""
        return self.uses[0].times


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Sharding plan of a graph.

    Attributes:
        graph: Graph of the training step.
        mesh: Device mesh that the step is sharded over.
        served: Factor of each operator that each axis serves [ops, axes], or NONE.
    """

    graph: Graph
    mesh: DeviceMesh
    served: IntArray

    def __post_init__(self) -> None:
        expected = (len(self.graph.ops), len(self.mesh.sizes))
        assert self.served.shape == expected, f"`served` is {expected}, but got {self.served.shape}"

    def wanted(self, op: int, operand: int) -> Layout:
        """Return the layout in which an operator reads an operand."""
        return self._layouts_of_ops[op][0][operand]

    def written(self, op: int, result: int) -> Layout:
        """Return the layout in which an operator leaves a result."""
        return self._layouts_of_ops[op][1][result]

    def layout(self, tensor: int) -> Layout:
        """Return the layout of a tensor after its partial sums are added up."""
        return self._settled[tensor]

    def dims_of(self, tensor: int) -> tuple[tuple[str, ...], ...]:
        """Return the names of the axes that partition each dim of a tensor, major to minor."""
        layout = self.layout(tensor)
        return tuple(
            tuple(name for name, cut in zip(self.mesh.names, layout, strict=True) if cut == dim)
            for dim in range(len(self.graph.tensors[tensor].shape))
        )

    def targets(self, tensor: int) -> dict[Layout, int]:
        """Return the layouts in which a tensor is read, each with its first reader; empty for constants."""
        maker, _ = self.graph.maker[tensor]
        if self.graph.ops[maker].primitive == CONSTANT:
            return {}
        found: dict[Layout, int] = {}
        for use in self.graph.uses[tensor]:
            found.setdefault(self.wanted(use.op, use.operand), use.op)
        return found

    def copies(self, tensor: int) -> tuple[Copy, ...]:
        """Return the copies of a tensor for readers that want another layout than its own."""
        return self._copies[tensor]

    @cached_property
    def _copies(self) -> tuple[tuple[Copy, ...], ...]:
        return tuple(self._find_copies(tensor) for tensor in range(len(self.graph.tensors)))

    def _find_copies(self, tensor: int) -> tuple[Copy, ...]:
        maker, _ = self.graph.maker[tensor]
        is_state, turn = self.graph.ops[maker].primitive == STATE, self.graph.first_backward
        lies = self.layout(tensor)
        readers: dict[tuple[Layout, bool], list[Use]] = defaultdict(list)
        for use in self.graph.uses[tensor]:
            wanted = self.wanted(use.op, use.operand)
            if wanted != lies:
                # A copy of a state is dropped after the forward pass and made again for the backward pass (see the
                # module).
                is_again = is_state and turn is not None and use.op >= turn
                readers[wanted, is_again].append(use)
        return tuple(Copy(layout=layout, uses=tuple(uses)) for (layout, _), uses in readers.items())

    @cached_property
    def _layouts_of_ops(self) -> list[tuple[list[Layout], list[Layout]]]:
        """Layouts in which each operator reads its operands and leaves its results [ops]."""
        # Operators of repeated layers share their rule, and often their row.
        known: dict[tuple[int, ...], tuple[list[Layout], list[Layout]]] = {}
        found = []
        for op, row in zip(self.graph.ops, self.served.tolist(), strict=True):
            rule, key = op.rule, (id(op.rule), *row)
            if key not in known:
                known[key] = (
                    [wanted_layout(rule, operand, row) for operand in range(len(op.operands))],
                    [written_layout(rule, result, row) for result in range(len(op.results))],
                )
            found.append(known[key])
        return found

    @cached_property
    def _settled(self) -> tuple[Layout, ...]:
        return tuple(
            reduce_partial_sums(
                self.written(*self.graph.maker[tensor]), list(self.targets(tensor)), array.shape, self.mesh.sizes
            )
            for tensor, array in enumerate(self.graph.tensors)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCollective:
    """One collective of a plan.

    Attributes:
        tensor: Number of the tensor that it moves.
        op: Number of the operator that needs it; for partial sums, the operator that wrote the tensor.
        move: Kind, axes and message of the collective.
        seconds: Time of one execution, or of its part of a joint collective (`joining.latency_shares`) [s].
        times: Number of executions in a step.
    """

    tensor: int
    op: int
    move: Move
    seconds: float
    times: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanCost:
    """Cost of a step under a plan.

    Attributes:
        collectives: All collectives of the step, in the order of the tensors.
        compute_s: Time of all executions of each operator [ops] [s].
        peak_memory_bytes: Peak memory of one device [bytes].
    """

    collectives: tuple[PlannedCollective, ...]
    compute_s: FloatArray
    peak_memory_bytes: float

    @property
    def comm_s(self) -> float:
        """Time of all collectives, one after the other [s]."""
        return sum(each.seconds * each.times for each in self.collectives)

    @property
    def step_time_s(self) -> float:
        """Time of compute and collectives without overlap [s]."""
        return float(self.compute_s.sum()) + self.comm_s


def wanted_layout(rule: Rule, operand: int, served: Sequence[int]) -> Layout:
    """Return the layout in which an operator with this rule reads an operand while the axes serve these factors."""
    dims = rule.operand_dims[operand]
    return tuple(REPLICATED if factor == NONE else _replace_none(dims[factor], REPLICATED) for factor in served)


def written_layout(rule: Rule, result: int, served: Sequence[int]) -> Layout:
    """Return the layout in which an operator with this rule writes a result while the axes serve these factors."""
    # A served factor that the result lacks is a reduction, which leaves partial sums along the axis.
    dims = rule.result_dims[result]
    return tuple(REPLICATED if factor == NONE else _replace_none(dims[factor], PARTIAL) for factor in served)


def _replace_none(dim: int | None, otherwise: int) -> int:
    return otherwise if dim is None else dim


def reduce_partial_sums(
    written: Layout, targets: Sequence[Layout], shape: Sequence[int], sizes: Sequence[int]
) -> Layout:
    """Return a layout without partial sums.

    An axis with partial sums gets the dim that all readers want sharded by it (a reduce-scatter). If they disagree, or
    if the axes that shard the dim already leave no part that this axis can cut evenly, the result is replicated (an
    all-reduce). Axes with partial sums take their dims in the order of the mesh.

    Args:
        written: Layout in which the tensor is written.
        targets: Layouts in which it is read.
        shape: Shape of the whole tensor.
        sizes: Number of devices along each axis.
    """
    found = [REPLICATED if dim == PARTIAL else dim for dim in written]
    for axis, dim in enumerate(written):
        if dim == PARTIAL:
            # Only if all readers agree on this axis can a reduce-scatter serve all of them.
            wanted = {target[axis] for target in targets}
            target = wanted.pop() if len(wanted) == 1 else REPLICATED
            found[axis] = target if can_cut(found, axis, target, shape, sizes) else REPLICATED
    return tuple(found)


def can_cut(layout: Sequence[int], axis: int, dim: int, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether an axis can cut a dim into equal parts beside the other axes of a layout that cut it."""
    ways = math.prod(size for other, size in enumerate(sizes) if other == axis or layout[other] == dim)
    return dim >= 0 and shape[dim] % ways == 0


def cost_of(plan: Plan) -> PlanCost:
    """Return the cost of a step under a plan."""
    return PlanCost(
        collectives=_collectives(plan),
        compute_s=_compute_s(plan),
        peak_memory_bytes=float(live_bytes(plan).max(initial=0.0)),
    )


def step_time_of(plan: Plan) -> float:
    """Return the step time of a plan, as in its cost, without a look at its memory [s]."""
    return PlanCost(collectives=_collectives(plan), compute_s=_compute_s(plan), peak_memory_bytes=math.nan).step_time_s


def violations(plan: Plan) -> tuple[str, ...]:
    """Return the reasons why a plan cannot run, one sentence each; empty for a valid plan."""
    found = []
    sizes = plan.mesh.sizes
    for number, op in enumerate(plan.graph.ops):
        # Several axes may serve one factor; its size must be divisible by the product of their sizes.
        ways: dict[int, int] = defaultdict(lambda: 1)
        for axis, factor in enumerate(plan.served[number].tolist()):
            if factor == NONE:
                continue
            if not 0 <= factor < len(op.rule.factors):
                found.append(f"{op.name}: axis {plan.mesh.names[axis]} serves factor {factor}, which it does not have")
                continue
            ways[factor] *= sizes[axis]
            if factor not in op.rule.cuttable:
                one = op.rule.factors[factor]
                found.append(f"{op.name}: factor {one.name or f'number {factor}'} can't be cut ({one.kind})")
        for factor, count in ways.items():
            one = op.rule.factors[factor]
            if one.size % count:
                found.append(f"{op.name}: {one.name or f'number {factor}'} of {one.size} can't be cut into {count}")
    return tuple(found)


def _collectives(plan: Plan) -> tuple[PlannedCollective, ...]:
    """Return all collectives of a plan: those that settle partial sums, and those that make copies."""
    found: list[PlannedCollective] = []
    mesh = plan.mesh
    # Equal changes of layout recur in every layer, so each is priced once.
    known: dict[tuple[Layout, Layout, float, float], list[tuple[Move, float]]] = {}
    shares, joining = latency_shares(plan.graph), joining_of(plan.graph, mesh)

    def add(tensor: int, op: int, before: Layout, after: Layout, times: int) -> None:
        if before == after:
            return
        key = (before, after, num_bytes[tensor], shares[tensor])
        if key not in known:
            changes = moves(before, after, num_bytes[tensor], mesh.sizes)
            known[key] = [(move, move.seconds(mesh, shares[tensor], joining)) for move in changes]
        for move, seconds in known[key]:
            found.append(PlannedCollective(tensor=tensor, op=op, move=move, seconds=seconds, times=times))

    num_bytes = [array.num_bytes for array in plan.graph.tensors]
    for tensor in range(len(num_bytes)):
        maker, slot = plan.graph.maker[tensor]
        written, lies = plan.written(maker, slot), plan.layout(tensor)
        # Add up partial sums where the tensor is written.
        times = sums_under(plan.graph, plan.mesh, tensor, written, lies)
        add(tensor, maker, written, lies, times)
        if plan.graph.ops[maker].primitive == CONSTANT:
            continue
        for copy in plan.copies(tensor):
            add(tensor, copy.uses[0].op, lies, copy.layout, copy.times)
    return tuple(found)


_Step = tuple[Lines, float, bool, bool, tuple[float, float]]
"""Times of a collective as lines, bytes of its message per byte of the tensor, whether it is joined and whether packed,
and the line of its turns (`Move.turning_line`).
"""


class MoveTimes(dict[tuple[Layout, Layout, float, float], float]):
    """Times to move a tensor of a given size and share of latency from one layout to another [s], each computed once.

    The share is that of `costmodels.sharding.joining.latency_shares`.
    """

    def __init__(self, graph: Graph, mesh: DeviceMesh) -> None:
        """Start without any times of a graph on a mesh."""
        self._mesh, self._joining = mesh, joining_of(graph, mesh)
        self._steps: dict[tuple[Layout, Layout], tuple[_Step, ...]] = mesh.shared(self._joining)

    def __missing__(self, key: tuple[Layout, Layout, float, float]) -> float:
        """Compute and keep the time for the layouts before and after, the bytes of the whole tensor, and the share."""
        found = self[key] = self.seconds(*key)
        return found

    def seconds(self, before: Layout, after: Layout, num_bytes: float, latency_share: float) -> float:
        """Compute the same time without keeping it [s]."""
        steps = self._steps.get((before, after))
        if steps is None:
            steps = self._steps[before, after] = self._find_steps(before, after)
        # As `Move.seconds`, without a search for the links of each size.
        found = 0.0
        for lines, messages_of_byte, is_joined, is_packed, (turn_s, turn_s_per_byte) in steps:
            message_bytes = num_bytes * messages_of_byte
            if message_bytes <= 0:
                continue
            share = max(latency_share, 1.0 / max(MOST_BYTES // max(message_bytes, 1.0), 1.0)) if is_joined else 1.0
            seconds = min([share * base_s + s_per_byte * message_bytes for base_s, s_per_byte in lines])
            if is_packed and seconds > 0 and share < 1:
                seconds += packing_s(OpKind.ALL_REDUCE, message_bytes, self._mesh)
            found += seconds + turn_s + turn_s_per_byte * message_bytes
        return found

    def _find_steps(self, before: Layout, after: Layout) -> tuple[_Step, ...]:
        mesh, joining = self._mesh, self._joining
        return tuple(
            (
                mesh.lines(move.kind, move.axes),
                move.message_bytes,
                move.kind in joining.kinds,
                joining.is_packed and move.kind is OpKind.ALL_REDUCE,
                move.turning_line(mesh) if joining.is_packed else (0.0, 0.0),
            )
            for move in moves(before, after, 1.0, mesh.sizes)
            if mesh.size_along(move.axes) > 1
        )


class Roofline:
    """Compute time of operators on the slowest device of a mesh.

    An operator takes as long as its arithmetic or its memory traffic, whichever takes longer, and a kernel's launch.

    Attributes:
        traffic: Bytes that each operator reads of its operands and writes of its results [ops].
    """

    def __init__(self, graph: Graph, mesh: DeviceMesh) -> None:
        devices = mesh.cluster.devices
        # Elementwise operators of processors also take longer than their traffic.
        self.graph, self.sizes = fused_on(graph, mesh), mesh.sizes
        self.traffic = traffic_of(self.graph)
        self.bandwidth = mesh.memory_bandwidth_bytes_per_s
        self.speed = {
            precision: min(device.peak_flop_per_s(precision) for device in devices)
            for precision in {op.precision for op in graph.ops if op.precision}
        }

    def seconds(self, number: int, served: Sequence[int]) -> float:
        """Return the time of all executions of an operator while the axes serve these factors [s]."""
        sizes, op = self.sizes, self.graph.ops[number]
        if op.is_free:
            return 0.0
        ways = 1
        for axis, factor in enumerate(served):
            ways *= sizes[axis] if factor != NONE else 1
        reads, writes = self.traffic[number].reads, self.traffic[number].writes
        layouts = [(moved, wanted_layout(op.rule, slot, served)) for slot, moved in enumerate(reads)]
        layouts += [(moved, written_layout(op.rule, slot, served)) for slot, moved in enumerate(writes)]
        moved_bytes = sum(moved * local_share(layout, sizes) for moved, layout in layouts)
        # Every served factor divides the arithmetic, but only factors of a tensor divide its traffic.
        arithmetic_s = op.flop / ways / self.speed[op.precision] if op.precision else 0.0
        launch_s = self.traffic[number].launches * LAUNCH_S
        return op.times * (max(arithmetic_s, moved_bytes / self.bandwidth) + launch_s)

    def seconds_of_all(self, number: int, ways: FloatArray, shares: Sequence[FloatArray]) -> FloatArray:
        """Return the same time for several rows at once [rows].

        Args:
            number: Number of the operator.
            ways: Number of devices that share its arithmetic [rows].
            shares: Share of each operand and then of each result that a device reads or writes [rows].
        """
        op = self.graph.ops[number]
        if op.is_free:
            return np.zeros(len(ways))
        traffic = self.traffic[number]
        moved_bytes: FloatArray = np.zeros(len(ways))
        for moved, share in zip((*traffic.reads, *traffic.writes), shares, strict=True):
            moved_bytes = moved_bytes + moved * share
        seconds = moved_bytes / self.bandwidth
        if op.precision:
            seconds = np.maximum(op.flop / ways / self.speed[op.precision], seconds)
        return op.times * (seconds + traffic.launches * LAUNCH_S)


def _compute_s(plan: Plan) -> FloatArray:
    roofline = Roofline(plan.graph, plan.mesh)
    return np.array([roofline.seconds(number, served) for number, served in enumerate(plan.served.tolist())])


def live_bytes(plan: Plan) -> FloatArray:
    """Return the memory in use at each operator [ops] [bytes].

    It counts all tensors that are kept for later operators, in every layout that is kept, and the operator's results.
    The updated value of a state overwrites the state, in the state's layout. A copy that costs no message (a slice or a
    constant) is not kept: each reader makes it anew. Partial sums are counted until they are scattered.
    """
    graph, sizes = plan.graph, plan.mesh.sizes
    # `change` holds allocations and releases, whose running sum is the memory kept; `own` holds an operator's temporary
    # needs.
    change = np.zeros(len(graph.ops) + 1)
    own = np.zeros(len(graph.ops))
    for tensor, (array, lifetime) in enumerate(zip(graph.tensors, lifetimes(fused_on(graph, plan.mesh)), strict=True)):
        maker, slot = graph.maker[tensor]
        held_bytes = array.num_bytes * local_share(plan.layout(tensor), sizes)
        if lifetime is not None:
            change[lifetime.first] += held_bytes
            change[lifetime.last + 1] -= held_bytes
        # While it runs, the writer holds the tensor as written, perhaps as unscattered partial sums.
        own[maker] += array.num_bytes * local_share(plan.written(maker, slot), sizes) - held_bytes
        for copy in plan.copies(tensor):
            copy_bytes = array.num_bytes * local_share(copy.layout, sizes)
            readers = [use.op for use in copy.uses if not use.is_back]
            is_free = graph.ops[maker].primitive == CONSTANT or not moves(
                plan.layout(tensor), copy.layout, array.num_bytes, sizes
            )
            if is_free:
                for op in set(readers):
                    own[op] += copy_bytes
            elif readers:
                change[readers[0]] += copy_bytes
                change[readers[-1] + 1] -= copy_bytes
    return np.cumsum(change[:-1]) + own
