"""The assignment problem: one strategy for each node, a cost for each pair of neighbours, and one memory limit.

Every node holds memory during an interval of time, as much as its strategy says; at no time may the nodes together
hold more than the limit. The least sum of the costs of nodes and edges is sought.

Source: the ASPLOS 2025 contest on intra-operator parallelism (Moffitt and Fegade, 2025), whose words are used here.

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

FORBIDDEN = 1e17
"""A cost from here on says that a choice is not allowed; the contest's files write 1e18."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AssignmentProblem:
    """What is to be assigned; none of the arrays can be written to.

    Attributes:
        name: As the file tells it.
        intervals: From when and until when each node holds its memory [n, 2]; the end is excluded.
        starts: Where each node's strategies start among all [n + 1].
        costs: Of each strategy [S].
        usages: What each strategy holds [S].
        edges: The two nodes of each edge [m, 2]; two nodes may share several.
        edge_starts: Where each edge's costs start among those of all [m + 1].
        edge_costs: Of each edge, row by row: a row for each strategy of its first node.
        limit: The most that nodes may hold at one time, in the unit of the usages.
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
        """Locks the arrays.

        Raises:
            ConfigError: If they do not fit each other.
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
        """Nodes."""
        return len(self.intervals)

    def cost_of(self, strategies: ArrayLike) -> float:
        """The sum of the costs of all nodes and edges.

        Args:
            strategies: Of each node [n].
        """
        own, between = self._chosen(strategies)
        return float(own.sum() + between.sum())

    def is_allowed(self, strategies: ArrayLike) -> bool:
        """Whether nothing forbidden is chosen.

        Args:
            strategies: Of each node [n].
        """
        own, between = self._chosen(strategies)
        return bool((own < FORBIDDEN).all() and (between < FORBIDDEN).all())

    def peak_usage(self, strategies: ArrayLike) -> float:
        """The most that nodes hold at one time.

        Args:
            strategies: Of each node [n].
        """
        held = self.usages[self.starts[:-1] + np.asarray(strategies, dtype=np.int64)]
        lasts = self.intervals[:, 1] > self.intervals[:, 0]
        times = np.concatenate([self.intervals[lasts, 1], self.intervals[lasts, 0]])
        changes = np.concatenate([-held[lasts], held[lasts]])
        order = np.argsort(times, kind="stable")  # what ends comes before what begins at the same time
        return float(np.cumsum(changes[order]).max(initial=0.0))

    def is_feasible(self, strategies: ArrayLike) -> bool:
        """Whether memory suffices at all times and nothing forbidden is chosen.

        Args:
            strategies: Of each node [n].
        """
        return self.peak_usage(strategies) <= self.limit and self.is_allowed(strategies)

    def _chosen(self, strategies: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """The costs of all nodes [n] and of all edges [m]."""
        chosen = np.asarray(strategies, dtype=np.int64)
        sizes = np.diff(self.starts)
        first, second = self.edges[:, 0], self.edges[:, 1]
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
    """A problem from its lists: see `AssignmentProblem` for what they say.

    Raises:
        ConfigError: If they do not fit each other.
    """
    flat = partial(np.ravel, order="C")
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
    """Whether a cost that is known stands at most a share of it above a bound.

    Args:
        cost: inf while none is known.
        bound: No assignment costs less.
        gap: The share.
    """
    return math.isfinite(cost) and cost - bound <= gap * abs(cost)


def starts_of(sizes: ArrayLike) -> IntArray:
    """Where each part starts in a row of parts of these sizes, and where the last one ends [parts + 1]."""
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))]).astype(np.int64)


def _check(holds: NDArray[np.bool_], rule: str, key: str, values: IntArray | None = None) -> None:
    if not holds.all():
        place = int(holds.argmin())
        raise ConfigError(rule, key=f"{key}.{place}", value=None if values is None else values[place].tolist())
