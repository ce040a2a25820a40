"""D-Rec shards a graph by halving, one level after the other (Wang et al., Euro-Par 2021; ManuMatic 2.4 and 2.5).

There is a level for every prime factor of every mesh axis, so ceil(log2 d) of them where all are 2: a level cuts what
the levels before have left into so many parts again. Inside a level every operator is visited once and gets, for good,
the factor that the level serves there, or none. It takes what costs least: its own compute and partial sums, and the
redistribution to and from neighbours that this level has visited already. What is not known yet costs nothing.

The order of the visits decides how good that is. `price` is the paper's: by decreasing compromise price, what it costs
an operator beyond its best to avoid every redistribution, infinite where it can't; it is known again after every visit.
Equal prices (at the begin all are zero) go to operators with visited neighbours, then to the heaviest. `weight` goes by
what an operator costs at most, `topological` and `reverse` as the graph runs.

A partial sum is scattered where it stands, which is its operator's own cost, and gathered where it is wanted whole,
which is the edge's. Not in the paper's objective, which holds communication alone: compute. Without it the best plan
replicates everything and sends nothing. What things cost is an argument: seconds of a roofline and of the links, or
other prices (`AbstractPrices`), such as the volumes of `symbolic_prices`; a name that ends in _s is then in their unit.

Letters: o operators, e edges (one per use of a tensor), c candidates of an operator, at most C.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from costmodels.operators.layer_operators import OpKind
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import CONSTANT, Graph, Op
from costmodels.sharding.layouts import PARTIAL, REPLICATED
from costmodels.sharding.plan import NONE, Plan, settled

Order = Literal["price", "weight", "topological", "reverse"]
ORDERS: tuple[Order, ...] = get_args(Order)

Closed = Callable[[int, int, Sequence[int]], tuple[int, ...] | None]
"""Of an operator, a level and the parts that its factors are cut into: the only candidates that it may take there, of
those that divide; None for all."""

Extra = Callable[[int, int, Sequence[int], int], float]
"""Further seconds of an operator at a level, with the parts that its factors are cut into, for a candidate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One cut of everything.

    Attributes:
        axis: The axis of the refined mesh.
        of: The axis of the mesh that it is a part of.
        ways: Into how many parts.
    """

    axis: int
    of: int
    ways: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a device has to do for one execution of an operator, if a level serves a factor there, or none.

    Attributes:
        flop: Arithmetic.
        read_bytes: Of each operand.
        written_bytes: Of each result.
        cuts_read: Whether the level cuts each operand.
        cuts_written: Whether it cuts each result; one that it does not is a partial sum where a factor is served.
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
    """What it costs to bring a tensor from one layout to another along a level.

    Attributes:
        gather_s: Cut parts to whole ones.
        exchange_s: To another dim cut.
        sum_s: Partial sums to whole ones, beyond what their operator has paid for them.
        scatter_s: Partial sums to cut parts, beyond that.
        slice_s: Whole ones to cut parts.
    """

    gather_s: float
    exchange_s: float
    sum_s: float
    scatter_s: float = 0.0
    slice_s: float = 0.0


class AbstractPrices(ABC):
    """What D-Rec counts: an operator by itself, and a tensor on its way from one operator to the next."""

    @abstractmethod
    def may_replicate(self, op: Op) -> bool:
        """Whether a level may leave an operator whole that it could cut."""

    @abstractmethod
    def own_s(self, op: Op, work: Work, mesh: DeviceMesh, level: Level) -> float:
        """C_local of one execution."""

    @abstractmethod
    def redistribution(self, num_bytes: float, mesh: DeviceMesh, level: Level) -> Redistribution:
        """C_redist of one tensor, of which a device holds so much before the level."""


class Seconds(AbstractPrices):
    """Time on the slowest device and on the links that the level crosses, as in `costmodels.sharding.plan.cost_of`."""

    def __init__(self, graph: Graph, mesh: DeviceMesh) -> None:
        devices = mesh.cluster.devices
        self.byte_s = 1.0 / min(device.memory_bandwidth_bytes_per_s for device in devices)
        self.flop_s = {
            precision: 1.0 / min(device.peak_flop_per_s(precision) for device in devices)
            for precision in {op.precision for op in graph.ops if op.precision}
        }

    def may_replicate(self, op: Op) -> bool:  # noqa: ARG002 # of the contract
        """Always: compute has its price."""
        return True

    def own_s(self, op: Op, work: Work, mesh: DeviceMesh, level: Level) -> float:
        """Compute, and scattering partial sums."""
        moved_bytes = sum(work.written_bytes) + sum(work.read_bytes)
        own_s = max(work.flop * self.flop_s[op.precision] if op.precision else 0.0, moved_bytes * self.byte_s)
        if work.is_cut:
            for num_bytes, is_cut in zip(work.written_bytes, work.cuts_written, strict=True):
                if not is_cut:
                    own_s += mesh.seconds(OpKind.REDUCE_SCATTER, num_bytes, (level.axis,))
        return own_s

    def redistribution(self, num_bytes: float, mesh: DeviceMesh, level: Level) -> Redistribution:
        """Collectives of so many bytes."""
        axis = (level.axis,)
        scatter_s = mesh.seconds(OpKind.REDUCE_SCATTER, num_bytes, axis)
        return Redistribution(
            gather_s=mesh.seconds(OpKind.ALL_GATHER, num_bytes, axis),
            exchange_s=mesh.seconds(OpKind.ALL_TO_ALL, num_bytes / level.ways, axis),
            sum_s=max(mesh.seconds(OpKind.ALL_REDUCE, num_bytes, axis) - scatter_s, 0.0),
        )


def refined(mesh: DeviceMesh) -> tuple[DeviceMesh, tuple[Level, ...]]:
    """The mesh with an axis for every prime factor of each of its axes, and the levels that these are.

    The slowest axis comes first: what is cut there talks over the slowest links.
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
    """The mesh itself, each axis of which is one level: for who can't cut one tensor dim by a part of an axis."""
    levels = [Level(axis=axis, of=axis, ways=size) for axis, size in enumerate(mesh.sizes) if size > 1]
    return mesh, tuple(levels)


def _prime_factors(number: int) -> list[int]:
    """In descending order."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1]


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
    """One plan of the whole graph.

    Args:
        graph: What to shard.
        mesh: Over what; as `refined` or `whole` gives it, with its levels.
        levels: In the order in which they are cut.
        order: Of the visits.
        closed: Restricts operators; these are visited first.
        extra: Further costs.
        prices: What is counted; None is `Seconds`.
    """
    known = _Known(graph, mesh, prices)
    for number, level in enumerate(levels):
        cut = _Cut(known, level)
        if closed is not None:
            cut.close(closed, number)
        if extra is not None:
            cut.charge(extra, number)
        known.take_in(level, cut.visited(order))
    return Plan(graph=graph, mesh=mesh, served=known.served)


class _Known:
    """What is known of a graph between the levels.

    Attributes:
        served: The factor of each operator that each axis serves [o, axes].
        ways: Parts that each factor of each operator is cut into [o][factors].
        held_bytes: What a device holds of each tensor [t].
        read_bytes: What a device reads of each operand [o][operands].
        written_bytes: What it writes of each result [o][results].
        flop: What is left of the operators for a device [o].
        prices: What is counted.
    """

    def __init__(self, graph: Graph, mesh: DeviceMesh, prices: AbstractPrices | None = None) -> None:
        self.graph, self.mesh = graph, mesh
        self.prices = Seconds(graph, mesh) if prices is None else prices
        self.served = np.full((len(graph.ops), len(mesh.sizes)), NONE, dtype=np.int64)
        self.ways = [[1] * len(op.rule.factors) for op in graph.ops]
        self.held_bytes = [tensor.num_bytes for tensor in graph.tensors]
        self.read_bytes = [[self.held_bytes[tensor] for tensor in op.operands] for op in graph.ops]
        self.written_bytes = [[self.held_bytes[tensor] for tensor in op.results] for op in graph.ops]
        self.flop = [op.flop for op in graph.ops]

    def take_in(self, level: Level, chosen: Sequence[int]) -> None:
        """What a level has decided."""
        for number, (op, factor) in enumerate(zip(self.graph.ops, chosen, strict=True)):
            if factor == NONE:
                continue
            self.served[number, level.axis] = factor
            self.ways[number][factor] *= level.ways
            self.flop[number] /= level.ways
            for parts, dims in (
                (self.read_bytes[number], op.rule.operand_dims),
                (self.written_bytes[number], op.rule.result_dims),
            ):
                for slot, of_factor in enumerate(dims):
                    if of_factor[factor] is not None:
                        parts[slot] /= level.ways
        for tensor, (maker, slot) in enumerate(self.graph.maker):
            targets = [
                (_state(self.graph.ops[use.op].rule.operand_dims[use.operand], chosen[use.op], REPLICATED),)
                for use in self.graph.uses[tensor]
            ]
            written = _state(self.graph.ops[maker].rule.result_dims[slot], chosen[maker], PARTIAL)
            if settled((written,), targets)[0] >= 0:
                self.held_bytes[tensor] /= level.ways


def _state(dims: Sequence[int | None], factor: int, otherwise: int) -> int:
    """What becomes of a tensor along an axis that serves a factor: the dim that it cuts, or `otherwise` without one."""
    if factor == NONE:
        return REPLICATED
    dim = dims[factor]
    return otherwise if dim is None else dim


@dataclass(frozen=True, kw_only=True, slots=True)
class _Edge:
    """A use of a tensor, seen from one of its ends.

    Attributes:
        other: The operator at the other end.
        back: The number of the same edge there.
        is_maker: Whether this end writes the tensor.
        states: What each candidate of this end makes of the tensor.
        price: What redistributing it once costs.
        times: How often that is.
    """

    other: int
    back: int
    is_maker: bool
    states: Sequence[int]
    price: Redistribution
    times: int

    def cost_s(self, own: int, others: int) -> float:
        """What moves between a state at this end and one at the other."""
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
        candidates: The factors that each operator may take, NONE first [o][c].
        cost_s: What each costs with all neighbours that were visited [o][c].
        conflicts: How many redistributions each has with these [o][c].
    """

    def __init__(self, known: _Known, level: Level) -> None:
        self.known, self.level = known, level
        self.candidates: list[tuple[int, ...]] = []
        self.cost_s: list[list[float]] = []
        self.is_closed = [False] * len(known.graph.ops)
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
                candidates = (NONE, *cuttable) if is_open else tuple(cuttable)
                alike[key] = (candidates, [self._own_s(number, factor) for factor in candidates])
            candidates, costs_s = alike[key]
            self.candidates.append(candidates)
            self.cost_s.append(list(costs_s))
        self.conflicts = [[0] * len(candidates) for candidates in self.candidates]

    def close(self, closed: Closed, level: int) -> None:
        """Restricts operators to some of their candidates; these go first."""
        for number, candidates in enumerate(self.candidates):
            if (only := closed(number, level, self.known.ways[number])) is not None:
                kept = [position for position, factor in enumerate(candidates) if factor in only]
                assert kept, f"{self.known.graph.ops[number].name} is restricted to what it can't take"
                self.candidates[number] = tuple(candidates[position] for position in kept)
                self.cost_s[number] = [self.cost_s[number][position] for position in kept]
                self.conflicts[number] = [0] * len(kept)
                self.is_closed[number] = True

    def charge(self, extra: Extra, level: int) -> None:
        """Adds further costs."""
        for number, candidates in enumerate(self.candidates):
            for position, factor in enumerate(candidates):
                self.cost_s[number][position] += extra(number, level, self.known.ways[number], factor)

    def visited(self, order: Order) -> list[int]:
        """The factor of each operator, after all of them were visited in that order."""
        edges = self._edges()
        chosen: list[int | None] = [None] * len(self.candidates)
        for number in self._order(order, edges, chosen):
            costs_s = self.cost_s[number]
            position = costs_s.index(min(costs_s))
            chosen[number] = position
            for edge in edges[number]:
                if chosen[edge.other] is None:
                    self._tell(edges[edge.other][edge.back], edge.other, edge.states[position])
        return [
            candidates[position]
            for candidates, position in zip(self.candidates, chosen, strict=True)
            if position is not None
        ]

    def _tell(self, edge: _Edge, number: int, others: int) -> None:
        """Lets an operator know what a neighbour has made of a tensor between them."""
        costs_s, conflicts = self.cost_s[number], self.conflicts[number]
        for position, own in enumerate(edge.states):
            cost_s = edge.cost_s(own, others)
            if cost_s > 0:
                costs_s[position] += cost_s
                conflicts[position] += 1

    def _order(self, order: Order, edges: Sequence[Sequence[_Edge]], chosen: Sequence[int | None]) -> Iterator[int]:
        """The operators, restricted ones first; by price it depends on what was chosen before."""
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
        """The compromise price (ManuMatic section 2.4)."""
        costs_s = self.cost_s[number]
        compatible = [
            cost_s for cost_s, conflicts in zip(costs_s, self.conflicts[number], strict=True) if not conflicts
        ]
        return min(compatible) - min(costs_s) if compatible else math.inf

    def _cuttable(self, number: int) -> list[int]:
        """The factors that this level can cut."""
        rule, ways = self.known.graph.ops[number].rule, self.known.ways[number]
        return [factor for factor in rule.cuttable if rule.factors[factor].size % (ways[factor] * self.level.ways) == 0]

    def _own_s(self, number: int, factor: int) -> float:
        """C_local of all executions."""
        known, ways = self.known, self.level.ways
        op = known.graph.ops[number]
        if op.is_free:
            return 0.0
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
        """The uses of tensors, at both of their ends; constants are made wherever they are wanted."""
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
                if use.op == maker:
                    continue
                wanted = states_of(use.op, use.operand, is_maker=False)
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
