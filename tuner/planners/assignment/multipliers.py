"""Prices of memory at each time: they turn the limit into costs, and raise the lower bound.

For any prices that are not negative, the least cost of all assignments that pay for their memory, less the price of the
whole limit, is a bound. After each sweep of the messages the prices follow what the assignment found holds above or
below the limit (a deflected subgradient). The step is the one that would lift the bound by a share of it, and that
share shrinks as time goes on.

Source: Held, Wolfe and Crowder, *Validation of subgradient optimization* (1974); Polyak's step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hardware.arrays import FloatArray, IntArray
from tuner.planners.assignment.contraction import Core
from tuner.planners.assignment.messages import Messages
from tuner.planners.assignment.problem import is_close, starts_of
from tuner.planners.assignment.timeline import Timeline

_FIRST_STEP, _LAST_STEP = 0.1, 0.0005
"""Share of the bound that a step aims to lift it by: at the start, and when all time is spent."""

_DEFLECTION = 0.7
"""Weight of all earlier directions."""


_EXCESS_WEIGHT = 1000.0
"""An assignment that holds 1% above the limit is as good a start for repairs as one that costs this many % more."""

_FORBIDDEN_WEIGHT = 100.0
"""An assignment with something forbidden is as good a start as one that costs this many times the bound."""


class Ascent:
    """Raises the bound and finds assignments.

    Attributes:
        bound: No feasible assignment costs less.
        prices: The mean of those of the second half of the time [times].
        states: Of the cheapest feasible assignment; if there is none, of one that costs little and holds little above
            the limit.
        cost: Of the cheapest feasible assignment; inf while there is none.
    """

    def __init__(self, core: Core, timeline: Timeline, limit: float) -> None:
        """Prepares the messages.

        Args:
            core: The variables.
            timeline: When they hold memory.
            limit: The most that they may hold.
        """
        self._core, self._timeline, self._limit = core, timeline, limit
        self._base = timeline.held(core.base)
        self._messages = Messages(core.starts, core.costs, core.edges, np.arange(len(core.starts) - 1))
        self._costs = CoreCosts(core)
        self._prices = np.zeros(timeline.size)
        self._paid = np.zeros(len(core.costs))
        self._direction: FloatArray | None = None
        self._sum = np.zeros(timeline.size)
        self._num_summed = 0
        self._least_badness = math.inf
        self._is_forward = True
        self.bound = -math.inf
        self.states: IntArray = self._messages.states.copy()
        self.cost = math.inf

    @property
    def prices(self) -> FloatArray:
        """The mean of those of the second half of the time; the present ones before."""
        return self._sum / self._num_summed if self._num_summed else self._prices

    def run(self, spent: Callable[[], float], *, gap: float) -> None:
        """Sweeps until all is spent, or the bound comes close to the cost.

        Args:
            spent: The share of the time that is spent; called once for each sweep.
            gap: Share of the cost that it may be above the bound.
        """
        share = 0.0
        while share < 1.0:
            self._step(share)
            if is_close(self.cost, self.bound, gap):
                return
            share = spent()

    def _step(self, share: float) -> None:
        core, timeline, limit = self._core, self._timeline, self._limit
        least = self._messages.sweep(is_forward=self._is_forward)
        self._is_forward = not self._is_forward
        self.bound = max(self.bound, least + core.constant + float(self._prices @ (self._base - limit)))
        states = self._messages.states
        over = self._base + timeline.held(held_by_node(core, states)) - limit
        cost, excess = self._costs.of(states), max(0.0, float(over.max(initial=0.0))) / max(limit, 1.0)
        if excess <= 0.0 and cost < self.cost:
            self.states, self.cost = states.copy(), cost
        elif math.isinf(self.cost):
            assumed = cost if math.isfinite(cost) else _FORBIDDEN_WEIGHT * abs(self.bound)
            badness = assumed + _EXCESS_WEIGHT * excess * abs(assumed)
            if badness < self._least_badness:
                self.states, self._least_badness = states.copy(), badness
        if timeline.size:
            self._reprice(over, share)

    def _reprice(self, over: FloatArray, share: float) -> None:
        now = over / max(self._limit, 1.0)
        ahead = now if self._direction is None else _DEFLECTION * self._direction + (1.0 - _DEFLECTION) * now
        self._direction = ahead
        active = np.where((self._prices > 0.0) | (ahead > 0.0), ahead, 0.0)
        squared = float(active @ active)
        if squared > 0.0:
            aim = _FIRST_STEP * (_LAST_STEP / _FIRST_STEP) ** share * max(abs(self.bound), 1.0)
            self._prices = np.maximum(0.0, self._prices + aim / squared / max(self._limit, 1.0) * active)
        paid = self._core.held @ self._timeline.paid(self._prices)
        self._messages.costs += paid - self._paid
        self._paid = paid
        if share > 0.5:
            self._sum += self._prices
            self._num_summed += 1


class CoreCosts:
    """What states of all variables cost together, their constant included."""

    def __init__(self, core: Core, *, forbidden: float = math.inf) -> None:
        """Lays the edges' costs out in a row.

        Args:
            core: The variables.
            forbidden: What each choice costs that is forbidden.
        """
        self._core = core
        pairs = np.array(list(core.edges), dtype=np.int64).reshape(-1, 2)
        self._firsts, self._seconds = pairs[:, 0], pairs[:, 1]
        self._widths = np.diff(core.starts)[self._seconds]
        self._begins = starts_of([table.size for table in core.edges.values()])[:-1]
        entries = np.concatenate([*(table.ravel() for table in core.edges.values()), np.zeros(0)])
        self._is_forbidden = np.isinf(entries)
        self._entries = np.where(self._is_forbidden, forbidden, entries)

    def of(self, states: IntArray) -> float:
        """The cost.

        Args:
            states: Of each variable [v].
        """
        places = self._begins + states[self._firsts] * self._widths + states[self._seconds]
        own = self._core.costs[self._core.starts[:-1] + states]
        return self._core.constant + float(own.sum() + self._entries[places].sum())

    def forbidden_ends(self, states: IntArray) -> IntArray:
        """The variables on edges that are forbidden now; one on several edges comes several times.

        Args:
            states: Of each variable [v].
        """
        places = self._begins + states[self._firsts] * self._widths + states[self._seconds]
        wrong = self._is_forbidden[places]
        return np.concatenate([self._firsts[wrong], self._seconds[wrong]])


def held_by_node(core: Core, states: IntArray) -> FloatArray:
    """What each node with a choice holds [n].

    Args:
        core: The variables.
        states: Of each [v].
    """
    rows = core.held[core.starts[:-1] + states]
    return np.asarray(np.bincount(rows.indices, rows.data, core.held.shape[1]), dtype=np.float64)
