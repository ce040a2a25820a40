"""Strategy assignment: one strategy for each node, with costs of nodes and of edges, under one memory limit.

Every node holds memory during an interval of time, as much as its strategy says. At no time may the nodes together hold
more than the limit. The goal is the least sum of the costs of nodes and edges.

Source: the ASPLOS 2025 contest on intra-operator parallelism (Moffitt and Fegade, 2025), whose terms are used here.

Letters: `n` nodes, `m` edges, `S` strategies of all nodes together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hardware.arrays import FloatArray, IntArray
from hardware.io.errors import ConfigError
from tuner.planners.sharding.messages import starts_of

FORBIDDEN = 1e17
"""Cost from which a choice counts as forbidden; the contest's files write 1e18."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AssignmentProblem:
    """Nodes, edges and the memory limit of a strategy assignment; its arrays are read-only.

    Attributes:
        name: Name of the problem in its file.
        intervals: Begin and end of the time when each node holds memory [n, 2]; the end is excluded.
        starts: Index of each node's first strategy among all strategies [n + 1].
        costs: Cost of each strategy [S].
        usages: Memory that each strategy holds [S].
        edges: Two nodes of each edge [m, 2]; two nodes may share several edges.
        edge_starts: Index of each edge's first cost among those of all edges [m + 1].
        edge_costs: Costs of all edges, row by row: a row for each strategy of the edge's first node.
        limit: Most memory that nodes may hold at one time, in the unit of the usages.
    """

    name: str
    intervals: IntArray
    starts: IntArray
    costs: FloatArray
    usages: FloatArray
    edges: IntArray
    edge_starts: IntArray
    edge_costs: FloatArray
    limit: float

    def __post_init__(self) -> None:
        """Check the arrays and make them read-only.

        Raises:
            ConfigError: the arrays do not fit each other.
        """
        sizes = np.diff(self.starts)
        _check(np.asarray(sizes > 0), "must have a strategy at least", "nodes.costs")
        ends = self.edges
        _check(
            np.asarray(((ends >= 0) & (ends < len(sizes))).all(axis=1)),
            "must name two of the nodes",
            "edges.nodes",
            ends,
        )
        _check(np.asarray(ends[:, 0] != ends[:, 1]), "must join two different nodes", "edges.nodes", ends)
        # An edge needs a cost for each pair of its ends' strategies.
        wrong = np.diff(self.edge_starts) != sizes[ends[:, 0]] * sizes[ends[:, 1]]
        if wrong.any():
            edge = int(wrong.argmax())
            first, second = (int(sizes[end]) for end in ends[edge])
            raise ConfigError(
                f"must hold a cost for each of {first} x {second} pairs of strategies",
                key=f"edges.costs.{edge}",
                nearest=f"it holds {int(self.edge_starts[edge + 1] - self.edge_starts[edge])}",
            )
        for array in (self.intervals, self.starts, self.costs, self.usages, ends, self.edge_starts, self.edge_costs):
            array.flags.writeable = False

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.intervals)

    def cost_of(self, strategies: ArrayLike) -> float:
        """Return the sum of the costs of all nodes and edges.

        Args:
            strategies: Strategy of each node [n].
        """
        own, between = self._costs_of(strategies)
        return float(own.sum() + between.sum())

    def is_allowed(self, strategies: ArrayLike) -> bool:
        """Return whether nothing forbidden is chosen.

        Args:
            strategies: Strategy of each node [n].
        """
        own, between = self._costs_of(strategies)
        return bool((own < FORBIDDEN).all() and (between < FORBIDDEN).all())

    def peak_usage(self, strategies: ArrayLike) -> float:
        """Return the most memory that nodes hold at one time.

        Args:
            strategies: Strategy of each node [n].
        """
        held = self.usages[self.starts[:-1] + np.asarray(strategies, dtype=np.int64)]
        lasts = self.intervals[:, 1] > self.intervals[:, 0]
        times = np.concatenate([self.intervals[lasts, 1], self.intervals[lasts, 0]])
        changes = np.concatenate([-held[lasts], held[lasts]])
        order = np.argsort(times, kind="stable")  # what ends comes before what begins at the same time
        return float(np.cumsum(changes[order]).max(initial=0.0))

    def is_feasible(self, strategies: ArrayLike) -> bool:
        """Return whether the memory suffices at all times and nothing forbidden is chosen.

        Args:
            strategies: Strategy of each node [n].
        """
        return self.peak_usage(strategies) <= self.limit and self.is_allowed(strategies)

    def _costs_of(self, strategies: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Return the costs of all nodes [n] and of all edges [m]."""
        chosen = np.asarray(strategies, dtype=np.int64)
        sizes = np.diff(self.starts)
        first, second = self.edges[:, 0], self.edges[:, 1]
        # Each edge's table is stored row by row.
        entries = self.edge_starts[:-1] + chosen[first] * sizes[second] + chosen[second]
        return self.costs[self.starts[:-1] + chosen], self.edge_costs[entries]


def problem_of(
    intervals: Sequence[Sequence[int]],
    costs: Sequence[ArrayLike],
    usages: Sequence[ArrayLike],
    edges: Sequence[Sequence[int]],
    edge_costs: Sequence[ArrayLike],
    limit: float,
    *,
    name: str = "assignment",
) -> AssignmentProblem:
    """Build a problem from lists, with arguments as in `AssignmentProblem`.

    Raises:
        ConfigError: the lists do not fit each other.
    """
    flat = partial(np.ravel, order="C")
    # Ragged lists are stored flat, with the start of each node's or edge's part.
    by_node = [np.asarray(own, dtype=np.float64) for own in costs]
    held_by_node = [np.asarray(own, dtype=np.float64) for own in usages]
    by_edge = [flat(np.asarray(own, dtype=np.float64)) for own in edge_costs]
    for node, (own, held) in enumerate(zip(by_node, held_by_node, strict=True)):
        if len(own) != len(held):
            raise ConfigError(f"must hold as many as nodes.costs.{node}: {len(own)}", key=f"nodes.usages.{node}")
    return AssignmentProblem(
        name=name,
        intervals=np.array(intervals, dtype=np.int64).reshape(-1, 2),
        starts=starts_of([len(own) for own in by_node]),
        costs=np.concatenate([*by_node, np.zeros(0)]),
        usages=np.concatenate([*held_by_node, np.zeros(0)]),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        edge_starts=starts_of([len(own) for own in by_edge]),
        edge_costs=np.concatenate([*by_edge, np.zeros(0)]),
        limit=limit,
    )


def is_close(cost: float, bound: float, gap: float) -> bool:
    """Return whether a cost is above a bound by at most a fraction of the cost.

    Args:
        cost: Cost of the best assignment; inf while none is known.
        bound: Lower bound of all assignments.
        gap: Accepted fraction of the cost.
    """
    return math.isfinite(cost) and cost - bound <= gap * abs(cost)


def _check(holds: NDArray[np.bool_], rule: str, key: str, values: IntArray | None = None) -> None:
    """Raise an error for the first entry for which a rule does not hold.

    Raises:
        ConfigError: the rule does not hold everywhere.
    """
    if not holds.all():
        place = int(holds.argmin())
        raise ConfigError(rule, key=f"{key}.{place}", value=None if values is None else values[place].tolist())
