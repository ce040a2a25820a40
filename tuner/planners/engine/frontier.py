"""The open nodes of a search: the one with the least bound first, and none that another one makes superfluous."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

Node = TypeVar("Node")


class Merit(NamedTuple):
    """What decides whether one node makes another superfluous.

    Attributes:
        key: Nodes are comparable if their keys are equal: what can follow one can follow the other.
        values: Smaller is better in each. A node that is no larger in any is completed at no higher cost.
    """

    key: Hashable
    values: tuple[float, ...]


class OpenNode(NamedTuple, Generic[Node]):
    """An open node as the queue orders it.

    Attributes:
        bound: Of its cost.
        height: Minus its depth: among equal bounds the search dives, and so finds a solution early.
        order: A counter: a stable order of what is equal so far, and the end of every comparison.
        node: The problem's.
        merit: Of the node.
    """

    bound: float
    height: int
    order: int
    node: Node
    merit: Merit


class Frontier(Generic[Node]):
    """Open nodes, and the merits of all nodes that were ever open and that none dominates."""

    def __init__(self) -> None:
        self._heap: list[OpenNode[Node]] = []
        self._fronts: dict[Hashable, list[tuple[float, ...]]] = {}
        self._counter = itertools.count()
        self.dominated = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def least_bound(self) -> float:
        """Of all open nodes; inf if there is none."""
        return self._heap[0].bound if self._heap else float("inf")

    def push(self, node: Node, *, bound: float, depth: int, merit: Merit) -> None:
        """Opens a node, unless a node seen before is no worse in any respect."""
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
        """The node with the least bound that is not dominated by now; None if there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if any(values is entry.merit.values for values in self._fronts[entry.merit.key]):
                return entry
            self.dominated += 1
        return None

    def drop_from(self, cutoff: float) -> None:
        """Forgets the open nodes whose bound is `cutoff` or more."""
        self._heap = [entry for entry in self._heap if entry.bound < cutoff]
        heapq.heapify(self._heap)

    def take(self, count: int) -> list[OpenNode[Node]]:
        """Removes up to `count` nodes with the least bounds, in that order."""
        taken: list[OpenNode[Node]] = []
        while len(taken) < count and (entry := self.pop()) is not None:
            taken.append(entry)
        return taken

    @classmethod
    def of(cls, entries: Iterable[OpenNode[Node]]) -> Frontier[Node]:
        """The frontier of nodes that were open in others."""
        frontier = cls()
        for entry in sorted(entries, key=lambda entry: entry[:3]):
            frontier.push(entry.node, bound=entry.bound, depth=-entry.height, merit=entry.merit)
        return frontier
