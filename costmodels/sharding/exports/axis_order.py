"""In which order axes that cut one dim do so, where a framework deals contiguous parts.

In a plan every axis cuts by a digit of its own (costmodels/sharding/layouts.py), so that a slice moves nothing and a
gather only what it gathers. A framework deals contiguous parts instead: of a dim that `(a, b)` cut, a device has part
`i_a * n_b + i_b`. There both hold only where the axes that stay on a dim come first, in one order, before and after:

    slice   (a) -> (a, b)       each part is cut in place; from (b) alone, parts would have to move first
    gather  (a, b) -> (a)       the parts of one group along b are neighbours; to (b) alone, they are not

Axes that leave one dim for another must be the last on both, in one order, or parts move before they are exchanged.

The order is a choice: `axis_orders` makes one for each factor of each operator and each dim of each tensor, such that
few bytes lie where that condition is broken, and tells where it is. Results are right in any order: a framework moves
more there than the plan says. A dim that one axis cuts has nothing to choose.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from costmodels.sharding.graph import CONSTANT
from costmodels.sharding.plan import Plan

Order = tuple[int, ...]
"""Axes, major to minor."""

_MOST_SWEEPS = 10
"""How often all orders are looked at again (assumed; two or three change something)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AxisOrders:
    """The axes on every dim, major to minor.

    Attributes:
        plan: Of what.
        of_factor: By operator and factor, where several axes serve one.
        of_dim: By tensor and dim, where several cut one.
        broken: Tensors, and operators that write or read them, where parts move beyond what the plan says.
    """

    plan: Plan
    of_factor: dict[tuple[int, int], Order]
    of_dim: dict[tuple[int, int], Order]
    broken: tuple[tuple[int, int], ...]

    def lying(self, tensor: int) -> tuple[Order, ...]:
        """The axes on each dim of a tensor as it lies."""
        layout = self.plan.layout(tensor)
        rank = len(self.plan.graph.tensors[tensor].shape)
        return tuple(self.of_dim.get((tensor, dim), _axes_on(layout, dim)) for dim in range(rank))

    def read(self, op: int, operand: int) -> tuple[Order, ...]:
        """The same of an operand as an operator reads it."""
        layout = self.plan.wanted(op, operand)
        rank = len(self.plan.graph.tensors[self.plan.graph.ops[op].operands[operand]].shape)
        return tuple(self._of_op(op, _axes_on(layout, dim)) for dim in range(rank))

    def written(self, op: int, result: int) -> tuple[Order, ...]:
        """The same of a result as an operator leaves it."""
        layout = self.plan.written(op, result)
        rank = len(self.plan.graph.tensors[self.plan.graph.ops[op].results[result]].shape)
        return tuple(self._of_op(op, _axes_on(layout, dim)) for dim in range(rank))

    def _of_op(self, op: int, axes: Order) -> Order:
        return self.of_factor.get((op, int(self.plan.served[op, axes[0]])), axes) if len(axes) > 1 else axes


def _axes_on(layout: tuple[int, ...], dim: int) -> Order:
    return tuple(axis for axis, cut in enumerate(layout) if cut == dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    """Something with an order: a factor of an operator, or a dim of a tensor as it lies."""

    is_tensor: bool
    owner: int
    part: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wish:
    """Axes that shall stand in one order on both sides.

    Attributes:
        common: Which.
        behind: Where they leave one dim for another, the axes of each side behind which they shall stand; None where
            they stay, which is in front of all others.
    """

    common: frozenset[int]
    behind: tuple[frozenset[int], frozenset[int]] | None = None

    @property
    def turned(self) -> _Wish:
        """The same with the sides changed."""
        return self if self.behind is None else _Wish(common=self.common, behind=(self.behind[1], self.behind[0]))

    def fits(self, one: Order, other: Order) -> bool:
        """Whether they do."""
        if self.behind is None:
            count = len(self.common)
            return one[:count] == other[:count] and frozenset(one[:count]) == self.common
        moved = [[axis for axis in order if axis in self.common] for order in (one, other)]
        return moved[0] == moved[1] and all(
            order.index(each[0]) > max(map(order.index, behind), default=-1)
            for order, each, behind in zip((one, other), moved, self.behind, strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Edge:
    """A dim on the way between a tensor and an operator, with the axes on both sides and the bytes of the tensor.

    Two dims, where axes leave one for the other.
    """

    ends: tuple[_Node, _Node]
    axes: tuple[Order, Order]
    num_bytes: float
    where: tuple[int, int]
    wish: _Wish


def axis_orders(plan: Plan) -> AxisOrders:
    """The orders of a plan."""
    edges = list(_edges(plan))
    class_of, axes_of = _classes(edges)
    links: dict[_Node, dict[tuple[_Node, _Wish], float]] = defaultdict(lambda: defaultdict(float))
    for edge in edges:
        one, other = (class_of[end] for end in edge.ends)
        if edge.wish.common and one != other:
            links[one][other, edge.wish] += edge.num_bytes
            links[other][one, edge.wish.turned] += edge.num_bytes
    orders = dict(axes_of)
    for _ in range(_MOST_SWEEPS):
        before = dict(orders)
        for node, axes in axes_of.items():
            if len(axes) > 1 and links[node]:
                # the first of equals, so that the mesh's own order is kept where nothing speaks against it
                orders[node] = min(itertools.permutations(axes), key=lambda order: _broken(order, links[node], orders))
        if orders == before:
            break
    return AxisOrders(
        plan=plan,
        of_factor={
            (node.owner, node.part): orders[one]
            for node, one in class_of.items()
            if not node.is_tensor and len(orders[one]) > 1
        },
        of_dim={
            (node.owner, node.part): orders[one]
            for node, one in class_of.items()
            if node.is_tensor and len(orders[one]) > 1
        },
        broken=tuple(
            dict.fromkeys(
                edge.where
                for edge in edges
                if not edge.wish.fits(orders[class_of[edge.ends[0]]], orders[class_of[edge.ends[1]]])
            )
        ),
    )


def _broken(order: Order, links: dict[tuple[_Node, _Wish], float], orders: dict[_Node, Order]) -> float:
    """The bytes of tensors whose parts would move."""
    return sum(num_bytes for (other, wish), num_bytes in links.items() if not wish.fits(order, orders[other]))


def _edges(plan: Plan) -> Iterator[_Edge]:
    """Every dim of every tensor on its way from who writes it, and to everyone who reads it."""
    graph = plan.graph
    for tensor, array in enumerate(graph.tensors):
        maker, slot = graph.maker[tensor]
        lies = plan.layout(tensor)
        ends = [(maker, plan.written(maker, slot))]
        if graph.ops[maker].primitive != CONSTANT:
            ends += [(use.op, plan.wanted(use.op, use.operand)) for use in graph.uses[tensor]]
        rank = len(array.shape)
        for dim, other in itertools.product(range(rank), repeat=2):
            here = _axes_on(lies, dim)
            for op, layout in ends:
                there = _axes_on(layout, other)
                common = frozenset(here) & frozenset(there)
                behind = (
                    frozenset(axis for axis in here if layout[axis] < 0 or layout[axis] == dim),
                    frozenset(axis for axis in there if lies[axis] < 0 or lies[axis] == other),
                )
                if dim == other and here and there:
                    wish = _Wish(common=common)
                elif common and (len(common) > 1 or any(behind)):
                    wish = _Wish(common=common, behind=behind)
                else:
                    continue
                yield _Edge(
                    ends=(
                        _Node(is_tensor=True, owner=tensor, part=dim),
                        _Node(is_tensor=False, owner=op, part=int(plan.served[op, there[0]])),
                    ),
                    axes=(here, there),
                    num_bytes=array.num_bytes,
                    where=(tensor, op),
                    wish=wish,
                )


def _classes(edges: list[_Edge]) -> tuple[dict[_Node, _Node], dict[_Node, Order]]:
    """What must have one order, since the same axes cut it on both sides: each one's first, and the axes of those."""
    first: dict[_Node, _Node] = {}
    axes_of: dict[_Node, Order] = {}

    def root(node: _Node) -> _Node:
        while first[node] != node:
            first[node] = first[first[node]]
            node = first[node]
        return node

    for edge in edges:
        for end, axes in zip(edge.ends, edge.axes, strict=True):
            first.setdefault(end, end)
            axes_of[end] = axes
        if edge.axes[0] == edge.axes[1] and edge.wish.behind is None:
            one, other = map(root, edge.ends)
            first[other] = one
    class_of = {node: root(node) for node in first}
    return class_of, {node: axes_of[node] for node in dict.fromkeys(class_of.values())}
