"""What a search ends with, as data: what is known, why it stopped, and how it came there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

Solution = TypeVar("Solution")

ROUNDING = 1e-9
"""Costs that differ by less than this share are the same: sums of the same times in another order differ as well."""


class Known(Enum):
    """What is known of the problem."""

    OPTIMAL = "no solution costs less than the one found"
    FEASIBLE = "there is a solution; whether a cheaper one exists is open"
    INFEASIBLE = "there is no solution: every way to complete one breaks a limit, most often a memory limit"
    UNKNOWN = "no solution was found, and whether one exists is open; allow more time or more nodes"


class Stop(Enum):
    """Why the search stopped."""

    EXHAUSTED = "nothing is left to explore"
    GAP = "the solution is as close to the lower bound as was asked for"
    TIME = "the time was spent"
    NODES = "the number of nodes was reached"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When a search ends before it is done.

    Attributes:
        time_s: Seconds.
        nodes: Expanded nodes.
        gap: Share of the solution's cost that it may be above the lower bound.
    """

    time_s: float = math.inf
    nodes: float = math.inf
    gap: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a search stands.

    Attributes:
        seconds: Since its start.
        nodes: Expanded so far.
        cost: Of the best solution; inf while there is none.
        bound: No solution costs less.
    """

    seconds: float
    nodes: int
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """By what share of its cost the best solution may be too dear; inf while there is none."""
        return gap_of(self.cost, self.bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class Incumbent(Generic[Solution]):
    """A solution and its cost."""

    cost: float
    solution: Solution


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Generic[Solution]):
    """The end of a search.

    Attributes:
        known: What is known of the problem.
        stop: Why the search stopped.
        best: The cheapest solution found; None if there is none.
        bound: No solution costs less; inf where there is none.
        nodes: Expanded nodes.
        dominated: Nodes dropped because another one is no worse in any respect.
        seconds: Wall time.
        trace: Where the search stood at its start, at every improvement, now and then, and at its end.
    """

    known: Known
    stop: Stop
    best: Incumbent[Solution] | None
    bound: float
    nodes: int
    dominated: int
    seconds: float
    trace: tuple[Progress, ...]

    @property
    def gap(self) -> float:
        """By what share of its cost the best solution may be too dear; inf while there is none."""
        return gap_of(math.inf if self.best is None else self.best.cost, self.bound)


OnProgress = Callable[[Progress], None]
"""Is told where the search stands, as often as its trace grows."""


def gap_of(cost: float, bound: float) -> float:
    """(cost - bound) / cost: 0 is proof of optimality, inf says that there is no solution yet."""
    if math.isinf(cost):
        return math.inf
    return max(0.0, cost - bound) / cost if cost > 0 else 0.0
