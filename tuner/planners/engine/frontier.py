"""Open nodes of a search, ordered by their bounds, without nodes that are dominated by another one."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

Node = TypeVar("Node")


class Merit(NamedTuple):
    """Key and values that decide whether one node dominates another.

    Attributes:
        key: Key of comparable nodes: the same decisions can follow nodes with equal keys.
        values: Numbers of which smaller is better. A node that is no larger in any is completed at no higher cost.
    """

    key: Hashable
    values: tuple[float, ...]


class OpenNode(NamedTuple, Generic[Node]):
    """Open node in the order of the queue.

    Attributes:
        bound: Lower bound of the node's solutions.
        height: Minus the depth: among equal bounds the deepest node comes first, which finds a solution early.
        order: Counter that makes the order of otherwise equal nodes stable and ends every comparison.
        node: Node of the problem.
        merit: Merit of the node.
    """

    bound: float
    height: int
    order: int
    node: Node
    merit: Merit


class Frontier(Generic[Node]):
    """Open nodes, with the merits of all nodes that were ever open and are not dominated.

    Attributes:
        dominated: Number of nodes dropped because another one dominates them.
    """

    def __init__(self) -> None:
        self._heap: list[OpenNode[Node]] = []
        self._fronts: dict[Hashable, list[tuple[float, ...]]] = {}
        self._counter = itertools.count()
        self.dominated = 0

    def __len__(self) -> int:
        """Return the number of open nodes, including dominated ones that were not dropped yet."""
        return len(self._heap)

    @property
    def least_bound(self) -> float:
        """Least bound of all open nodes; inf if there is none."""
        return self._heap[0].bound if self._heap else float("inf")

    def push(self, node: Node, *, bound: float, depth: int, merit: Merit) -> None:
        """Open a node, unless a node seen before dominates it."""
        values = merit.values
        front = self._fronts.setdefault(merit.key, [])
        for other in front:
            if all(theirs <= ours for theirs, ours in zip(other, values, strict=True)):
                self.dominated += 1
                return
        front[:] = [
            other for other in front if not all(ours <= theirs for theirs, ours in zip(other, values, strict=True))
        ]
        front.append(values)
        heapq.heappush(self._heap, OpenNode(bound, -depth, next(self._counter), node, merit))

    def pop(self) -> OpenNode[Node] | None:
        """Return the open node with the least bound that is not dominated by now; None if there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            # A node that was dominated after it was opened is no longer on the front of its key.
            if any(values is entry.merit.values for values in self._fronts[entry.merit.key]):
                return entry
            self.dominated += 1
        return None

    def drop_from(self, cutoff: float) -> None:
        """Forget the open nodes whose bound is `cutoff` or more."""
        self._heap = [entry for entry in self._heap if entry.bound < cutoff]
        heapq.heapify(self._heap)

    def take(self, count: int) -> list[OpenNode[Node]]:
        """Remove up to `count` nodes with the least bounds, in that order."""
        taken: list[OpenNode[Node]] = []
        while len(taken) < count and (entry := self.pop()) is not None:
            taken.append(entry)
        return taken

    @classmethod
    def of(cls, entries: Iterable[OpenNode[Node]]) -> Frontier[Node]:
        """Build the frontier of nodes that were open in others."""
        frontier = cls()
        for entry in sorted(entries, key=lambda entry: entry[:3]):
            frontier.push(entry.node, bound=entry.bound, depth=-entry.height, merit=entry.merit)
        return frontier
