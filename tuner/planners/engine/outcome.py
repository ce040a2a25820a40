"""Outcome of a search as data: what is proven, why the search stopped, and its progress."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

Solution = TypeVar("Solution")

ROUNDING = 1e-9
"""Relative difference below which costs are equal: sums of the same times in another order differ by as much."""


class Known(Enum):
    """Knowledge of the problem after a search."""

    OPTIMAL = "no solution costs less than the one found"
    FEASIBLE = "there is a solution; whether a cheaper one exists is open"
    INFEASIBLE = "there is no solution: every way to complete one breaks a limit, most often a memory limit"
    UNKNOWN = "no solution was found, and whether one exists is open; allow more time or more nodes"


class Stop(Enum):
    """Reason why the search stopped."""

    EXHAUSTED = "nothing is left to explore"
    GAP = "the solution is as close to the lower bound as was asked for"
    TIME = "the time was spent"
    NODES = "the number of nodes was reached"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits at which a search ends early.

    Attributes:
        time_s: Wall time [s].
        nodes: Number of expanded nodes.
        gap: Accepted gap between the solution's cost and the lower bound, as a fraction of the cost.
    """

    time_s: float = math.inf
    nodes: float = math.inf
    gap: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """State of a search at one moment.

    Attributes:
        seconds: Time since the start [s].
        nodes: Number of nodes expanded so far.
        cost: Cost of the best solution; inf while there is none.
        bound: Lower bound of the cost of every solution.
    """

    seconds: float
    nodes: int
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """Relative gap between the best solution and the bound; inf without a solution."""
        return gap_of(self.cost, self.bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class Incumbent(Generic[Solution]):
    """A solution and its cost.

    Attributes:
        cost: Cost of the solution.
        solution: Solution itself.
    """

    cost: float
    solution: Solution


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Generic[Solution]):
    """Result of a search.

    Attributes:
        known: Knowledge of the problem.
        stop: Reason why the search stopped.
        best: Cheapest solution found; None if there is none.
        bound: Lower bound of the cost of every solution; inf if there is no solution.
        nodes: Number of expanded nodes.
        dominated: Number of nodes dropped because another one is no worse in any respect.
        seconds: Wall time [s].
        trace: Progress at the start, at every improvement, at regular intervals, and at the end.
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
        """Relative gap between the best solution and the bound; inf without a solution."""
        return gap_of(math.inf if self.best is None else self.best.cost, self.bound)


def gap_of(cost: float, bound: float) -> float:
    """Return (cost - bound) / cost: 0 proves optimality, inf means that there is no solution yet."""
    if math.isinf(cost):
        return math.inf
    return max(0.0, cost - bound) / cost if cost > 0 else 0.0
