"""Plans under a limit of memory, by prices: a byte that is alive at an operator where too many are costs something.

The limit holds at every operator, so each has a price of its own, zero at first (Lagrange's multipliers). While the
plan does not fit, the operator with the most bytes gets a higher price, by a constant factor each time, and the plan
descends along the axes under these prices. Prices that lead to a plan that fits are more than it needs: bisection
scales them down again, and the fastest plan that fits is kept. No prices may lead to what fits where hardly anything
does: with random graphs that is so for two limits in a hundred, and `sharding_milp` misses none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from costmodels.sharding.plan import Plan, live_bytes
from tuner.planners.engine.outcome import ROUNDING
from tuner.planners.sharding.axis_descent import IsOpen, charged_s, descended
from tuner.planners.sharding.sharding_terms import Charge, ShardingTerms

FIRST = 0.05
"""Of the step that holding the limit's bytes costs with the first price of an operator."""

GROWTH = 2.0
"""By which prices grow."""

ANYTHING_S = 1e9
"""What holding the limit's bytes costs where it costs more than any step."""

STEEP = 4.0
"""By which prices grow while only memory counts."""

PATIENCE = 6
"""Rounds without a lower peak until the lowest is taken for the least."""

ENOUGH = 1e4
"""Steps that holding the limit's bytes costs where prices have said all that they can."""

MOST_ROUNDS = 60
"""Of growing prices, from one plan."""

HALVINGS = 5
"""Of the prices' scale, when a plan fits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """What became of a limit.

    Attributes:
        plan: The fastest plan that was found below it; None where there was none.
        least_bytes: The lowest peak of all plans that were seen; without a plan, one that is found as a limit, too.
    """

    plan: Plan | None
    least_bytes: float


def fitted(
    plan: Plan,
    terms: ShardingTerms,
    memory_bytes: float,
    *,
    is_open: IsOpen | None = None,
    charge: Charge | None = None,
) -> Fitted:
    """The fastest plan below a limit that prices lead to.

    The first question is how little prices can lead to, whatever time that takes. It does not depend on the limit, so
    that what is told to be the least is found again. Then prices begin at the given plan, and at the smallest.

    Args:
        plan: Where it begins.
        terms: What plans of its graph on its mesh cost.
        memory_bytes: The most that a device may hold.
        is_open: Restricts operators; None for no restriction.
        charge: Further costs.
    """
    search = _Search(terms=terms, memory_bytes=memory_bytes, is_open=is_open, charge=charge)
    search.see(plan)
    smallest = search.smallest(plan)
    if peak_bytes(smallest) > memory_bytes:
        return Fitted(plan=None, least_bytes=peak_bytes(smallest))
    unit_s = max(charged_s(one, charge) for one in (plan, smallest)) / memory_bytes
    for start in (plan, smallest):
        search.raise_prices(start, unit_s)
    return Fitted(plan=search.best, least_bytes=search.least_bytes)


@dataclass(kw_only=True, slots=True, eq=False)
class _Search:
    """The plans that were seen.

    Attributes:
        best: The fastest that fits.
        best_s: What it costs.
        least_bytes: The lowest peak of all.
    """

    terms: ShardingTerms
    memory_bytes: float
    is_open: IsOpen | None
    charge: Charge | None
    best: Plan | None = None
    best_s: float = field(default=np.inf)
    least_bytes: float = field(default=np.inf)

    def see(self, plan: Plan) -> bool:
        """Keeps a plan if it is the fastest so far that fits; returns whether it fits."""
        held_bytes = peak_bytes(plan)
        self.least_bytes = min(self.least_bytes, held_bytes)
        if held_bytes > self.memory_bytes:
            return False
        cost_s = charged_s(plan, self.charge)
        if cost_s < self.best_s * (1 - ROUNDING):
            self.best, self.best_s = plan, cost_s
        return True

    def descended(self, plan: Plan, byte_s: dict[int, float]) -> Plan:
        """The plan that prices lead to from another, seen."""
        found = descended(plan, self.terms.priced(byte_s), is_open=self.is_open, charge=self.charge).plan
        self.see(found)
        return found

    def smallest(self, plan: Plan) -> Plan:
        """The plan of the lowest peak that prices beyond any time lead to.

        All operators' bytes cost the same at first; those of the peak then cost more and more.
        """
        unit_s = ANYTHING_S / (peak_bytes(plan) or 1.0)
        byte_s = dict.fromkeys(range(len(plan.graph.ops)), unit_s)
        least, waited = plan, 0
        while waited < PATIENCE:
            plan = self.descended(plan, byte_s)
            waited += 1
            if peak_bytes(plan) < peak_bytes(least) * (1 - ROUNDING):
                least, waited = plan, 0
            byte_s[int(live_bytes(plan).argmax())] *= STEEP
        return least

    def raise_prices(self, start: Plan, unit_s: float) -> None:
        """Prices grow until a plan fits, and are then scaled down to what that takes.

        Args:
            start: Where plans begin.
            unit_s: The price of a byte at which holding as many as the limit costs about a step [s per byte].
        """
        byte_s: dict[int, float] = {}
        plan = start
        for _ in range(MOST_ROUNDS):
            live = live_bytes(plan)
            worst = int(live.argmax())
            if live[worst] <= self.memory_bytes:
                break
            highest_s = max(byte_s.values(), default=0.0)
            byte_s[worst] = max(FIRST * unit_s, GROWTH * byte_s.get(worst, 0.0), highest_s / GROWTH)
            if byte_s[worst] > ENOUGH * unit_s:
                return
            plan = self.descended(plan, byte_s)
        else:
            return
        too_low, enough = 0.0, 1.0
        for _ in range(HALVINGS if byte_s else 0):
            scale = (too_low + enough) / 2
            scaled = {op: scale * price_s for op, price_s in byte_s.items()}
            plans = [self.descended(begin, scaled) for begin in (start, plan)]
            if any(self.fits(one) for one in plans):
                enough = scale
            else:
                too_low = scale

    def fits(self, plan: Plan) -> bool:
        """Whether a plan is below the limit."""
        return peak_bytes(plan) <= self.memory_bytes


def peak_bytes(plan: Plan) -> float:
    """The most that a device holds at a time."""
    return float(live_bytes(plan).max(initial=0.0))
