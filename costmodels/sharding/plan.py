"""A sharding plan: which factor of each operator every mesh axis serves, and what the step costs with it.

Tensors have no layout of their own in a plan. What an operator writes lies as the factors served there say, and what it
reads must lie as they say; where both differ, a collective stands in between. A tensor that several operators want in
one layout is moved there once and kept there for the last of them; but what lives from step to step is not kept from
one pass to the other, so that a parameter that is sharded for memory is gathered in the forward pass and again in the
backward pass. A partial sum is added up once: with a reduce-scatter where all who read it want the same dim cut, else
with an all-reduce, of which a slice is free.

The step takes its collectives one after the other behind its compute, which is a roofline's: nothing overlaps, so that
plans are compared by all that they send. Sources: section 2.3 of ManuMatic (collectives, redistribution, objective).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.dims import Rule
from costmodels.sharding.graph import CONSTANT, INPUT, STATE, Graph, Use
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout, Move, local_share, moves
from hardware.arrays import FloatArray, IntArray

NONE = -1
"""An axis that serves no factor of an operator: all devices along it do the same."""

Classifier = Callable[[Layout, Layout, float, Sequence[int]], tuple[Move, ...]]
"""`sharding.moves`, or another reading of what a mismatch costs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A tensor in another layout than it lies in.

    Attributes:
        layout: Which.
        uses: Where it is read there, the first one first.
    """

    layout: Layout
    uses: tuple[Use, ...]

    @property
    def readers(self) -> tuple[int, ...]:
        """The operators that read it there."""
        return tuple(use.op for use in self.uses)

    @property
    def times(self) -> int:
        """How often it is made."""
        return self.uses[0].times


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How a graph is sharded.

    Attributes:
        graph: What.
        mesh: Over what.
        served: The factor of each operator that each axis serves [ops, axes], or NONE.
    """

    graph: Graph
    mesh: DeviceMesh
    served: IntArray

    def __post_init__(self) -> None:
        expected = (len(self.graph.ops), len(self.mesh.sizes))
        assert self.served.shape == expected, f"`served` is {expected}, but got {self.served.shape}"

    def wanted(self, op: int, operand: int) -> Layout:
        """How an operator reads an operand."""
        return wanted_layout(self.graph.ops[op].rule, operand, self._rows[op])

    def written(self, op: int, result: int) -> Layout:
        """How an operator leaves a result."""
        return written_layout(self.graph.ops[op].rule, result, self._rows[op])

    def layout(self, tensor: int) -> Layout:
        """How a tensor lies once its partial sums are added up."""
        return self._settled[tensor]

    def dims_of(self, tensor: int) -> tuple[tuple[str, ...], ...]:
        """The axes that cut each dim of a tensor, major to minor."""
        layout = self.layout(tensor)
        return tuple(
            tuple(name for name, cut in zip(self.mesh.names, layout, strict=True) if cut == dim)
            for dim in range(len(self.graph.tensors[tensor].shape))
        )

    def targets(self, tensor: int) -> dict[Layout, int]:
        """The layouts in which a tensor is read, and the first operator that does; for constants there is none."""
        maker, _ = self.graph.maker[tensor]
        if self.graph.ops[maker].primitive == CONSTANT:
            return {}
        found: dict[Layout, int] = {}
        for use in self.graph.uses[tensor]:
            found.setdefault(self.wanted(use.op, use.operand), use.op)
        return found

    def copies(self, tensor: int) -> tuple[Copy, ...]:
        """What is made of a tensor for those who read it otherwise than it lies."""
        maker, _ = self.graph.maker[tensor]
        is_state, turn = self.graph.ops[maker].primitive == STATE, self.graph.first_backward
        lies = self.layout(tensor)
        readers: dict[tuple[Layout, bool], list[Use]] = defaultdict(list)
        for use in self.graph.uses[tensor]:
            wanted = self.wanted(use.op, use.operand)
            if wanted != lies:
                is_again = is_state and turn is not None and use.op >= turn
                readers[wanted, is_again].append(use)
        return tuple(Copy(layout=layout, uses=tuple(uses)) for (layout, _), uses in readers.items())

    @cached_property
    def _rows(self) -> list[list[int]]:
        rows: list[list[int]] = self.served.tolist()
        return rows

    @cached_property
    def _settled(self) -> tuple[Layout, ...]:
        return tuple(
            settled(self.written(*self.graph.maker[tensor]), list(self.targets(tensor)))
            for tensor in range(len(self.graph.tensors))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCollective:
    """A collective of a plan.

    Attributes:
        tensor: Number of what it moves.
        op: Number of the operator that needs it; of the one that wrote the tensor for partial sums.
        move: What it does.
        seconds: What one takes.
        times: How often it runs in a step.
    """

    tensor: int
    op: int
    move: Move
    seconds: float
    times: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanCost:
    """What a step costs.

    Attributes:
        collectives: All that it communicates, in the order of the tensors.
        compute_s: Of each operator, all its executions [ops].
        peak_memory_bytes: The most that a device holds at a time.
    """

    collectives: tuple[PlannedCollective, ...]
    compute_s: FloatArray
    peak_memory_bytes: float

    @property
    def comm_s(self) -> float:
        """All collectives, one after the other."""
        return sum(each.seconds * each.times for each in self.collectives)

    @property
    def step_time_s(self) -> float:
        """Compute, and then the collectives."""
        return float(self.compute_s.sum()) + self.comm_s


def wanted_layout(rule: Rule, operand: int, served: Sequence[int]) -> Layout:
    """How an operator of that rule reads an operand while the axes serve these factors."""
    dims = rule.operand_dims[operand]
    return tuple(REPLICATED if factor == NONE else _dim_or(dims[factor], REPLICATED) for factor in served)


def written_layout(rule: Rule, result: int, served: Sequence[int]) -> Layout:
    """How it leaves a result."""
    dims = rule.result_dims[result]
    return tuple(REPLICATED if factor == NONE else _dim_or(dims[factor], PARTIAL) for factor in served)


def _dim_or(dim: int | None, otherwise: int) -> int:
    return otherwise if dim is None else dim


def settled(written: Layout, targets: Sequence[Layout]) -> Layout:
    """Where partial sums go: to the dim that all who read the tensor want cut by an axis, else everywhere."""
    found = list(written)
    for axis, dim in enumerate(written):
        if dim == PARTIAL:
            wanted = {target[axis] for target in targets}
            found[axis] = wanted.pop() if len(wanted) == 1 else REPLICATED
    return tuple(found)


def cost_of(plan: Plan, *, classifier: Classifier = moves) -> PlanCost:
    """What a step costs with a plan."""
    return PlanCost(
        collectives=_collectives(plan, classifier),
        compute_s=_compute_s(plan),
        peak_memory_bytes=float(live_bytes(plan).max(initial=0.0)),
    )


def violations(plan: Plan) -> tuple[str, ...]:
    """What keeps a plan from running, a sentence each; empty for one that can."""
    found = []
    sizes = plan.mesh.sizes
    for number, op in enumerate(plan.graph.ops):
        ways: dict[int, int] = defaultdict(lambda: 1)
        for axis, factor in enumerate(plan.served[number].tolist()):
            if factor == NONE:
                continue
            if not 0 <= factor < len(op.rule.factors):
                found.append(f"{op.name}: axis {plan.mesh.names[axis]} serves factor {factor}, which it does not have")
                continue
            ways[factor] *= sizes[axis]
            if factor not in op.rule.cuttable:
                kind = op.rule.factors[factor].kind
                found.append(f"{op.name}: factor {_called(op.rule.factors[factor].name, factor)} can't be cut ({kind})")
        for factor, count in ways.items():
            size = op.rule.factors[factor].size
            if size % count:
                name = _called(op.rule.factors[factor].name, factor)
                found.append(f"{op.name}: {name} of {size} can't be cut into {count}")
    return tuple(found)


def _called(name: str, number: int) -> str:
    return name or f"number {number}"


def _collectives(plan: Plan, classifier: Classifier) -> tuple[PlannedCollective, ...]:
    found = []
    sizes = plan.mesh.sizes
    known: dict[Move, float] = {}

    def add(tensor: int, op: int, changes: Sequence[Move], times: int) -> None:
        for move in changes:
            if move not in known:
                known[move] = move.seconds(plan.mesh)
            found.append(PlannedCollective(tensor=tensor, op=op, move=move, seconds=known[move], times=times))

    for tensor, array in enumerate(plan.graph.tensors):
        maker, slot = plan.graph.maker[tensor]
        written, lies = plan.written(maker, slot), plan.layout(tensor)
        add(tensor, maker, classifier(written, lies, array.num_bytes, sizes), plan.graph.sums[tensor])
        if plan.graph.ops[maker].primitive == CONSTANT:
            continue
        for copy in plan.copies(tensor):
            first = copy.readers[0]
            add(tensor, first, classifier(lies, copy.layout, array.num_bytes, sizes), copy.times)
    return tuple(found)


class Roofline:
    """What operators take on the slowest device of a mesh, by arithmetic or memory traffic, whichever is longer."""

    def __init__(self, graph: Graph, mesh: DeviceMesh) -> None:
        devices = mesh.cluster.devices
        self.graph, self.sizes = graph, mesh.sizes
        self.bandwidth = min(device.memory_bandwidth_bytes_per_s for device in devices)
        self.speed = {
            precision: min(device.peak_flop_per_s(precision) for device in devices)
            for precision in {op.precision for op in graph.ops if op.precision}
        }

    def seconds(self, number: int, served: Sequence[int]) -> float:
        """All executions of an operator while the axes serve these factors [s]."""
        graph, sizes, op = self.graph, self.sizes, self.graph.ops[number]
        if op.is_free:
            return 0.0
        ways = 1
        for axis, factor in enumerate(served):
            ways *= sizes[axis] if factor != NONE else 1
        moved_bytes = sum(
            graph.tensors[tensor].num_bytes * local_share(wanted_layout(op.rule, slot, served), sizes)
            for slot, tensor in enumerate(op.operands)
        ) + sum(
            graph.tensors[tensor].num_bytes * local_share(written_layout(op.rule, slot, served), sizes)
            for slot, tensor in enumerate(op.results)
        )
        arithmetic_s = op.flop / ways / self.speed[op.precision] if op.precision else 0.0
        return op.times * max(arithmetic_s, moved_bytes / self.bandwidth)


def _compute_s(plan: Plan) -> FloatArray:
    """Of each operator [ops]."""
    roofline = Roofline(plan.graph, plan.mesh)
    return np.array([roofline.seconds(number, served) for number, served in enumerate(plan.served.tolist())])


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetime:
    """While which operators run a tensor is in memory, from the first to the last."""

    first: int
    last: int


def lifetimes(graph: Graph) -> tuple[Lifetime | None, ...]:
    """Of each tensor; None for what the step makes of a state, which takes the state's place."""
    kept = {op.operands[0] for op in graph.ops if op.primitive == STATE and op.operands}
    found: list[Lifetime | None] = []
    for tensor, uses in enumerate(graph.uses):
        maker, _ = graph.maker[tensor]
        if graph.ops[maker].primitive in (STATE, INPUT):
            found.append(Lifetime(first=0, last=len(graph.ops) - 1))
        elif tensor in kept:
            found.append(None)
        else:
            found.append(Lifetime(first=maker, last=max((use.op for use in uses if not use.is_back), default=maker)))
    return tuple(found)


def live_bytes(plan: Plan) -> FloatArray:
    """What is alive at each operator [ops]: what lies there for later, in every layout that is kept, and its results.

    What the step makes of a state takes the state's place, in the layout of that. What costs no message, a slice or a
    constant, is not kept: everyone who reads it makes it anew. Partial sums are there until they are scattered.
    """
    graph, sizes = plan.graph, plan.mesh.sizes
    change = np.zeros(len(graph.ops) + 1)
    own = np.zeros(len(graph.ops))
    for tensor, (array, lifetime) in enumerate(zip(graph.tensors, lifetimes(graph), strict=True)):
        maker, slot = graph.maker[tensor]
        held_bytes = array.num_bytes * local_share(plan.layout(tensor), sizes)
        if lifetime is not None:
            change[lifetime.first] += held_bytes
            change[lifetime.last + 1] -= held_bytes
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
