"""Lower bounds of the step time of all placements that begin with a partial one.

A step of T seconds is possible only if every task that is open has an option no longer than the time between its
earliest start (its head) and the latest end from which its successors can still finish (its tail). Of those options the
least area counts, in devices times seconds. For every pair of a head and a tail, the areas of all tasks between them
must fit in what the cells have free in that interval (energetic reasoning; Baptiste, Le Pape and Nuijten 2001,
"Constraint-Based Scheduling", chapter 3). The bound is the least T, by bisection, for which nothing is violated. Areas
fall and intervals grow with T, so every smaller T is impossible too. Transfers and memory count as nothing.

A second of a faster device may be worth more than one of a slower device: with any weights of the devices the areas
hold. They are weighted by their peaks.
"""

from __future__ import annotations

import bisect
from collections import Counter
from typing import NamedTuple

from tuner.place.options import WHOLE, SetKind
from tuner.place.search.problem import PlacementProblem
from tuner.place.search.state import NOT_YET, Bonds, State, bits_of, finish_s, options_chosen

PRECISION = 5e-4
"""Relative width at which bisection ends."""


class _Choices(NamedTuple):
    """Times of a module on all of its options, ascending [s], and the least area up to each [devices * s]."""

    times_s: list[float]
    areas: list[float]

    def least_area(self, slack_s: float) -> float | None:
        at = bisect.bisect_right(self.times_s, slack_s * (1 + 1e-12))
        return self.areas[at - 1] if at else None


class Bounds:
    """Bounds for one problem."""

    def __init__(self, problem: PlacementProblem, bonds: Bonds) -> None:
        """Sort the options of every module.

        Args:
            problem: Tables of the workload.
            bonds: What is settled beforehand.
        """
        self.problem = problem
        self._sizes = tuple(pool.devices * pool.weight for pool in problem.pools)
        self._choices = [self._of(module, bonds) for module in range(len(problem.unit_of))]
        self._after: list[list[int]] = [[] for _ in problem.tasks]
        for task, waits in enumerate(problem.before):
            for before, _ in waits:
                self._after[before].append(task)

    def _size(self, kind: SetKind) -> float:
        """Return the number of devices of a kind, each counted with the weight of its pool."""
        if kind.pool == WHOLE:
            return sum(pool.hosts * pool.cells * pool.devices * pool.weight for pool in self.problem.pools)
        return kind.devices * self.problem.pools[kind.pool].weight

    def _of(self, module: int, bonds: Bonds) -> _Choices:
        unit = self.problem.unit_of[module]
        options = [
            option
            for number, option in enumerate(self.problem.options[unit])
            if bonds.allows(self.problem, unit, number)
        ]
        pairs = sorted(
            (seconds, seconds * self._size(option.kind))
            for option in options
            for seconds in [self.problem.module_time_s(module, option)]
        )
        areas: list[float] = []
        for _, area in pairs:
            areas.append(min(area, areas[-1]) if areas else area)
        return _Choices([seconds for seconds, _ in pairs], areas)

    def bound_s(self, state: State, least_s: float, cutoff_s: float) -> float:
        """Return the bound of a state [s]; any value from `cutoff_s` on where it is not below.

        Args:
            state: Partial placement.
            least_s: Bound of the state before it.
            cutoff_s: Time from which states are of no interest.
        """
        work = self._work(state)
        if work is None:
            return float("inf")
        low = max(least_s, finish_s(self.problem, state), work.path_s)
        if low >= cutoff_s or not work.open_ or self._is_possible(work, low):
            return low
        high = cutoff_s
        if high == float("inf"):
            high = 2 * low + 1e-9
            while not self._is_possible(work, high):
                low, high = high, 2 * high
        elif not self._is_possible(work, high):
            return high
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            if self._is_possible(work, middle):
                high = middle
            else:
                low = middle
        return low

    def _work(self, state: State) -> _Work | None:
        """Return the open tasks with heads and tails; None if one of them can't run."""
        problem = self.problem
        chosen = options_chosen(problem, state)
        shortest: dict[int, float] = {}
        modules: list[tuple[int, _Choices]] = []
        head_s: dict[int, float] = {}
        for task, members in enumerate(problem.tasks):
            if state.end_s[task] != NOT_YET:
                continue
            longest, start_s = 0.0, state.last[0]
            for module in members:
                unit = problem.unit_of[module]
                if unit in chosen:
                    seconds = problem.module_time_s(module, chosen[unit])
                    area = seconds * self._size(chosen[unit].kind)
                    modules.append((task, _Choices([seconds], [area])))
                    start_s = max(start_s, *(state.free_s[cell] for cell in bits_of(state.where[unit])))
                else:
                    choices = self._choices[module]
                    if not choices.times_s:
                        return None
                    seconds = choices.times_s[0]
                    modules.append((task, choices))
                longest = max(longest, seconds)
            shortest[task] = longest
            head_s[task] = start_s
        # tasks stand after those that they wait for
        for task, own_s in tuple(head_s.items()):
            ready_s = [
                head_s[before] + shortest[before] if state.end_s[before] == NOT_YET else state.end_s[before]
                for before, _ in problem.before[task]
            ]
            head_s[task] = max([own_s, *ready_s])
        tail_s: dict[int, float] = {}
        for task in reversed(list(head_s)):
            tail_s[task] = max((shortest[later] + tail_s[later] for later in self._after[task]), default=0.0)
        path_s = max((head_s[task] + shortest[task] + tail_s[task] for task in head_s), default=0.0)
        free = Counter(zip(state.free_s, problem.pool_of_cell, strict=True))
        open_ = [(head_s[task], tail_s[task], choices) for task, choices in modules]
        sizes = [(free_s, self._sizes[pool] * count) for (free_s, pool), count in free.items()]
        return _Work(open_, sorted(sizes), path_s)

    def _is_possible(self, work: _Work, total_s: float) -> bool:
        """Return whether nothing speaks against a step of this time."""
        areas = []
        for head_s, tail_s, choices in work.open_:
            area = choices.least_area(total_s - head_s - tail_s)
            if area is None:
                return False
            areas.append((head_s, tail_s, area))
        tails = sorted({tail_s for _, tail_s, _ in areas})
        return all(
            _fit_between(
                [(tail_s, area) for head_s, tail_s, area in areas if head_s >= begin_s], tails, begin_s, work, total_s
            )
            for begin_s in {head_s for head_s, _, _ in areas}
        )


def _fit_between(
    inside: list[tuple[float, float]], tails: list[float], begin_s: float, work: _Work, total_s: float
) -> bool:
    """Return whether the areas that begin no sooner than `begin_s` fit before each tail.

    Args:
        inside: Tails and areas of these tasks.
        tails: Tails to look at.
        begin_s: Beginning of the intervals [s].
        work: Open tasks and free cells.
        total_s: Time of the step [s].
    """
    for rest_s in tails:
        need = 0.0
        for tail_s, area in inside:
            if tail_s >= rest_s:
                need += area
        if not need:
            continue
        end_s, room = total_s - rest_s, 0.0
        for free_s, size in work.free:
            if free_s < end_s:
                room += size * (end_s - max(free_s, begin_s))
        if need > room * (1 + 1e-9):
            return False
    return True


class _Work(NamedTuple):
    """Open tasks of a state.

    Attributes:
        open_: Head, tail and choices of each open module; a module that is placed has its time and area.
        free: Times when cells are free, with the number of cells [devices].
        path_s: Longest path through open tasks [s].
    """

    open_: list[tuple[float, float, _Choices]]
    free: list[tuple[float, float]]
    path_s: float
