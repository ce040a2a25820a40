"""D-Rec: sharding of a graph by repeated halving (Wang et al., Euro-Par 2021; ManuMatic, sections 2.4 and 2.5).

Every prime factor of every mesh axis is a level, which makes ceil(log2 d) levels where all of them are 2. Each level
cuts the parts that earlier levels have left into that many parts again. Inside a level every operator is visited once.
It is given for good the factor that the level serves there, or none. It takes the candidate of the least cost: its own
compute and partial sums, and the redistribution to and from neighbours that this level has visited already. Neighbours
that were not visited yet cost nothing.

The quality of the plan depends on the order of the visits. `price` is the paper's order, by decreasing compromise
price: the cost, beyond an operator's best candidate, of avoiding every redistribution; infinite where that is
impossible. Prices are updated after every visit. Equal prices (all are zero in the beginning) go to operators with
visited neighbours first, then to the heaviest operator. `weight` goes by the highest cost of an operator; `topological`
and `reverse` follow the order of the graph.

A partial sum is scattered where it stands, which its operator pays, and gathered where it is wanted whole, which the
edge pays. Compute is our addition: the paper's objective is communication alone, for which the best plan would
replicate everything and send nothing. Costs are exchangeable: seconds of a roofline and of the links, or other prices
(`AbstractPrices`) such as the volumes of `symbolic_prices`. Names that end in _s are then in their unit.

Letters: o operators, e edges (one per use of a tensor), c candidates of an operator, at most C.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from costmodels.blocks.operator import OpKind
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.fusion import unfused
from costmodels.sharding.graph import CONSTANT, Graph, Op
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout
from costmodels.sharding.plan import NONE, Plan, reduce_partial_sums, wanted_layout, written_layout
from hardware.collector import without_collector

Order = Literal["price", "weight", "topological", "reverse"]
"""Order of D-Rec's visits."""
ORDERS: tuple[Order, ...] = get_args(Order)
"""All orders of D-Rec's visits."""

Closed = Callable[[int, int, Sequence[int]], tuple[int, ...] | None]
"""Restriction of an operator at a level, from the parts that its factors are cut into so far: the only candidates that
it may take there, of those that divide; None for all."""

Extra = Callable[[int, int, Sequence[int], int], float]
"""Further seconds of an operator at a level for a candidate, from the parts that its factors are cut into so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One cut of the whole graph into equal parts.

    Attributes:
        axis: Axis of the refined mesh.
        of: Axis of the user's mesh that it is a part of.
        ways: Number of parts that the level makes.
    """

    axis: int
    of: int
    ways: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of a device for one execution of an operator, for a factor served at a level or none.

    Attributes:
        flop: Floating-point operations.
        read_bytes: Bytes read of each operand.
        written_bytes: Bytes written of each result.
        cuts_read: Whether the level cuts each operand.
        cuts_written: Whether the level cuts each result. A result that is not cut is a partial sum if a factor is
            served.
        is_cut: Whether the level serves a factor.
    """

    flop: float
    read_bytes: Sequence[float]
    written_bytes: Sequence[float]
    cuts_read: Sequence[bool]
    cuts_written: Sequence[bool]
    is_cut: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Redistribution:
    """Costs of bringing a tensor from one layout to another along a level.

    Attributes:
        gather_s: Cost of gathering cut parts to the whole tensor.
        exchange_s: Cost of cutting another dim instead.
        sum_s: Cost of partial sums to the whole tensor, beyond what their operator has paid for them.
        scatter_s: Cost of partial sums to cut parts, beyond what their operator has paid for them.
        slice_s: Cost of cutting the whole tensor into parts.
    """

    gather_s: float
    exchange_s: float
    sum_s: float
    scatter_s: float = 0.0
    slice_s: float = 0.0


class AbstractPrices(ABC):
    """Prices that D-Rec minimises: of an operator by itself, and of a tensor on its way between two operators."""

    @abstractmethod
    def may_replicate(self, op: Op) -> bool:
        """Return whether a level may leave an operator whole although it could cut it."""

    @abstractmethod
    def own_s(self, op: Op, work: Work, mesh: DeviceMesh, level: Level) -> float:
        """Return C_local of one execution."""

    @abstractmethod
    def redistribution(self, num_bytes: float, mesh: DeviceMesh, level: Level) -> Redistribution:
        """Return C_redist of one tensor, of which a device holds `num_bytes` before the level."""


class Seconds(AbstractPrices):
    """Prices in seconds of the slowest device and of the links that a level crosses.

    They are those of `costmodels.sharding.plan.cost_of` where no compiler fuses operators. In a fused chain, most
    operators would have no price of their own, and a planner that looks at one after the other no reason to cut them.
    """

    def __init__(self, graph: Graph, mesh: DeviceMesh) -> None:
        """Find the slowest device's time per byte and per floating-point operation."""
        devices = mesh.cluster.devices
        self.byte_s = 1.0 / min(device.memory_bandwidth_bytes_per_s for device in devices)
        self.flop_s = {
            precision: 1.0 / min(device.peak_flop_per_s(precision) for device in devices)
            for precision in {op.precision for op in graph.ops if op.precision}
        }

    def may_replicate(self, op: Op) -> bool:  # noqa: ARG002 # of the contract
        """Return True for every operator: replicated compute has its price."""
        return True

    def own_s(self, op: Op, work: Work, mesh: DeviceMesh, level: Level) -> float:
        """Return the time of compute and of scattering partial sums [s]."""
        # The roofline: arithmetic or memory traffic, whichever takes longer.
        moved_bytes = sum(work.written_bytes) + sum(work.read_bytes)
        own_s = max(work.flop * self.flop_s[op.precision] if op.precision else 0.0, moved_bytes * self.byte_s)
        if work.is_cut:
            for num_bytes, is_cut in zip(work.written_bytes, work.cuts_written, strict=True):
                if not is_cut:
                    own_s += mesh.seconds(OpKind.REDUCE_SCATTER, num_bytes, (level.axis,))
        return own_s

    def redistribution(self, num_bytes: float, mesh: DeviceMesh, level: Level) -> Redistribution:
        """Return the times of collectives on `num_bytes` [s]."""
        axis = (level.axis,)
        scatter_s = mesh.seconds(OpKind.REDUCE_SCATTER, num_bytes, axis)
        return Redistribution(
            gather_s=mesh.seconds(OpKind.ALL_GATHER, num_bytes, axis),
            exchange_s=mesh.seconds(OpKind.ALL_TO_ALL, num_bytes / level.ways, axis),
            # An all-reduce is a reduce-scatter, which the operator has paid for, and the rest.
            sum_s=max(mesh.seconds(OpKind.ALL_REDUCE, num_bytes, axis) - scatter_s, 0.0),
        )


def refine_mesh(mesh: DeviceMesh) -> tuple[DeviceMesh, tuple[Level, ...]]:
    """Split every axis of a mesh into its prime factors, and return the new mesh with its levels.

    The slowest axis comes first: collectives along it use the slowest links.
    """
    names: list[str] = []
    sizes: list[int] = []
    levels: list[Level] = []
    for axis, (name, size) in enumerate(zip(mesh.names, mesh.sizes, strict=True)):
        factors = _prime_factors(size)
        for number, ways in enumerate(factors):
            levels.append(Level(axis=len(names), of=axis, ways=ways))
            names.append(name if len(factors) == 1 else f"{name}.{number}")
            sizes.append(ways)
    return DeviceMesh(names=tuple(names), sizes=tuple(sizes), cluster=mesh.cluster), tuple(levels)


def whole(mesh: DeviceMesh) -> tuple[DeviceMesh, tuple[Level, ...]]:
    """Return the mesh as it is, with one level for each axis.

    It serves frameworks that can't cut one tensor dim by a part of an axis.
    """
    levels = [Level(axis=axis, of=axis, ways=size) for axis, size in enumerate(mesh.sizes) if size > 1]
    return mesh, tuple(levels)


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors in descending order."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1]


@without_collector
def recursive_plan(
    graph: Graph,
    mesh: DeviceMesh,
    levels: Sequence[Level],
    *,
    order: Order = "price",
    closed: Closed | None = None,
    extra: Extra | None = None,
    prices: AbstractPrices | None = None,
) -> Plan:
    """Plan the whole graph by D-Rec.

    Args:
        graph: Graph of the training step to shard.
        mesh: Mesh that `refine_mesh` or `whole` returns.
        levels: Levels of that mesh, in the order of the cuts.
        order: Order of a level's visits to operators.
        closed: Restriction of operators, which are then visited first; None for no restriction.
        extra: Further costs of candidates; None for no further costs.
        prices: Prices to minimise; None for `Seconds`.
    """
    known = _Progress(graph, mesh, prices)
    for number, level in enumerate(levels):
        cut = _Cut(known, level)
        if closed is not None:
            cut.close(closed, number)
        if extra is not None:
            cut.charge(extra, number)
        known.apply(level, cut.visit(order))
    return Plan(graph=graph, mesh=mesh, served=known.served)


class _Progress:
    """State of a graph between two levels.

    Attributes:
        served: Factor of each operator that each axis serves, or NONE [o, axes].
        ways: Number of parts that each factor of each operator is cut into [o][factors].
        held_bytes: Bytes of each tensor that a device holds [t].
        read_bytes: Bytes of each operand that a device reads [o][operands].
        written_bytes: Bytes of each result that a device writes [o][results].
        flop: Floating-point operations of each operator that are left for a device [o].
        prices: Prices to minimise.
    """

    def __init__(self, graph: Graph, mesh: DeviceMesh, prices: AbstractPrices | None = None) -> None:
        """Begin with nothing cut."""
        self.graph, self.mesh = unfused(graph), mesh
        self.prices = Seconds(graph, mesh) if prices is None else prices
        self.served = np.full((len(graph.ops), len(mesh.sizes)), NONE, dtype=np.int64)
        self.ways = [[1] * len(op.rule.factors) for op in graph.ops]
        self.held_bytes = [tensor.num_bytes for tensor in graph.tensors]
        self.read_bytes = [[self.held_bytes[tensor] for tensor in op.operands] for op in graph.ops]
        self.written_bytes = [[self.held_bytes[tensor] for tensor in op.results] for op in graph.ops]
        self.flop = [op.flop for op in graph.ops]

    def apply(self, level: Level, chosen: Sequence[int]) -> None:
        """Apply the factors that a level has chosen to shares of work and memory."""
        for number, (op, factor) in enumerate(zip(self.graph.ops, chosen, strict=True)):
            if factor == NONE:
                continue
            self.served[number, level.axis] = factor
            self.ways[number][factor] *= level.ways
            self.flop[number] /= level.ways
            # Only tensors with the factor on one of their dims become smaller.
            for parts, dims in (
                (self.read_bytes[number], op.rule.operand_dims),
                (self.written_bytes[number], op.rule.result_dims),
            ):
                for slot, of_factor in enumerate(dims):
                    if of_factor[factor] is not None:
                        parts[slot] /= level.ways
        # A device holds a smaller part of a tensor only where the tensor lies cut once its partial sums are added up.
        for tensor, (maker, slot) in enumerate(self.graph.maker):
            written = _state(self.graph.ops[maker].rule.result_dims[slot], chosen[maker], PARTIAL)
            if (self._layout(tensor)[level.axis] if written == PARTIAL else written) >= 0:
                self.held_bytes[tensor] /= level.ways

    def _layout(self, tensor: int) -> Layout:
        """Return the layout of a tensor after the levels so far."""
        (maker, slot), ops = self.graph.maker[tensor], self.graph.ops
        return reduce_partial_sums(
            written_layout(ops[maker].rule, slot, self.served[maker].tolist()),
            [
                wanted_layout(ops[use.op].rule, use.operand, self.served[use.op].tolist())
                for use in self.graph.uses[tensor]
            ],
            self.graph.tensors[tensor].shape,
            self.mesh.sizes,
        )


def _state(dims: Sequence[int | None], factor: int, otherwise: int) -> int:
    """Return the dim that an axis cuts by serving a factor, or `otherwise` if the factor is on no dim of the tensor."""
    if factor == NONE:
        return REPLICATED
    dim = dims[factor]
    return otherwise if dim is None else dim


class _Edge(NamedTuple):
    """A use of a tensor, seen from one of its ends.

    Attributes:
        other: Operator at the other end.
        back: Index of the same edge there.
        is_maker: Whether this end writes the tensor.
        states: Dim of the tensor that each candidate of this end cuts, REPLICATED or PARTIAL.
        price: Costs of redistributing the tensor once.
        times: Number of redistributions in a step.
    """

    other: int
    back: int
    is_maker: bool
    states: Sequence[int]
    price: Redistribution
    times: int

    def cost_s(self, own: int, others: int) -> float:
        """Return the cost of moving the tensor between the state at this end and the state at the other."""
        written, wanted = (own, others) if self.is_maker else (others, own)
        price = self.price
        if written == wanted:
            return 0.0
        if written == REPLICATED:
            return self.times * price.slice_s
        if written == PARTIAL:
            return self.times * (price.sum_s if wanted == REPLICATED else price.scatter_s)
        return self.times * (price.gather_s if wanted == REPLICATED else price.exchange_s)


class _Cut:
    """One level at work.

    Attributes:
        candidates: Factors that each operator may take, NONE first [o][c].
        cost_s: Cost of each candidate, with all neighbours that were visited [o][c].
        conflicts: Number of redistributions of each candidate with visited neighbours [o][c].
    """

    def __init__(self, known: _Progress, level: Level) -> None:
        """Price the candidates of all operators by themselves."""
        self.known, self.level = known, level
        self.candidates: list[tuple[int, ...]] = []
        self.cost_s: list[list[float]] = []
        self.is_closed = [False] * len(known.graph.ops)
        # Operators of repeated layers have the same rule and sizes, so that their candidates are priced once.
        alike: dict[tuple[object, ...], tuple[tuple[int, ...], list[float]]] = {}
        for number, op in enumerate(known.graph.ops):
            key = (
                id(op.rule),
                op.primitive,
                op.precision,
                op.times,
                known.flop[number],
                *known.ways[number],
                *known.read_bytes[number],
                *known.written_bytes[number],
            )
            if key not in alike:
                cuttable = self._cuttable(number)
                is_open = not cuttable or op.is_free or known.prices.may_replicate(op)
                # Some prices force a cut of operators that can be cut.
                candidates = (NONE, *cuttable) if is_open else tuple(cuttable)
                alike[key] = (candidates, [self._own_s(number, factor) for factor in candidates])
            candidates, costs_s = alike[key]
            self.candidates.append(candidates)
            self.cost_s.append(list(costs_s))
        self.conflicts = [[0] * len(candidates) for candidates in self.candidates]

    def close(self, closed: Closed, level: int) -> None:
        """Restrict operators to some of their candidates; restricted operators are visited first."""
        for number, candidates in enumerate(self.candidates):
            if (only := closed(number, level, self.known.ways[number])) is not None:
                kept = [position for position, factor in enumerate(candidates) if factor in only]
                assert kept, f"{self.known.graph.ops[number].name} is restricted to what it can't take"
                # Costs and conflicts stand in the order of the candidates.
                self.candidates[number] = tuple(candidates[position] for position in kept)
                self.cost_s[number] = [self.cost_s[number][position] for position in kept]
                self.conflicts[number] = [0] * len(kept)
                self.is_closed[number] = True

    def charge(self, extra: Extra, level: int) -> None:
        """Add further costs to candidates."""
        for number, candidates in enumerate(self.candidates):
            for position, factor in enumerate(candidates):
                self.cost_s[number][position] += extra(number, level, self.known.ways[number], factor)

    def visit(self, order: Order) -> list[int]:
        """Visit all operators in an order, and return the factor chosen for each."""
        edges = self._edges()
        chosen: list[int | None] = [None] * len(self.candidates)
        for number in self._order(order, edges, chosen):
            costs_s = self.cost_s[number]
            # The first of equal candidates wins, which makes plans reproducible.
            position = costs_s.index(min(costs_s))
            chosen[number] = position
            for edge in edges[number]:
                if chosen[edge.other] is None:
                    self._add_edge_cost(edges[edge.other][edge.back], edge.other, edge.states[position])
        return [
            candidates[position]
            for candidates, position in zip(self.candidates, chosen, strict=True)
            if position is not None
        ]

    def _add_edge_cost(self, edge: _Edge, number: int, others: int) -> None:
        """Add the cost of a neighbour's choice to the candidates of an operator that was not visited yet."""
        costs_s, conflicts = self.cost_s[number], self.conflicts[number]
        for position, own in enumerate(edge.states):
            cost_s = edge.cost_s(own, others)
            if cost_s > 0:
                costs_s[position] += cost_s
                conflicts[position] += 1

    def _order(self, order: Order, edges: Sequence[Sequence[_Edge]], chosen: Sequence[int | None]) -> Iterator[int]:
        """Yield the operators in an order, restricted ones first.

        The order by price depends on the choices made in the meantime, so that the caller must add their costs before
        it asks for the next operator.
        """
        count = len(self.candidates)
        weights = [max(costs_s) for costs_s in self.cost_s]
        if order != "price":
            keys = {
                "weight": lambda number: (not self.is_closed[number], -weights[number], number),
                "topological": lambda number: (not self.is_closed[number], number),
                "reverse": lambda number: (not self.is_closed[number], -number),
            }
            yield from sorted(range(count), key=keys[order])
            return
        # Changed prices are pushed as new entries. An entry that is not the latest of its operator is skipped.
        heap = [(not self.is_closed[number], 0.0, 0, -weights[number], number) for number in range(count)]
        heapq.heapify(heap)
        latest = {entry[-1]: entry for entry in heap}
        while heap:
            entry = heapq.heappop(heap)
            number = entry[-1]
            if latest.get(number) != entry:
                continue
            del latest[number]
            yield number
            for other in {edge.other for edge in edges[number] if chosen[edge.other] is None}:
                changed = (not self.is_closed[other], -self._price_s(other), -1, -weights[other], other)
                latest[other] = changed
                heapq.heappush(heap, changed)

    def _price_s(self, number: int) -> float:
        """Return the compromise price (ManuMatic, section 2.4)."""
        costs_s = self.cost_s[number]
        # Candidates without any redistribution to or from visited neighbours.
        compatible = [
            cost_s for cost_s, conflicts in zip(costs_s, self.conflicts[number], strict=True) if not conflicts
        ]
        return min(compatible) - min(costs_s) if compatible else math.inf

    def _cuttable(self, number: int) -> list[int]:
        rule, ways = self.known.graph.ops[number].rule, self.known.ways[number]
        return [factor for factor in rule.cuttable if rule.factors[factor].size % (ways[factor] * self.level.ways) == 0]

    def _own_s(self, number: int, factor: int) -> float:
        """Return C_local of all executions of an operator."""
        known, ways = self.known, self.level.ways
        op = known.graph.ops[number]
        if op.is_free:
            return 0.0
        # A result that is not cut although a factor is served is a partial sum.
        is_cut = factor != NONE
        cuts_read, cuts_written = (
            [is_cut and dims[factor] is not None for dims in sides]
            for sides in (op.rule.operand_dims, op.rule.result_dims)
        )

        def parts(sizes: Sequence[float], cuts: Sequence[bool]) -> list[float]:
            return [size / ways if is_part else size for size, is_part in zip(sizes, cuts, strict=True)]

        work = Work(
            flop=known.flop[number] / ways if is_cut else known.flop[number],
            read_bytes=parts(known.read_bytes[number], cuts_read),
            written_bytes=parts(known.written_bytes[number], cuts_written),
            cuts_read=cuts_read,
            cuts_written=cuts_written,
            is_cut=is_cut,
        )
        return op.times * known.prices.own_s(op, work, known.mesh, self.level)

    def _edges(self) -> list[list[_Edge]]:
        """Return the edges at each operator; constants have none, because they are made wherever they are wanted."""
        known, graph = self.known, self.known.graph
        found: list[list[_Edge]] = [[] for _ in graph.ops]
        of_bytes: dict[float, Redistribution] = {}
        states: dict[tuple[int, bool, int, tuple[int, ...]], tuple[int, ...]] = {}

        def states_of(number: int, slot: int, *, is_maker: bool) -> tuple[int, ...]:
            rule, candidates = graph.ops[number].rule, self.candidates[number]
            key = (id(rule), is_maker, slot, candidates)
            if key not in states:
                dims = (rule.result_dims if is_maker else rule.operand_dims)[slot]
                states[key] = tuple(_state(dims, factor, PARTIAL if is_maker else REPLICATED) for factor in candidates)
            return states[key]

        for tensor, (maker, slot) in enumerate(graph.maker):
            if graph.ops[maker].primitive == CONSTANT:
                continue
            num_bytes = known.held_bytes[tensor]
            if num_bytes not in of_bytes:
                of_bytes[num_bytes] = known.prices.redistribution(num_bytes, known.mesh, self.level)
            written = states_of(maker, slot, is_maker=True)
            for use in graph.uses[tensor]:
                # An operator that reads its own result, as a state does, has one choice for both ends.
                if use.op == maker:
                    continue
                wanted = states_of(use.op, use.operand, is_maker=False)
                # Each end keeps the edge's index at the other end, to find it when a choice is made.
                ends = ((maker, use.op, written, True), (use.op, maker, wanted, False))
                backs = (len(found[use.op]), len(found[maker]))
                for (own, other, own_states, is_maker), back in zip(ends, backs, strict=True):
                    found[own].append(
                        _Edge(
                            other=other,
                            back=back,
                            is_maker=is_maker,
                            states=own_states,
                            price=of_bytes[num_bytes],
                            times=use.times,
                        )
                    )
        return found
