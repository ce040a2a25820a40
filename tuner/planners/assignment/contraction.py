"""Contraction to a smaller problem with the same solutions.

Strategies without an allowed partner at a neighbour are dropped. A node with one strategy left is folded into its
neighbours' costs, and so is an edge whose costs are a sum of one part for each end. Where an edge allows only one
partner for each strategy of a node, the partner has no choice of its own: it joins the node, whose states then
determine the cost and memory of both.

The remaining nodes are variables with states. Each state stands for one strategy of every node that joined.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from hardware.arrays import FloatArray, IntArray
from tuner.planners.assignment.problem import FORBIDDEN, AssignmentProblem
from tuner.planners.sharding.messages import Pair, starts_of

_MOST_ADDED = 200_000
"""Most entries by which the edges of a node may grow when another joins it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Core:
    """Decisions that remain after contraction.

    Letters: `v` variables, `X` states of all variables together.

    Attributes:
        starts: Index of each variable's first state among all states [v + 1].
        costs: Cost of each state [X].
        edges: Costs of two variables' states, by their numbers in ascending order; inf where forbidden.
        constant: Cost of every assignment beside these.
        held: Memory that each node holds in each state; columns of nodes without a choice are empty [X, n].
        base: Memory of the nodes without a choice [n].
        variable_of: Variable that each node joined, -1 if it has no choice [n].
        strategies: Strategy of each node by the states of its variable; one entry if it has no choice.
    """

    starts: IntArray
    costs: FloatArray
    edges: dict[Pair, FloatArray]
    constant: float
    held: csr_array
    base: FloatArray
    variable_of: IntArray
    strategies: tuple[IntArray, ...]

    def lift(self, states: IntArray) -> IntArray:
        """Return the strategy of each node [n].

        Args:
            states: State of each variable [v].
        """
        picked = np.append(states, 0)[self.variable_of]
        return np.array(
            [own[state] for own, state in zip(self.strategies, picked.tolist(), strict=True)], dtype=np.int64
        )


class _Contraction:
    """Graph of nodes and edges while it shrinks.

    Attributes:
        problem: Problem to contract.
        sizes: Number of strategies of each node.
        costs: Cost of each state that a node still has.
        labels: Strategy that each of these states stands for.
        beside: Neighbours of each node, with the costs of both nodes' states.
        joined: Root, node that joined it, and that node's strategy by the root's strategies.
        has_joined: Whether each node has joined another.
        is_possible: Whether any assignment without forbidden choices may exist.
        queue: Edges to examine.
    """

    def __init__(self, problem: AssignmentProblem) -> None:
        """Begin with the whole problem."""
        num_nodes = problem.num_nodes
        starts = problem.starts.tolist()
        costs = np.where(problem.costs >= FORBIDDEN, np.inf, problem.costs)
        self.problem = problem
        self.sizes = [end - start for start, end in itertools.pairwise(starts)]
        self.costs = [costs[start:end] for start, end in itertools.pairwise(starts)]
        self.labels = [np.arange(size) for size in self.sizes]
        self.beside: list[dict[int, FloatArray]] = [{} for _ in range(num_nodes)]
        self.joined: list[tuple[int, int, IntArray]] = []
        self.has_joined = [False] * num_nodes
        self.is_possible = True
        self.queue: deque[Pair] = deque()
        edge_costs = np.where(problem.edge_costs >= FORBIDDEN, np.inf, problem.edge_costs)
        edge_starts = problem.edge_starts.tolist()
        for (first, second), start, end in zip(problem.edges.tolist(), edge_starts, edge_starts[1:], strict=False):
            self.add(first, second, edge_costs[start:end].reshape(self.sizes[first], self.sizes[second]))

    def add(self, first: int, second: int, table: FloatArray) -> None:
        """Add costs of two nodes' states."""
        there = self.beside[first].get(second)
        if there is not None:
            table = there + table
        self.beside[first][second] = table
        self.beside[second][first] = table.T
        self.queue.append((first, second))

    def shrink(self) -> None:
        """Drop, fold and join until nothing changes, or no choice is possible."""
        for node, costs in enumerate(self.costs):
            self.keep(node, np.isfinite(costs))
        while self.queue and self.is_possible:
            first, second = self.queue.popleft()
            # An edge may have been removed or replaced since it was put in the queue.
            table = self.beside[first].get(second)
            if table is None:
                continue
            allowed = np.isfinite(table)
            if not allowed.all():
                # A state without any allowed partner is dropped. The edge is then examined again.
                rows, columns = np.asarray(allowed.any(axis=1)), np.asarray(allowed.any(axis=0))
                if not (rows.all() and columns.all()):
                    self.keep(first, rows)
                    self.keep(second, columns)
                    self.queue.append((first, second))
                    continue
                self.join(first, second, table, allowed)
            else:
                self.fold(first, second, table)

    def keep(self, node: int, kept: NDArray[np.bool_]) -> None:
        """Keep some states of a node and drop all others."""
        if kept.all():
            return
        if not kept.any():
            self.is_possible = False
            return
        self.costs[node] = self.costs[node][kept]
        self.labels[node] = self.labels[node][kept]
        for other, table in self.beside[node].items():
            table = table[kept]  # noqa: PLW2901 # the rows that are left of it
            self.beside[node][other] = table
            self.beside[other][node] = table.T
            self.queue.append((node, other))

    def take(self, first: int, second: int) -> FloatArray:
        """Remove an edge and return its costs."""
        del self.beside[second][first]
        return self.beside[first].pop(second)

    def fold(self, first: int, second: int, table: FloatArray) -> None:
        """Remove an edge whose costs are a sum of a part for each end."""
        # A table is a sum of two parts if all its rows differ by a constant from the first.
        rest = table - table[:1]
        if (rest == rest[:, :1]).all():
            self.take(first, second)
            self.costs[first] = self.costs[first] + table[:, 0]
            self.costs[second] = self.costs[second] + (table[0] - table[0, 0])

    def join(self, first: int, second: int, table: FloatArray, allowed: NDArray[np.bool_]) -> None:
        """Join one node to the other if that leaves it no choice."""
        by_first, by_second = bool((allowed.sum(axis=1) == 1).all()), bool((allowed.sum(axis=0) == 1).all())
        if by_first and by_second:
            by_first = len(self.beside[second]) <= len(self.beside[first])
        if by_first:
            self.absorb(first, second, table, allowed.argmax(axis=1))
        elif by_second:
            self.absorb(second, first, table.T, allowed.argmax(axis=0))

    def absorb(self, root: int, node: int, table: FloatArray, state_of: IntArray) -> None:
        """Join a node to a root, whose states determine the node's."""
        # The node's edges get a row for each state of the root, so that they grow where the root has more states.
        growth = len(state_of) - len(self.labels[node])
        if growth * sum(len(self.labels[other]) for other in self.beside[node]) > _MOST_ADDED:
            return
        self.take(root, node)
        self.costs[root] = self.costs[root] + self.costs[node][state_of] + table[np.arange(len(state_of)), state_of]
        strategies = np.full(self.sizes[root], -1)
        strategies[self.labels[root]] = self.labels[node][state_of]
        self.joined.append((root, node, strategies))
        self.has_joined[node] = True
        for other in list(self.beside[node]):
            self.add(root, other, self.take(node, other)[state_of])

    def core(self) -> Core:
        """Return the remaining variables, states and edges."""
        problem = self.problem
        num_nodes = problem.num_nodes
        root_of = list(range(num_nodes))
        strategies: list[IntArray] = list(self.labels)
        # A root may itself have joined another later. Going backwards, its own root is known already.
        for root, node, by_strategy in reversed(self.joined):
            root_of[node] = root_of[root]
            strategies[node] = by_strategy[strategies[root]]
        variables = [node for node in range(num_nodes) if not self.has_joined[node] and len(self.labels[node]) > 1]
        number = np.full(num_nodes, -1)
        number[variables] = np.arange(len(variables))
        starts = starts_of([len(self.labels[node]) for node in variables])
        variable_of = number[np.array(root_of, dtype=np.int64)]
        usages = [problem.usages[start + own] for start, own in zip(problem.starts.tolist(), strategies, strict=False)]
        free = np.flatnonzero(variable_of >= 0)
        rows = [np.arange(starts[var], starts[var + 1]) for var in variable_of[free]]
        columns = np.repeat(free, [len(own) for own in rows])
        # One row for each state, with an entry for each node of the state's variable.
        held = csr_array(
            (
                np.concatenate([*(usages[node] for node in free), np.zeros(0)]),
                (np.concatenate([*rows, np.zeros(0, dtype=np.int64)]), columns),
            ),
            shape=(int(starts[-1]), num_nodes),
        )
        base = np.array([own[0] if var < 0 else 0.0 for own, var in zip(usages, variable_of, strict=True)])
        # Nodes with a single state cost the same in every assignment.
        singles = (node for node in range(num_nodes) if not self.has_joined[node] and len(self.labels[node]) == 1)
        return Core(
            starts=starts,
            costs=np.concatenate([*(self.costs[node] for node in variables), np.zeros(0)]),
            edges={
                (int(number[node]), int(number[other])): np.ascontiguousarray(table)
                for node in variables
                for other, table in self.beside[node].items()
                if node < other
            },
            constant=float(sum(self.costs[node][0] for node in singles)),
            held=held,
            base=base,
            variable_of=variable_of,
            strategies=tuple(strategies),
        )


def contract(problem: AssignmentProblem) -> Core | None:
    """Contract a problem; None if every assignment makes a forbidden choice.

    A problem whose memory cannot suffice is contracted like any other.
    """
    contraction = _Contraction(problem)
    contraction.shrink()
    return contraction.core() if contraction.is_possible else None
