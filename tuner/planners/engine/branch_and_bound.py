"""Branch and bound: a search that proves how good its solution is.

Source: "Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", Algorithm 1.

Lifecycle: `branch_and_bound(problem)` asks the problem for its root and for a greedy solution; then it takes the open
node with the least bound, completes it greedily now and then, opens its children, and forgets those whose bound is no
less than the cost of the best solution (lines 6 to 16). It ends with an `Outcome`: the solution, how far above the
optimum it can be at most, and why the search stopped. It may be stopped at any moment.

Beyond Algorithm 1: a node is dropped if another one is no worse in any respect (`Merit`), and complete nodes are
compared when they are made, not when their turn comes, which gives earlier solutions.

With workers the open nodes with the least bounds are dealt to them, and each searches below its own for a slice of
time, with the cost of the best solution shared among all. What they leave open is gathered and dealt again.
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
from tuner.planners.engine.outcome import (
    ROUNDING,
    Incumbent,
    Known,
    Limits,
    OnProgress,
    Outcome,
    Progress,
    Stop,
    gap_of,
)
from tuner.planners.engine.workers import AbstractBound, AbstractWorkers, LocalBound

Node = TypeVar("Node")
Solution = TypeVar("Solution")

GREEDY_EVERY = 200
"""Nodes between two greedy completions: one costs about as much as a handful of nodes."""

RECORD_EVERY = 1000
"""Nodes between two entries of the trace without an improvement."""

FIRST_DEAL = 32
"""Open nodes per worker before any are dealt: enough that one with nothing below it leaves no worker idle."""

LARGEST_DEAL = 3000
"""Open nodes that a worker is dealt at most. With fewer it soon expands nodes that would not have their turn yet; with
more they take longer on their way (measured)."""

FIRST_SLICE_S, LAST_SLICE_S = 0.1, 5.0
"""How long workers search between two deals: short at first, when few nodes are open; then so long that sending nodes
to and fro hardly counts."""


class AbstractProblem(ABC, Generic[Node, Solution]):
    """A problem whose solutions are built by one decision after the other; costs are never negative.

    A node is a partial solution and is never changed. The problem is pickled on its way to other processes.
    """

    @abstractmethod
    def root(self) -> Node:
        """The node in which nothing is decided."""

    @abstractmethod
    def children(self, node: Node, cutoff: float) -> Iterable[Node]:
        """The next decisions; none where the node cannot be completed.

        Every solution below the node that costs less than `cutoff` must be below one of the children, or be matched
        by a solution of the same cost that is: that is where symmetries end.
        """

    @abstractmethod
    def lower_bound(self, node: Node) -> float:
        """No solution below the node costs less; inf where none exists. It never falls from a node to its child."""

    @abstractmethod
    def complete(self, node: Node) -> Incumbent[Solution] | None:
        """The solution that the node is; None while decisions are open."""

    @abstractmethod
    def greedy(self, node: Node) -> Incumbent[Solution] | None:
        """A good solution below the node, found quickly; None where the attempt finds none."""

    @abstractmethod
    def merit(self, node: Node) -> Merit:
        """What the node is compared by."""


@dataclass(slots=True)
class _Search(Generic[Node, Solution]):
    """The state of a search in one process.

    Attributes:
        problem: What is searched.
        frontier: Its open nodes.
        known: The least cost known, which others may lower.
        clock: Seconds.
        start_s: When the search began.
        nodes: Expanded nodes.
        best: The best solution found here.
        trace: Where the search stood.
        on_progress: Is told of it.
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
    on_progress: OnProgress | None = None

    @property
    def cost(self) -> float:
        """Of the best solution that is known anywhere."""
        return min(self.known.get(), math.inf if self.best is None else self.best.cost)

    @property
    def cutoff(self) -> float:
        """A node with such a bound or a higher one holds nothing better."""
        return self.cost * (1 - ROUNDING)

    @property
    def bound(self) -> float:
        """No solution costs less; never less than said before."""
        before = self.trace[-1].bound if self.trace else 0.0
        return max(before, min(self.frontier.least_bound, self.cost))

    def record(self) -> None:
        """Adds to the trace."""
        self.trace.append(
            Progress(seconds=self.clock() - self.start_s, nodes=self.nodes, cost=self.cost, bound=self.bound)
        )
        if self.on_progress is not None:
            self.on_progress(self.trace[-1])

    def offer(self, found: Incumbent[Solution] | None) -> bool:
        """Keeps a solution if it is the best; whether it is."""
        if found is None or not found.cost < self.cost:
            return False
        self.best = found
        self.known.offer(found.cost)
        return True

    def open(self, node: Node, depth: int) -> bool:
        """Puts a node where it belongs; whether it is a better solution."""
        bound = self.problem.lower_bound(node)
        if bound >= self.cutoff:
            return False
        found = self.problem.complete(node)
        if found is not None:
            return self.offer(found)
        self.frontier.push(node, bound=bound, depth=depth, merit=self.problem.merit(node))
        return False

    def run(self, limits: Limits, enough: int | None = None) -> Stop | None:
        """Expands nodes until a limit is met.

        Args:
            limits: Time counts from the start of the search.
            enough: Open nodes at which to return without a reason: they can be dealt to others.
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
        """Opens the children of a node."""
        self.nodes += 1
        is_better = self.nodes % GREEDY_EVERY == 0 and self.offer(self.problem.greedy(entry.node))
        for child in self.problem.children(entry.node, self.cutoff):
            is_better |= self.open(child, 1 - entry.height)
        if is_better or self.nodes % RECORD_EVERY == 0:
            self.record()

    def outcome(self, stop: Stop) -> Outcome[Solution]:
        """The end of the search."""
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
    on_progress: OnProgress | None = None,
) -> Outcome[Solution]:
    """The cheapest solution, with a proof if the limits allow for one.

    Args:
        problem: What is searched.
        limits: When to stop before that; never, if there are none.
        workers: Search together; None searches in this process alone.
        clock: Seconds; must be a function of a module if workers are other processes.
        on_progress: Is told of every improvement, and now and then of the bound.
    """
    limits = limits or Limits()
    search = _Search(
        problem=problem,
        frontier=Frontier(),
        known=LocalBound(),
        clock=clock,
        start_s=clock(),
        on_progress=on_progress,
    )
    root = problem.root()
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
class _Task(Generic[Node]):
    """Nodes that one worker searches below."""

    nodes: tuple[OpenNode[Node], ...]
    limits: Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report(Generic[Node, Solution]):
    """What a worker did: its best solution, what it left open, and how many nodes it expanded and dropped."""

    best: Incumbent[Solution] | None
    left: list[OpenNode[Node]]
    nodes: int
    dominated: int


def _run_together(search: _Search[Node, Solution], limits: Limits, workers: AbstractWorkers) -> Stop:
    """As `_Search.run`, with the nodes below dealt to workers."""
    enough = FIRST_DEAL * workers.num_workers
    slice_s = FIRST_SLICE_S
    while (stop := search.run(limits, enough)) is None:
        dealt = search.frontier.take(LARGEST_DEAL * workers.num_workers)
        spent_s = search.clock() - search.start_s
        slice_limits = replace(
            limits,
            time_s=min(slice_s, limits.time_s - spent_s),
            nodes=math.ceil((limits.nodes - search.nodes) / workers.num_workers)
            if math.isfinite(limits.nodes)
            else math.inf,
            gap=0.0,
        )
        tasks = [
            _Task(nodes=tuple(dealt[first :: workers.num_workers]), limits=slice_limits)
            for first in range(workers.num_workers)
        ]
        explore = partial(_explore, search.problem, search.clock)
        reports = workers.map(explore, tasks, best_known=search.cost)
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
    problem: AbstractProblem[Node, Solution], clock: Callable[[], float], task: _Task[Node], known: AbstractBound
) -> _Report[Node, Solution]:
    """One worker's share of a deal."""
    search = _Search(problem=problem, frontier=Frontier.of(task.nodes), known=known, clock=clock, start_s=clock())
    search.run(task.limits)
    search.frontier.drop_from(search.cutoff)
    left = search.frontier.take(len(search.frontier))
    return _Report(best=search.best, left=left, nodes=search.nodes, dominated=search.frontier.dominated)
