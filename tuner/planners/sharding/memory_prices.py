"""Plans under a limit of memory, found by prices of the bytes that are alive at operators.

The limit holds at every operator, so that each has a price of its own, zero at first (Lagrange's multipliers). While
the plan does not fit, the price at the operator with the most bytes grows by a constant factor, and the plan descends
along the axes under the new prices. Prices that lead to a plan that fits are higher than needed: bisection scales them
down again, and the fastest plan that fits is kept. Where hardly any plan fits, prices may lead to none. On random
graphs that happens for two limits in a hundred, of which `sharding_milp` misses none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from costmodels.sharding.laid_sources import lay_sources
from costmodels.sharding.plan import Plan, live_bytes
from tuner.planners.engine.outcome import ROUNDING
from tuner.planners.sharding.axis_descent import IsOpen, charged_s, descend
from tuner.planners.sharding.sharding_terms import Charge, ShardingTerms

FIRST = 0.05
"""First price of an operator: cost of holding as many bytes as the limit, as a fraction of the step."""

GROWTH = 2.0
"""Factor by which prices grow."""

ANYTHING_S = 1e9
"""Cost of holding as many bytes as the limit while only memory counts, far above any step time [s]."""

STEEP = 4.0
"""Factor by which prices grow while only memory counts."""

PATIENCE = 6
"""Rounds without a lower peak after which the lowest peak is taken for the least."""

ENOUGH = 1e4
"""Highest useful price: cost of holding as many bytes as the limit, in steps."""

MOST_ROUNDS = 60
"""Most rounds of growing prices from one plan."""

HALVINGS = 5
"""Number of bisections of the prices' scale once a plan fits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """Result of a search under a limit of memory.

    Attributes:
        plan: Fastest plan that was found below the limit; None if there was none.
        least_bytes: Lowest peak of all plans that were seen. Without a plan, a limit of this size can be met.
    """

    plan: Plan | None
    least_bytes: float


def fit_to_memory(
    plan: Plan,
    terms: ShardingTerms,
    memory_bytes: float,
    *,
    is_open: IsOpen | None = None,
    charge: Charge | None = None,
    kept: Collection[int] = (),
) -> Fitted:
    """Find a fast plan below a limit of memory.

    The search first looks for the lowest peak that prices can lead to, whatever time the plan takes. That peak does not
    depend on the limit, so that a user who sets the reported least as the limit gets a plan. Prices then start both
    from the given plan and from the smallest.

    Args:
        plan: Plan to begin with.
        terms: Cost tables of the plan's graph on its mesh.
        memory_bytes: Most memory that a device may hold.
        is_open: Restriction of operators; None for no restriction.
        charge: Further costs per operator; None for no further costs.
        kept: Inputs and constants that need not lie as their readers want them (`lay_sources`).
    """
    search = _Search(terms=terms, memory_bytes=memory_bytes, is_open=is_open, charge=charge, kept=kept)
    search.see(plan)
    smallest = search.smallest(plan)
    if peak_bytes(smallest) > memory_bytes:
        return Fitted(plan=None, least_bytes=peak_bytes(smallest))
    # A price of this size makes memory up to the limit cost about as much as a step.
    unit_s = max(charged_s(one, charge) for one in (plan, smallest)) / memory_bytes
    for start in (plan, smallest):
        search.raise_prices(start, unit_s)
    return Fitted(plan=search.best, least_bytes=search.least_bytes)


@dataclass(kw_only=True, slots=True, eq=False)
class _Search:
    """Search under one limit, with the best of the plans that were seen.

    Attributes:
        terms: Cost tables without prices.
        memory_bytes: Most memory that a device may hold.
        is_open: Restriction of operators; None for no restriction.
        charge: Further costs per operator; None for no further costs.
        kept: Inputs and constants that need not lie as their readers want them.
        best: Fastest plan that fits.
        best_s: Step time and charge of the fastest plan [s].
        least_bytes: Lowest peak of all plans.
    """

    terms: ShardingTerms
    memory_bytes: float
    is_open: IsOpen | None
    charge: Charge | None
    kept: Collection[int]
    best: Plan | None = None
    best_s: float = field(default=np.inf)
    least_bytes: float = field(default=np.inf)

    def see(self, plan: Plan) -> bool:
        """Keep a plan if it is the fastest so far that fits; return whether it fits."""
        held_bytes = peak_bytes(plan)
        self.least_bytes = min(self.least_bytes, held_bytes)
        if held_bytes > self.memory_bytes:
            return False
        cost_s = charged_s(plan, self.charge)
        if cost_s < self.best_s * (1 - ROUNDING):
            self.best, self.best_s = plan, cost_s
        return True

    def descend(self, plan: Plan, byte_s: dict[int, float]) -> Plan:
        found = descend(plan, self.terms.with_prices(byte_s), is_open=self.is_open, charge=self.charge).plan
        found = lay_sources(found, kept=self.kept)
        self.see(found)
        return found

    def smallest(self, plan: Plan) -> Plan:
        """Find the plan of the lowest peak, with prices beyond any step time.

        At first, bytes at all operators cost the same. Those at the peak then cost more and more.
        """
        unit_s = ANYTHING_S / (peak_bytes(plan) or 1.0)
        byte_s = dict.fromkeys(range(len(plan.graph.ops)), unit_s)
        least, waited = plan, 0
        while waited < PATIENCE:
            plan = self.descend(plan, byte_s)
            waited += 1
            if peak_bytes(plan) < peak_bytes(least) * (1 - ROUNDING):
                least, waited = plan, 0
            # Memory at the peak becomes dearer than elsewhere.
            byte_s[int(live_bytes(plan).argmax())] *= STEEP
        return least

    def raise_prices(self, start: Plan, unit_s: float) -> None:
        """Raise prices until a plan fits, then scale them down to what is needed.

        Args:
            start: Plan to begin with.
            unit_s: Price of a byte at which holding as many bytes as the limit costs about a step [s per byte].
        """
        byte_s: dict[int, float] = {}
        plan = start
        for _ in range(MOST_ROUNDS):
            live = live_bytes(plan)
            worst = int(live.argmax())
            if live[worst] <= self.memory_bytes:
                break
            highest_s = max(byte_s.values(), default=0.0)
            # A new price starts close to the highest one, so that late operators do not need many rounds.
            byte_s[worst] = max(FIRST * unit_s, GROWTH * byte_s.get(worst, 0.0), highest_s / GROWTH)
            if byte_s[worst] > ENOUGH * unit_s:
                return
            plan = self.descend(plan, byte_s)
        else:
            return
        # Bisect the scale of all prices between none and those that led to a plan that fits.
        too_low, enough = 0.0, 1.0
        for _ in range(HALVINGS if byte_s else 0):
            scale = (too_low + enough) / 2
            scaled = {op: scale * price_s for op, price_s in byte_s.items()}
            # Both starts are tried, because a descent ends in a local optimum.
            plans = [self.descend(begin, scaled) for begin in (start, plan)]
            if any(self.fits(one) for one in plans):
                enough = scale
            else:
                too_low = scale

    def fits(self, plan: Plan) -> bool:
        return peak_bytes(plan) <= self.memory_bytes


def peak_bytes(plan: Plan) -> float:
    """Return the most memory that a device holds at a time [bytes]."""
    return float(live_bytes(plan).max(initial=0.0))
