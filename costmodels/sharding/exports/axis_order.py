"""Order of the axes that partition one dim together, for frameworks that deal contiguous parts.

In a plan every axis partitions a dim by a digit of its own (costmodels/sharding/layouts.py), so that a slice moves
nothing and a gather moves only the gathered part. A framework deals contiguous parts instead: if `(a, b)` partition a
dim, a device holds part `i_a * n_b + i_b`. The two properties then hold only if the axes that stay on a dim come first,
in one order, before and after:

    slice   (a) -> (a, b)       each part is split in place; from (b) alone, parts would have to move first
    gather  (a, b) -> (a)       the parts of one group along b are neighbours; to (b) alone, they are not

Axes that move from one dim to another must be the last on both, in one order. Otherwise parts move before they are
exchanged.

`axis_orders` chooses an order for each factor of each operator and each dim of each tensor, so that few bytes violate
these conditions, and reports the violations. Results are correct in any order, but a framework then moves more data
than the plan says. A dim under a single axis leaves no choice.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from costmodels.sharding.graph import CONSTANT
from costmodels.sharding.layouts import Layout
from costmodels.sharding.plan import Plan

Order = tuple[int, ...]
"""Axes, major to minor."""

_MOST_SWEEPS = 10
"""Maximum number of sweeps over all orders (assumed; usually two or three sweeps change something)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AxisOrders:
    """Order of the axes on every dim of a plan.

    Attributes:
        plan: Plan that the orders belong to.
        of_factor: Order by (operator, factor), for factors that several axes serve.
        of_dim: Order by (tensor, dim), for dims that several axes partition.
        broken: Pairs (tensor, operator that writes or reads it) between which more data moves than the plan says.
    """

    plan: Plan
    of_factor: dict[tuple[int, int], Order]
    of_dim: dict[tuple[int, int], Order]
    broken: tuple[tuple[int, int], ...]

    def lying(self, tensor: int) -> tuple[Order, ...]:
        """Return the axes on each dim of a tensor in its own layout, without partial sums."""
        layout = self.plan.layout(tensor)
        rank = len(self.plan.graph.tensors[tensor].shape)
        return tuple(self.of_dim.get((tensor, dim), _axes_on(layout, dim)) for dim in range(rank))

    def read(self, op: int, operand: int) -> tuple[Order, ...]:
        """Return the axes on each dim of an operand as an operator reads it."""
        return self._at_op(op, self.plan.graph.ops[op].operands[operand], self.plan.wanted(op, operand))

    def written(self, op: int, result: int) -> tuple[Order, ...]:
        """Return the axes on each dim of a result as an operator writes it."""
        return self._at_op(op, self.plan.graph.ops[op].results[result], self.plan.written(op, result))

    def _at_op(self, op: int, tensor: int, layout: Layout) -> tuple[Order, ...]:
        rank = len(self.plan.graph.tensors[tensor].shape)
        return tuple(self._of_op(op, _axes_on(layout, dim)) for dim in range(rank))

    def _of_op(self, op: int, axes: Order) -> Order:
        return self.of_factor.get((op, int(self.plan.served[op, axes[0]])), axes) if len(axes) > 1 else axes


def _axes_on(layout: tuple[int, ...], dim: int) -> Order:
    return tuple(axis for axis, cut in enumerate(layout) if cut == dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    """Owner of an order: a factor of an operator, or a dim of a tensor in its own layout."""

    is_tensor: bool
    owner: int
    part: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wish:
    """Axes that should have one order on both sides of an edge.

    Attributes:
        common: Axes that both sides share.
        behind: For axes that move from one dim to another, the axes of each side that must come before them; None for
            axes that stay on their dim, which must come first.
    """

    common: frozenset[int]
    behind: tuple[frozenset[int], frozenset[int]] | None = None

    @property
    def turned(self) -> _Wish:
        """Wish with both sides exchanged."""
        return self if self.behind is None else _Wish(common=self.common, behind=(self.behind[1], self.behind[0]))

    def fits(self, one: Order, other: Order) -> bool:
        """Return whether the orders of both sides fulfil the wish."""
        if self.behind is None:
            # Axes that stay must be the first ones on both sides, in one order.
            count = len(self.common)
            return one[:count] == other[:count] and frozenset(one[:count]) == self.common
        # Axes that move must have one relative order, behind all other axes.
        moved = [[axis for axis in order if axis in self.common] for order in (one, other)]
        return moved[0] == moved[1] and all(
            order.index(each[0]) > max(map(order.index, behind), default=-1)
            for order, each, behind in zip((one, other), moved, self.behind, strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Edge:
    """A dim of a tensor at an operator, with the axes on both sides and the size of the tensor.

    If axes move from one dim to another, the sides are two different dims.
    """

    ends: tuple[_Node, _Node]
    axes: tuple[Order, Order]
    num_bytes: float
    where: tuple[int, int]
    wish: _Wish


def axis_orders(plan: Plan) -> AxisOrders:
    """Choose the orders of a plan by coordinate descent on the bytes that violate the conditions."""
    edges = list(_list_edges(plan))
    class_of, axes_of = _group_nodes(edges)
    # Add up the weights between pairs of groups, in both directions, so that a group sees all its neighbours.
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
                # `min` keeps the first of equal orders, so that the mesh's own order stays without a reason to change
                orders[node] = min(
                    itertools.permutations(axes), key=lambda order: _count_broken_bytes(order, links[node], orders)
                )
        if orders == before:
            break
    several = {node: orders[one] for node, one in class_of.items() if len(orders[one]) > 1}
    return AxisOrders(
        plan=plan,
        of_factor={(node.owner, node.part): order for node, order in several.items() if not node.is_tensor},
        of_dim={(node.owner, node.part): order for node, order in several.items() if node.is_tensor},
        broken=tuple(
            dict.fromkeys(
                edge.where
                for edge in edges
                if not edge.wish.fits(orders[class_of[edge.ends[0]]], orders[class_of[edge.ends[1]]])
            )
        ),
    )


def _count_broken_bytes(order: Order, links: dict[tuple[_Node, _Wish], float], orders: dict[_Node, Order]) -> float:
    """Return the bytes of tensors whose parts would move under this order."""
    return sum(num_bytes for (other, wish), num_bytes in links.items() if not wish.fits(order, orders[other]))


def _list_edges(plan: Plan) -> Iterator[_Edge]:
    """Yield every dim of every tensor at the operator that writes it, and at each operator that reads it."""
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
                    # Axes that stay on the same dim.
                    wish = _Wish(common=common)
                elif common and (len(common) > 1 or any(behind)):
                    # Axes that move between dims need a wish only if there is an order: several of them, or others
                    # before them.
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


def _group_nodes(edges: list[_Edge]) -> tuple[dict[_Node, _Node], dict[_Node, Order]]:
    """Group nodes that must share one order because the same axes partition both, by union-find.

    Returns:
        The representative of each node, and the axes of each representative.
    """
    first: dict[_Node, _Node] = {}
    axes_of: dict[_Node, Order] = {}

    def root(node: _Node) -> _Node:
        # Path halving keeps the trees of the union-find flat.
        while first[node] != node:
            first[node] = first[first[node]]
            node = first[node]
        return node

    for edge in edges:
        for end, axes in zip(edge.ends, edge.axes, strict=True):
            first.setdefault(end, end)
            axes_of[end] = axes
        # The same axes on both sides of a dim: one shared order costs nothing.
        if edge.axes[0] == edge.axes[1] and edge.wish.behind is None:
            one, other = map(root, edge.ends)
            first[other] = one
    class_of = {node: root(node) for node in first}
    return class_of, {node: axes_of[node] for node in dict.fromkeys(class_of.values())}
