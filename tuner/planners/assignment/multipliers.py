"""Prices of memory at each time, which turn the limit into costs and raise the lower bound.

For any prices that are not negative, a lower bound follows: the least cost of all assignments that pay for their
memory, less the price of the whole limit. After each sweep of the messages, the prices follow the excess of the present
assignment's memory over the limit (a deflected subgradient). The step is the one that would raise the bound by a
certain fraction. It begins large, until some assignment fits, and then shrinks within each cycle of sweeps. A new cycle
begins with larger steps again, and so comes by other assignments.

Source: Held, Wolfe and Crowder, *Validation of subgradient optimization* (1974); Polyak's step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hardware.arrays import FloatArray, IntArray
from tuner.planners.assignment.contraction import Core
from tuner.planners.assignment.problem import is_close
from tuner.planners.assignment.timeline import Timeline
from tuner.planners.assignment.work import CALL
from tuner.planners.sharding.messages import Messages, starts_of

_DIVING_STEP = 1.0
"""Fraction of the bound by which a step aims to raise it until some assignment fits."""
_MOST_DIVING = 60
"""Most sweeps with such steps."""
_PRICES_KEPT = 0.3
"""Fraction of the prices that is kept after these sweeps, which raise prices too far."""

_FIRST_STEP, _LAST_STEP = 0.1, 0.0005
"""The same fraction at the start and at the end of a cycle of sweeps."""

_DEFLECTION = 0.7
"""Weight of all earlier directions in the next one."""


_EXCESS_WEIGHT = 1000.0
"""Weight of excess memory against cost, for assignments from which repairs start.

An assignment 1% above the limit is as good as one that costs this many percent more.
"""

_FORBIDDEN_WEIGHT = 100.0
"""Assumed cost of an assignment with a forbidden choice, as a multiple of the bound."""


class Ascent:
    """Ascent of the bound, with the assignments found on the way.

    Attributes:
        bound: Lower bound of all feasible assignments.
        states: States of the cheapest feasible assignment of the present cycle. Without one, those of an assignment of
            low cost and little excess memory.
        cost: Cost of the cheapest feasible assignment of the present cycle; inf while there is none.
        sweep_work: Work of one sweep, in the unit of `work.py`.
    """

    def __init__(self, core: Core, timeline: Timeline, limit: float) -> None:
        """Prepare the messages.

        Args:
            core: Variables of the contracted problem.
            timeline: Times at which nodes hold memory.
            limit: Most memory that nodes may hold at one time.
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
        entries = 2 * sum(table.size for table in core.edges.values())
        self.sweep_work = CALL * self._messages.num_visits + entries + timeline.size + core.held.nnz

    @property
    def prices(self) -> FloatArray:
        """Mean of the prices in the second half of the last cycle [times]; the present prices before."""
        return self._sum / self._num_summed if self._num_summed else self._prices

    def dive(self, spent: Callable[[float], float]) -> None:
        """Sweep with large steps until some assignment fits, or too long.

        Args:
            spent: Function that counts the work of a sweep and returns the fraction spent of what it is for.
        """
        for _ in range(_MOST_DIVING):
            self._step(_DIVING_STEP)
            if spent(self.sweep_work) >= 1.0 or math.isfinite(self.cost):
                break
        self._pay(_PRICES_KEPT * self._prices)

    def run(self, spent: Callable[[float], float], *, gap: float) -> None:
        """Sweep for one cycle: until its work is done, or the bound comes close to the cost.

        Args:
            spent: Function that counts the work of a sweep and returns the fraction spent of the cycle's.
            gap: Accepted gap between cost and bound, as a fraction of the cost.
        """
        self.cost, self._least_badness = math.inf, math.inf
        self._sum, self._num_summed = np.zeros(self._timeline.size), 0
        share = 0.0
        while share < 1.0:
            self._step(_FIRST_STEP * (_LAST_STEP / _FIRST_STEP) ** share)
            if is_close(self.cost, self.bound, gap):
                return
            # The mean of late prices is closer to the optimum than the last ones, which oscillate.
            if share > 0.5:
                self._sum += self._prices
                self._num_summed += 1
            share = spent(self.sweep_work)

    def _step(self, aim: float) -> None:
        """Sweep once, keep the assignment if it is the best, and change the prices.

        Args:
            aim: Fraction of the bound by which the prices should raise it.
        """
        core, timeline, limit = self._core, self._timeline, self._limit
        least = self._messages.sweep(is_forward=self._is_forward)
        self._is_forward = not self._is_forward
        # The dual bound: least cost with prices, less the price of the limit that remains beside nodes without a
        # choice.
        self.bound = max(self.bound, least + core.constant + float(self._prices @ (self._base - limit)))
        states = self._messages.states
        over = self._base + timeline.held(held_by_node(core, states)) - limit
        cost, excess = self._costs.of(states), max(0.0, float(over.max(initial=0.0))) / max(limit, 1.0)
        if excess <= 0.0 and cost < self.cost:
            self.states, self.cost = states.copy(), cost
        elif math.isinf(self.cost):
            # Without a feasible assignment, keep the one from which repairs promise most.
            assumed = cost if math.isfinite(cost) else _FORBIDDEN_WEIGHT * abs(self.bound)
            badness = assumed + _EXCESS_WEIGHT * excess * abs(assumed)
            if badness < self._least_badness:
                self.states, self._least_badness = states.copy(), badness
        if timeline.size:
            self._reprice(over, aim)

    def _reprice(self, over: FloatArray, aim: float) -> None:
        """Move the prices along the deflected subgradient."""
        now = over / max(self._limit, 1.0)
        ahead = now if self._direction is None else _DEFLECTION * self._direction + (1.0 - _DEFLECTION) * now
        self._direction = ahead
        # A price of zero can't fall, so that its direction does not count in the length of the step.
        active = np.where((self._prices > 0.0) | (ahead > 0.0), ahead, 0.0)
        squared = float(active @ active)
        if squared > 0.0:
            step = aim * max(abs(self.bound), 1.0) / squared / max(self._limit, 1.0)
            self._pay(np.maximum(0.0, self._prices + step * active))

    def _pay(self, prices: FloatArray) -> None:
        """Replace the prices."""
        self._prices = prices
        # Only the change of the prices is added, because the messages have already moved the former costs.
        paid = self._core.held @ self._timeline.paid(prices)
        self._messages.costs += paid - self._paid
        self._paid = paid


class CoreCosts:
    """Cost of states of all variables together, with the constant."""

    def __init__(self, core: Core, *, forbidden: float = math.inf) -> None:
        """Lay out the edges' costs in a row.

        Args:
            core: Variables of the contracted problem.
            forbidden: Cost of each forbidden choice.
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
        """Return the cost of an assignment.

        Args:
            states: State of each variable [v].
        """
        places = self._begins + states[self._firsts] * self._widths + states[self._seconds]
        own = self._core.costs[self._core.starts[:-1] + states]
        return self._core.constant + float(own.sum() + self._entries[places].sum())

    def forbidden_ends(self, states: IntArray) -> IntArray:
        """Return the variables on edges with a forbidden choice; a variable on several such edges comes several times.

        Args:
            states: State of each variable [v].
        """
        places = self._begins + states[self._firsts] * self._widths + states[self._seconds]
        wrong = self._is_forbidden[places]
        return np.concatenate([self._firsts[wrong], self._seconds[wrong]])


def held_by_node(core: Core, states: IntArray) -> FloatArray:
    """Return the memory that each node with a choice holds [n].

    Args:
        core: Variables of the contracted problem.
        states: State of each variable [v].
    """
    rows = core.held[core.starts[:-1] + states]
    return np.asarray(np.bincount(rows.indices, rows.data, core.held.shape[1]), dtype=np.float64)
