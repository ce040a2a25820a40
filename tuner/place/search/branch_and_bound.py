"""Search of placements by branch and bound, which can be stopped at any time: it keeps the best so far and the bound.

The engine is that of the schedules of operators (`tuner.planners.engine`), where a node is a partial placement.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tuner.place.search.bounds import Bounds
from tuner.place.search.problem import PlacementProblem
from tuner.place.search.state import NOT_YET, Bonds, State, bonds_of, empty_state, finish_s, next_states, options_chosen
from tuner.planners.engine.branch_and_bound import AbstractProblem, branch_and_bound
from tuner.planners.engine.frontier import Merit
from tuner.planners.engine.outcome import Incumbent, Limits, Outcome

BEAMS = (3, 24)
"""Numbers of partial placements that a greedy completion keeps: more where fewer all run out of memory."""


class Node(NamedTuple):
    """A partial placement and the bound of its step time.

    Attributes:
        state: Partial placement.
        bound: Lower bound of the step time of every placement that begins so [s].
    """

    state: State
    bound: float


class PlacementSearch(AbstractProblem[Node, State]):
    """The placement problem for branch and bound."""

    def __init__(
        self,
        problem: PlacementProblem,
        *,
        bonds: Bonds | None = None,
        known: Sequence[State] = (),
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Keep the tables.

        Args:
            problem: Tables of the workload.
            bonds: What is settled beforehand; None for nothing.
            known: Complete placements that the first answer must not be worse than.
            is_over: Function that tells whether the time is spent. Without a known placement one is found all the same.
        """
        self.problem = problem
        self._bonds = bonds or bonds_of(problem, {})
        self._known = tuple(known)
        self._is_over = is_over if known else lambda: False
        self._bounds = Bounds(problem, self._bonds)

    def root(self) -> Node:
        """Return the empty placement."""
        state = empty_state(self.problem)
        return Node(state, self._bounds.bound_s(state, 0.0, math.inf))

    def children(self, node: Node, cutoff: float) -> Iterable[Node]:
        """Yield the placements with one more decision."""
        for state in next_states(self.problem, node.state, self._bonds):
            bound_s = self._bounds.bound_s(state, node.bound, cutoff)
            if bound_s < cutoff:
                yield Node(state, bound_s)

    def lower_bound(self, node: Node) -> float:
        """Return the bound of the node."""
        return node.bound

    def complete(self, node: Node) -> Incumbent[State] | None:
        """Return the placement once every task is added."""
        if not node.state.is_complete:
            return None
        return Incumbent(cost=finish_s(self.problem, node.state), solution=node.state)

    def greedy(self, node: Node) -> Incumbent[State] | None:
        """Complete a placement by a beam over the bounds; at the root, compare with the known placements."""
        found = [next((done for beam in BEAMS if (done := self._completed(node, beam))), None)]
        if node.state == empty_state(self.problem):
            found += [Incumbent(cost=finish_s(self.problem, state), solution=state) for state in self._known]
        return min((one for one in found if one), key=lambda one: one.cost, default=None)

    def _completed(self, node: Node, most: int) -> Incumbent[State] | None:
        beam, best = [node], None
        while beam:
            cutoff = best.cost if best else math.inf
            grown = [child for one in beam if not self._is_over() for child in self.children(one, cutoff)]
            for child in grown:
                done = self.complete(child)
                if done and (best is None or done.cost < best.cost):
                    best = done
            # here a task may start before the one added last: else attempts would end where it is the only one left
            open_ = [
                child._replace(state=child.state._replace(last=(0.0, -1)))
                for child in grown
                if not child.state.is_complete
            ]
            # the fastest may run out of memory, so that the leanest go on beside them
            fast = heapq.nsmallest(most, open_, key=lambda one: (one.bound, sum(one.state.free_s)))
            lean = heapq.nsmallest(most, open_, key=lambda one: (self._kept_bytes(one.state), one.bound))
            beam = [*fast, *(one for one in lean if one not in fast)]
        return best

    def _kept_bytes(self, state: State) -> float:
        """Return the memory that the placed units take on all devices while they are idle [bytes]."""
        return sum(one.idle_bytes * one.kind.devices for one in options_chosen(self.problem, state).values())

    def merit(self, node: Node) -> Merit:
        """Compare nodes with the same decisions on like hosts: all times are the values."""
        state, problem = node.state, self.problem
        marks = tuple(zip(state.held, state.free_s, strict=True))
        rows = sorted((pool, sorted(marks[first:last])) for pool, first, last in problem.hosts)
        key = (
            tuple(end_s == NOT_YET for end_s in state.end_s),
            state.chosen,
            state.pending,
            tuple((pool, tuple(held for held, _ in cells)) for pool, cells in rows),
        )
        times = [free_s for _, cells in rows for _, free_s in cells]
        ends = [end_s for end_s in state.end_s if end_s != NOT_YET]
        return Merit(key, (*times, *ends, state.last[0], float(state.last[1])))


def improve(
    problem: PlacementProblem,
    state: State,
    *,
    time_s: float,
    enough_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> State:
    """Improve a placement by searching again for two or three units, the others on their cells with their layouts.

    This is a large neighbourhood search (Shaw 1998). It ends when no group can be improved, or the time is spent.

    Args:
        problem: Tables of the workload.
        state: Complete placement.
        time_s: Longest time [s].
        enough_s: Time of a step that is good enough to stop at [s].
        clock: Clock in seconds.
    """
    end_s = clock() + time_s
    units = problem.units
    sizes = range(2, min(len(units), 3) + 1)
    groups = [set(group) for size in sizes for group in itertools.combinations(units, size)] or [set(units)]
    since = 0
    for free in itertools.cycle(groups):
        left_s = end_s - clock()
        if since == len(groups) or left_s <= 0 or finish_s(problem, state) <= enough_s:
            return state
        settled = [unit for unit in units if unit not in free]
        bonds = bonds_of(
            problem, {unit: (state.where[unit],) for unit in settled}, {unit: state.chosen[unit] for unit in settled}
        )
        limits = Limits(time_s=min(left_s, time_s / len(groups)), gap=0.001)
        best = search_placements(problem, limits=limits, bonds=bonds, known=(state,), clock=clock).best
        assert best is not None, "a known placement is an answer"
        since = 0 if best.cost < finish_s(problem, state) * (1 - 1e-6) else since + 1
        state = best.solution
    return state


def search_placements(
    problem: PlacementProblem,
    *,
    limits: Limits,
    bonds: Bonds | None = None,
    known: Sequence[State] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Outcome[State]:
    """Search the placement of the least step time.

    Args:
        problem: Tables of the workload.
        limits: Limits at which the search ends early.
        bonds: What is settled beforehand.
        known: Complete placements that the answer must not be worse than.
        clock: Clock in seconds.
    """
    end_s = math.inf if limits.time_s is None else clock() + limits.time_s
    search = PlacementSearch(problem, bonds=bonds, known=known, is_over=lambda: clock() >= end_s)
    return branch_and_bound(search, limits=limits, clock=clock)
