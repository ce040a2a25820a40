"""Branch and bound: a search that proves how good its solution is.

Source: "Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", Algorithm 1.

Lifecycle: `branch_and_bound(problem)` asks the problem for its root and for a greedy solution. It then repeatedly takes
the open node with the least bound, completes some of these greedily, opens the children, and forgets nodes whose bound
is no less than the cost of the best solution (lines 6 to 16). It ends with an `Outcome`: the solution, its largest
possible distance from the optimum, and the reason for stopping. It may be stopped at any moment.

Two points go beyond Algorithm 1. A node is dropped if another one is no worse in any respect (`Merit`). Complete nodes
are compared when they are made, not when their turn comes, which gives earlier solutions.

With workers, the open nodes with the least bounds are distributed among them. Each worker searches below its own nodes
for a slice of time, and all share the cost of the best solution. The nodes that they leave open are gathered and
distributed again.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from tuner.planners.engine.frontier import Frontier, Merit, OpenNode
from tuner.planners.engine.outcome import ROUNDING, Incumbent, Known, Limits, Outcome, Progress, Stop, gap_of
from tuner.planners.engine.workers import AbstractBound, AbstractWorkers, LocalBound

Node = TypeVar("Node")
Solution = TypeVar("Solution")

GREEDY_EVERY = 200
"""Nodes between two greedy completions; one completion costs about as much as a handful of nodes."""

RECORD_EVERY = 1000
"""Nodes between two entries of the trace without an improvement."""

FIRST_DEAL = 32
"""Open nodes per worker before any are distributed: enough to keep a worker busy whose first nodes are dropped."""

LARGEST_DEAL = 3000
"""Most open nodes that a worker is given.

With fewer nodes it soon expands some whose turn would come later. With more nodes they take longer to send (measured).
"""

FIRST_SLICE_S, LAST_SLICE_S = 0.1, 5.0
"""Time that workers search between two deals [s], doubled from the first to the last.

It is short at first, when few nodes are open, and finally so long that sending nodes hardly counts.
"""


class AbstractProblem(ABC, Generic[Node, Solution]):
    """A problem whose solutions are built by one decision after the other; costs are never negative.

    A node is a partial solution and is never changed. The problem is pickled on its way to other processes.
    """

    @abstractmethod
    def root(self) -> Node:
        """Return the node in which nothing is decided."""

    @abstractmethod
    def children(self, node: Node, cutoff: float) -> Iterable[Node]:
        """Return the next decisions; none where the node cannot be completed.

        Every solution below the node that costs less than `cutoff` must be below one of the children, or another
        solution of the same cost must be. This is the place to break symmetries.
        """

    @abstractmethod
    def lower_bound(self, node: Node) -> float:
        """Return a lower bound of all solutions below the node; inf if there are none.

        The bound of a child must not be below that of its parent.
        """

    @abstractmethod
    def complete(self, node: Node) -> Incumbent[Solution] | None:
        """Return the solution that the node is; None while decisions are open."""

    @abstractmethod
    def greedy(self, node: Node) -> Incumbent[Solution] | None:
        """Return a good solution below the node, found quickly; None if the attempt finds none."""

    @abstractmethod
    def merit(self, node: Node) -> Merit:
        """Return the key and values by which nodes are compared for dominance."""


@dataclass(slots=True)
class _Search(Generic[Node, Solution]):
    """State of a search in one process.

    Attributes:
        problem: Problem to solve.
        frontier: Open nodes.
        known: Least cost known, which other workers may lower.
        clock: Clock in seconds.
        start_s: Time when the search began.
        nodes: Number of expanded nodes.
        dominated: Number of nodes dropped by dominance in former frontiers.
        best: Best solution found in this process.
        trace: Progress so far.
    """

    problem: AbstractProblem[Node, Solution]
    frontier: Frontier[Node]
    known: AbstractBound
    clock: Callable[[], float]
    start_s: float
    nodes: int = 0
    dominated: int = 0
    best: Incumbent[Solution] | None = None
    trace: list[Progress] = field(default_factory=list)

    @property
    def cost(self) -> float:
        """Cost of the best solution that any worker knows."""
        return min(self.known.get(), math.inf if self.best is None else self.best.cost)

    @property
    def cutoff(self) -> float:
        """Bound from which a node holds nothing better."""
        return self.cost * (1 - ROUNDING)

    @property
    def bound(self) -> float:
        """Lower bound of every solution; it never falls."""
        before = self.trace[-1].bound if self.trace else 0.0
        return max(before, min(self.frontier.least_bound, self.cost))

    def record(self) -> None:
        self.trace.append(
            Progress(seconds=self.clock() - self.start_s, nodes=self.nodes, cost=self.cost, bound=self.bound)
        )

    def offer(self, found: Incumbent[Solution] | None) -> bool:
        """Keep a solution if it is the best; return whether it is."""
        if found is None or not found.cost < self.cost:
            return False
        self.best = found
        self.known.offer(found.cost)
        return True

    def open(self, node: Node, depth: int) -> bool:
        """Add a node to the frontier unless it is complete or too costly; return whether it is a better solution."""
        bound = self.problem.lower_bound(node)
        if bound >= self.cutoff:
            return False
        found = self.problem.complete(node)
        if found is not None:
            return self.offer(found)
        self.frontier.push(node, bound=bound, depth=depth, merit=self.problem.merit(node))
        return False

    def run(self, limits: Limits, enough: int | None = None) -> Stop | None:
        """Expand nodes until a limit is reached.

        Args:
            limits: Limits of the search; time counts from its start.
            enough: Number of open nodes at which to return without a reason, to distribute them; None to go on.
        """
        while True:
            if self.frontier.least_bound >= self.cutoff:
                return Stop.EXHAUSTED
            if limits.gap > 0 and gap_of(self.cost, self.bound) <= limits.gap:
                return Stop.GAP
            if self.nodes >= limits.nodes:
                return Stop.NODES
            if self.clock() - self.start_s >= limits.time_s:
                return Stop.TIME
            if enough is not None and len(self.frontier) >= enough:
                return None
            entry = self.frontier.pop()
            if entry is not None and entry.bound < self.cutoff:
                self.expand(entry)

    def expand(self, entry: OpenNode[Node]) -> None:
        self.nodes += 1
        is_better = self.nodes % GREEDY_EVERY == 0 and self.offer(self.problem.greedy(entry.node))
        for child in self.problem.children(entry.node, self.cutoff):
            is_better |= self.open(child, 1 - entry.height)
        if is_better or self.nodes % RECORD_EVERY == 0:
            self.record()

    def outcome(self, stop: Stop) -> Outcome[Solution]:
        if stop is Stop.EXHAUSTED:
            self.frontier.drop_from(self.cutoff)
        self.record()
        end = self.trace[-1]
        if self.best is None:
            known = Known.INFEASIBLE if stop is Stop.EXHAUSTED else Known.UNKNOWN
        else:
            known = Known.OPTIMAL if end.gap <= ROUNDING else Known.FEASIBLE
        return Outcome(
            known=known,
            stop=stop,
            best=self.best,
            bound=end.bound,
            nodes=self.nodes,
            dominated=self.dominated + self.frontier.dominated,
            seconds=end.seconds,
            trace=tuple(self.trace),
        )


def branch_and_bound(
    problem: AbstractProblem[Node, Solution],
    *,
    limits: Limits | None = None,
    workers: AbstractWorkers | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome[Solution]:
    """Find the cheapest solution, with a proof if the limits allow for one.

    Args:
        problem: Problem to solve.
        limits: Limits of the search; None to search until the optimum is proven.
        workers: Workers that search together; None to search in this process alone.
        clock: Clock in seconds; a function of a module if workers are other processes.
    """
    limits = limits or Limits()
    search = _Search(problem=problem, frontier=Frontier(), known=LocalBound(), clock=clock, start_s=clock())
    root = problem.root()
    # A first solution lets the search drop nodes from the beginning.
    search.offer(problem.greedy(root))
    search.open(root, 0)
    search.record()
    if workers is None:
        stop = search.run(limits)
        assert stop is not None, "a search that is not to be dealt ends for a reason"
    else:
        stop = _run_together(search, limits, workers)
    return search.outcome(stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report(Generic[Node, Solution]):
    """Result of a worker's search.

    Attributes:
        best: Best solution that it found; None without a better one.
        left: Nodes that it left open.
        nodes: Number of nodes that it expanded.
        dominated: Number of nodes that it dropped.
    """

    best: Incumbent[Solution] | None
    left: list[OpenNode[Node]]
    nodes: int
    dominated: int


def _run_together(search: _Search[Node, Solution], limits: Limits, workers: AbstractWorkers) -> Stop:
    """Expand nodes until a limit is reached, distributing them among workers once there are enough."""
    # Nodes are dealt like cards, so that every worker gets some of the best ones.
    enough = FIRST_DEAL * workers.num_workers
    slice_s = FIRST_SLICE_S
    while (stop := search.run(limits, enough)) is None:
        dealt = search.frontier.take(LARGEST_DEAL * workers.num_workers)
        spent_s = search.clock() - search.start_s
        # Workers go on to the end of their slice without a gap of their own, because they see only a part of the tree.
        slice_limits = replace(
            limits,
            time_s=min(slice_s, limits.time_s - spent_s),
            nodes=math.ceil((limits.nodes - search.nodes) / workers.num_workers)
            if math.isfinite(limits.nodes)
            else math.inf,
            gap=0.0,
        )
        hands = [dealt[first :: workers.num_workers] for first in range(workers.num_workers)]
        explore = partial(_explore, search.problem, search.clock, slice_limits)
        reports = workers.map(explore, hands, best_known=search.cost)
        kept = search.frontier.take(len(search.frontier))
        search.dominated += search.frontier.dominated
        for report in reports:
            search.offer(report.best)
            search.nodes += report.nodes
            search.dominated += report.dominated
        # a new frontier: in the old one every node that comes back would be dominated by itself
        search.frontier = Frontier.of(kept + [entry for report in reports for entry in report.left])
        search.record()
        slice_s = min(2 * slice_s, LAST_SLICE_S)
    return stop


def _explore(
    problem: AbstractProblem[Node, Solution],
    clock: Callable[[], float],
    limits: Limits,
    nodes: list[OpenNode[Node]],
    known: AbstractBound,
) -> _Report[Node, Solution]:
    """Search below the nodes that one worker was dealt."""
    search = _Search(problem=problem, frontier=Frontier.of(nodes), known=known, clock=clock, start_s=clock())
    search.run(limits)
    search.frontier.drop_from(search.cutoff)
    left = search.frontier.take(len(search.frontier))
    return _Report(best=search.best, left=left, nodes=search.nodes, dominated=search.frontier.dominated)
