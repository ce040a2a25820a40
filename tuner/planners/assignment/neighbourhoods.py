"""Large neighbourhood search: regions of variables are assigned anew, exactly, while all others keep their states.

A region grows at random around one to three variables. Costs and the price of memory inside it are minimised by
elimination. Where that takes too large tables, some of the region's variables keep their states as well. If the result
holds too much memory at some times, these times become dearer and the region is assigned again. Prices do not lead to
every assignment that fits. In regions with few combinations, all of them are therefore tried as well. An assignment is
accepted if it is cheaper, or if it frees memory that is worth more than its extra cost, because the freed memory can be
used elsewhere. The accepted distance to the best cost shrinks to zero with time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from hardware.arrays import FloatArray, IntArray
from tuner.planners.assignment.contraction import Core
from tuner.planners.assignment.multipliers import CoreCosts, held_by_node
from tuner.planners.assignment.problem import AssignmentProblem, is_close
from tuner.planners.assignment.timeline import Timeline
from tuner.planners.assignment.work import CALL
from tuner.planners.engine.elimination import Term, cheapest_order, least

_REGION_SIZES = (8, 20, 50, 120, 300)
"""Numbers of variables of a region for elimination."""
_TRIED_SHARE = 0.3
"""Fraction of the moves that try all combinations of a few variables."""

_MOST_TRIED = 3
"""Most variables of which all combinations are tried."""
_MOST_COMBINATIONS = 1_000
"""Most combinations that are tried."""
_MOST_SEEDS = 3
"""Most variables around which a region grows."""
_AIMED_SHARE, _REPAIRING_SHARE = 0.2, 0.6
"""Fractions of the moves that aim at a weak point, with and without a feasible assignment; others start anywhere.

Weak points are times at which memory is dear or exceeded, and forbidden choices.
"""

_MOST_NEIGHBOURS = 12
"""Most neighbours of one variable by which a region grows.

Without this limit, hubs would fill the region with variables that have nothing else in common.
"""

_PRICE_FACTORS = (0.0, 0.3, 0.7, 1.0, 1.3)
"""Factors on the prices of memory, of which each move draws one."""
_REPAIRING_FACTORS = (0.7, 1.0, 3.0, 10.0)
"""Factors on the prices while no feasible assignment is known."""
_REPAIRING_PRICE = 0.3
"""Additional price of memory at all times while no feasible assignment is known, as a fraction of the mean price."""

_MOST_ENTRIES = 20_000
"""Most entries of one table of an elimination."""
_ATTEMPTS = 4
"""Most attempts of one elimination, with growing prices."""
_FIRST_SURCHARGE, _SURCHARGE_GROWTH = 0.3, 4.0
"""First surcharge on times at which memory is exceeded, as a fraction of the mean price, and its growth by attempt."""

_TOLERANCE = 0.01
"""Accepted distance of the present cost from the best one at the start, as a fraction of the best cost."""

_ROUNDING = 1e-9
"""Relative difference below which costs count as equal."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Profile:
    """Memory of a variable, as changes at some times.

    Attributes:
        times: Times at which the memory changes [c].
        changes: Change in each state [c, states]; the changes of a state add up to zero.
    """

    times: IntArray
    changes: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Walk:
    """An assignment on its way to cheaper ones.

    Attributes:
        states: States of the cheapest feasible assignment so far; while there is none, of the present one [v].
        cost: Cost of that assignment; inf while none is feasible.
        prices: Price of a unit of memory at each time [times].
    """

    states: IntArray
    cost: float
    prices: FloatArray


class LocalSearch:
    """An assignment that becomes cheaper region by region.

    Attributes:
        best_states: States of the cheapest feasible assignment of the present walk.
        best_cost: Cost of the cheapest feasible assignment of the present walk; inf while there is none.
    """

    def __init__(self, problem: AssignmentProblem, core: Core, timeline: Timeline) -> None:
        """Prepare the graph.

        Args:
            problem: Problem to solve.
            core: Variables of the contracted problem.
            timeline: Times at which nodes hold memory.
        """
        num_variables = len(core.starts) - 1
        begins = core.starts.tolist()
        self._core, self._timeline, self._limit = core, timeline, problem.limit
        self._forbidden = _above_all(core)
        self._sum = CoreCosts(core, forbidden=self._forbidden)
        self._costs = [core.costs[begins[own] : begins[own + 1]] for own in range(num_variables)]
        self._sizes = [len(own) for own in self._costs]
        self._beside: list[dict[int, FloatArray]] = [{} for _ in range(num_variables)]
        for (first, second), costs in core.edges.items():
            table = np.where(np.isinf(costs), self._forbidden, costs)
            self._beside[first][second] = table
            self._beside[second][first] = np.ascontiguousarray(table.T)
        # Lists of neighbours serve random draws, tables serve costs. Transposed tables are made contiguous, as they are
        # read row by row.
        self._neighbours = [list(own) for own in self._beside]
        self._profiles = _profiles(problem, core, timeline, num_variables)
        self._base = timeline.held(core.base)
        self.best_states: IntArray = np.zeros(num_variables, dtype=np.int64)
        self.best_cost = math.inf

    def run(
        self,
        walk: Walk,
        spent: Callable[[float], float],
        *,
        bound: float,
        gap: float,
        rng: Generator,
        report: Callable[[], None],
    ) -> Walk:
        """Move on from where a walk is until the work is done, or the cost comes close to the bound.

        Args:
            walk: Walk to go on with; its states need not be feasible.
            spent: Function that counts the work of a move and returns the fraction spent; called once for each move.
            bound: Lower bound of all assignments.
            gap: Accepted gap between cost and bound, as a fraction of the cost.
            rng: Source of the random choices.
            report: Function called at every improvement.
        """
        self._begin(walk)
        share = 0.0
        while share < 1.0 and not is_close(self.best_cost, bound, gap):
            tolerance = _TOLERANCE * (1.0 - share) ** 1.5
            near = tolerance * abs(self.best_cost) if self._is_found else 0.0
            factor = float(rng.choice(_PRICE_FACTORS if self._is_found else _REPAIRING_FACTORS))
            is_tried = rng.random() < _TRIED_SHARE
            size = int(rng.integers(1, _MOST_TRIED + 1)) if is_tried else int(rng.choice(_REGION_SIZES))
            region = self._region(size, self._seeds(int(rng.integers(1, _MOST_SEEDS + 1)), rng), rng)
            self._work = 0
            (self._try_all if is_tried else self._eliminate)(region, factor, near)
            if self._note():
                report()
            # Return to the best assignment if the present one has drifted too far from it.
            elif self._cost > self.best_cost + 2.0 * _TOLERANCE * abs(self.best_cost):
                self._set(self.best_states)
            share = spent(self._work + CALL * (1 + len(region)))
        states = self.best_states if self._is_found else np.array(self._states, dtype=np.int64)
        return Walk(states=states, cost=self.best_cost, prices=walk.prices)

    def _begin(self, walk: Walk) -> None:
        """Go to the assignment and the prices of a walk."""
        prices = walk.prices
        self._given_prices = prices
        self._paid_until = np.cumsum(prices)
        self._total_price = float(self._paid_until[-1]) if len(prices) else 0.0
        positive = prices[prices > 0.0]
        mean_cost = abs(self._sum.of(walk.states)) / max(self._limit, 1.0) / max(self._timeline.size, 1)
        self._mean_price = float(positive.mean()) if len(positive) else mean_cost
        self._prices = prices + _REPAIRING_PRICE * self._mean_price
        self.best_states, self.best_cost = walk.states, math.inf
        self._set(walk.states)

    @property
    def _is_found(self) -> bool:
        """Whether a feasible assignment is known."""
        return math.isfinite(self.best_cost)

    def _set(self, states: IntArray) -> None:
        """Replace the present assignment."""
        self._states = states.tolist()
        self._cost = self._sum.of(states)
        self._over = self._base + self._timeline.held(held_by_node(self._core, states)) - self._limit
        self._note()

    def _note(self) -> bool:
        """Keep the present assignment if it is feasible and the best; return whether it is."""
        if self._over.max(initial=0.0) > 0.0 or self._cost >= 0.5 * self._forbidden:
            return False
        if not self._cost < self.best_cost - _ROUNDING * abs(self._cost):
            return False
        self.best_cost, self.best_states = self._cost, np.array(self._states, dtype=np.int64)
        self._prices = self._given_prices
        return True

    def _seeds(self, number: int, rng: Generator) -> list[int]:
        """Draw the variables around which a region grows.

        They are any variables, or those that hold memory when it is dear, or those that make the assignment infeasible.
        """
        pool: IntArray | None = None
        if rng.random() < (_AIMED_SHARE if self._is_found else _REPAIRING_SHARE):
            is_over = self._over > 0.0
            if is_over.any():
                pool = self._held_at(int(rng.choice(np.flatnonzero(is_over))))
            elif self._cost >= 0.5 * self._forbidden:
                pool = self._sum.forbidden_ends(np.array(self._states, dtype=np.int64))
            elif self._total_price > 0.0:
                # Draw a time in proportion to its price.
                paid = float(rng.random()) * self._total_price
                pool = self._held_at(int(np.searchsorted(self._paid_until, paid, side="right")))
        if pool is None or not len(pool):
            return [int(seed) for seed in rng.integers(0, len(self._sizes), number)]
        return [int(seed) for seed in rng.choice(pool, number)]

    def _held_at(self, when: int) -> IntArray:
        """Return the variables of nodes that hold memory at a time, once for each node."""
        timeline, variable_of = self._timeline, self._core.variable_of
        return variable_of[(timeline.first <= when) & (when < timeline.end) & (variable_of >= 0)]

    def _region(self, size: int, seeds: list[int], rng: Generator) -> list[int]:
        """Grow a region of variables around seeds, and return it in ascending order."""
        border = list(seeds)
        found: set[int] = set()
        while border and len(found) < size:
            place = int(rng.random() * len(border))
            variable = border[place]
            # Remove the entry by overwriting it with the last one, which costs the same for every length.
            border[place] = border[-1]
            border.pop()
            if variable in found:
                continue
            found.add(variable)
            others = self._neighbours[variable]
            if len(others) > _MOST_NEIGHBOURS:
                others = [others[pick] for pick in rng.integers(0, len(others), _MOST_NEIGHBOURS).tolist()]
            border.extend(other for other in others if other not in found)
        return sorted(found)

    def _try_all(self, region: list[int], factor: float, tolerance: float) -> None:
        """Assign the best of all fitting combinations to a small region, if that is worth it."""
        sizes = [self._sizes[variable] for variable in region]
        if math.prod(sizes) > _MOST_COMBINATIONS:
            return
        now = [self._states[variable] for variable in region]
        own, pairs = self._terms(region)
        total_prices = np.concatenate([[0.0], np.cumsum(factor * self._prices)])
        profiles = [self._profiles[variable] for variable in region]
        times = np.unique(np.concatenate([[0], *(each.times for each in profiles if each is not None)])).astype(
            np.int64
        )
        # Tables have an axis for each variable of the region. `more` is the additional memory of each combination at
        # each time.
        costs, paid = np.zeros(sizes), np.zeros(sizes)
        more = np.zeros((len(times), *sizes))
        self._work += more.size + self._timeline.size
        for place, profile in enumerate(profiles):
            shape = [-1 if place == other else 1 for other in range(len(region))]
            costs += own[place].reshape(shape)
            if profile is not None:
                paid -= (total_prices[profile.times] @ profile.changes).reshape(shape)
                # Memory counts relative to the present states, so that `_over` plus `more` is the new excess.
                changes = profile.changes - profile.changes[:, now[place], None]
                more[np.searchsorted(times, profile.times)] += changes.reshape(len(changes), *shape)
        for first, second, table in pairs:
            shape = [size if place in {first, second} else 1 for place, size in enumerate(sizes)]
            costs += table.reshape(shape)
        if self._timeline.size:
            within = times < self._timeline.size
            most = np.maximum.reduceat(self._over, times[within])
            held = np.cumsum(more, axis=0)[within]
            paid = np.where((held.T + most > 0.0).T.any(axis=0), np.inf, paid)
        # Take the cheapest combination that fits. If it is no cheaper than the present one, take the best including the
        # price of memory.
        best = np.where(np.isinf(paid), np.inf, costs).argmin()
        if not costs.flat[best] < costs[tuple(now)]:
            best = (costs + paid).argmin()
        values = [int(value) for value in np.unravel_index(best, sizes)]
        if values != now:
            change = self._held_more(list(zip(region, now, values, strict=True)))
            dearer = float(costs[tuple(values)] - costs[tuple(now)])
            self._take(region, values, self._over + change, dearer, factor, change, tolerance)

    def _take(
        self,
        region: list[int],
        values: list[int],
        over: FloatArray,
        dearer: float,
        factor: float,
        change: FloatArray,
        tolerance: float,
    ) -> bool:
        """Assign new states to a region if that is worth it; return whether it was.

        Args:
            region: Variables of the region.
            values: New states of the variables.
            over: Memory of the new assignment above the limit [times].
            dearer: Additional cost of the new assignment.
            factor: Factor on the prices of memory.
            change: Additional memory of the new assignment [times].
            tolerance: Accepted distance from the best cost.
        """
        if not self._is_worth(over, dearer, factor * float(self._prices @ change), tolerance):
            return False
        for variable, value in zip(region, values, strict=True):
            self._states[variable] = value
        self._over = over
        self._cost += dearer
        return True

    def _eliminate(self, region: list[int], factor: float, tolerance: float) -> None:
        """Assign new states to a region by elimination, if that is worth it."""
        now = [self._states[variable] for variable in region]
        own, pairs = self._terms(region)
        sizes = [self._sizes[variable] for variable in region]
        # Variables that would make the tables too large keep their states; their edges become costs of their
        # neighbours.
        order = cheapest_order(sizes, [(first, second) for first, second, _ in pairs], most_entries=_MOST_ENTRIES)
        pairs = _condition(own, pairs, order.fixed, now)
        between = [Term(scope=(first, second), table=table) for first, second, table in pairs]

        def cost_of(values: list[int]) -> float:
            """Return the cost of the region's free variables."""
            alone = sum(own[place][values[place]] for place in order.variables)
            return float(alone + sum(table[values[first], values[second]] for first, second, table in pairs))

        prices = factor * self._prices
        over = self._over
        for attempt in range(_ATTEMPTS):
            # Times that were exceeded by the last attempt become dearer.
            if attempt or over.max(initial=0.0) > 0.0:
                prices = prices + (over > 0.0) * (self._mean_price * _FIRST_SURCHARGE * _SURCHARGE_GROWTH**attempt)
            total = np.concatenate([[0.0], np.cumsum(prices)])
            alone = [
                Term(scope=(place,), table=own[place] + self._price_of(region[place], total))
                for place in order.variables
            ]
            values = list(least(sizes, [*alone, *between], order.variables).values)
            self._work += CALL * len(order.variables) + sum(term.table.size for term in between) + 2 * len(prices)
            for place in order.fixed:
                values[place] = now[place]
            changed = [place for place in range(len(region)) if values[place] != now[place]]
            if not changed:
                return
            change = self._held_more([(region[place], now[place], values[place]) for place in changed])
            over = self._over + change
            dearer = cost_of(values) - cost_of(now)
            if self._take(region, values, over, dearer, factor, change, tolerance) or over.max(initial=0.0) <= 0.0:
                return

    def _is_worth(self, over: FloatArray, dearer: float, paid_more: float, tolerance: float) -> bool:
        """Return whether a new assignment is accepted.

        While memory is exceeded, less excess counts. Afterwards the cost counts, or close to the best cost, the cost
        with the price of memory.
        """
        if self._over.max(initial=0.0) > 0.0:
            return float(over.clip(min=0.0).sum()) < float(self._over.clip(min=0.0).sum())
        if over.max(initial=0.0) > 0.0:
            return False
        least_gain = -_ROUNDING * abs(self._cost)
        is_near = self._cost + dearer <= self.best_cost + tolerance
        return dearer < least_gain or (is_near and dearer + paid_more < least_gain)

    def _terms(self, region: list[int]) -> tuple[list[FloatArray], list[tuple[int, int, FloatArray]]]:
        """Return the costs of a region's variables, with edges to variables outside, and the edges within it."""
        place_of = {variable: place for place, variable in enumerate(region)}
        own: list[FloatArray] = []
        pairs: list[tuple[int, int, FloatArray]] = []
        for place, variable in enumerate(region):
            costs = self._costs[variable]
            for other, table in self._beside[variable].items():
                other_place = place_of.get(other)
                if other_place is None:
                    costs = costs + table[:, self._states[other]]
                elif other > variable:
                    pairs.append((place, other_place, table))
            own.append(costs)
        return own, pairs

    def _price_of(self, variable: int, total_prices: FloatArray) -> FloatArray | float:
        """Return the price that each state of a variable pays for its memory; a change is paid from its time on."""
        profile = self._profiles[variable]
        return 0.0 if profile is None else -(total_prices[profile.times] @ profile.changes)

    def _held_more(self, moves: list[tuple[int, int, int]]) -> FloatArray:
        """Return the additional memory at each time for moves of a variable from one state to another [times]."""
        changes = np.zeros(self._timeline.size + 1)
        for variable, now, then in moves:
            profile = self._profiles[variable]
            if profile is not None:
                changes[profile.times] += profile.changes[:, then] - profile.changes[:, now]
        return np.cumsum(changes)[:-1]


def _above_all(core: Core) -> float:
    """Return a finite cost far above that of any assignment, for forbidden choices that are summed up."""
    dearest = np.abs(core.costs).sum() + abs(core.constant)
    dearest += sum(float(np.abs(table[np.isfinite(table)]).max()) for table in core.edges.values())
    return 10.0 * float(dearest) + 1.0


def _condition(
    own: list[FloatArray], pairs: list[tuple[int, int, FloatArray]], fixed: frozenset[int], now: list[int]
) -> list[tuple[int, int, FloatArray]]:
    """Return the edges between variables that are not fixed, and add those of fixed variables to `own`."""
    if not fixed:
        return pairs
    free: list[tuple[int, int, FloatArray]] = []
    for first, second, table in pairs:
        if first in fixed and second not in fixed:
            own[second] = own[second] + table[now[first]]
        elif second in fixed and first not in fixed:
            own[first] = own[first] + table[:, now[second]]
        elif first not in fixed:
            free.append((first, second, table))
    return free


def _profiles(problem: AssignmentProblem, core: Core, timeline: Timeline, num_variables: int) -> list[_Profile | None]:
    """Return the memory profile of each variable; None for a variable that holds none."""
    members: list[list[int]] = [[] for _ in range(num_variables)]
    for node in np.flatnonzero((core.variable_of >= 0) & (timeline.end > timeline.first)).tolist():
        members[core.variable_of[node]].append(node)
    profiles: list[_Profile | None] = []
    for own in members:
        if not own:
            profiles.append(None)
            continue
        # Members of one variable hold memory at different times; their changes add up to one profile.
        usages = np.stack([problem.usages[problem.starts[node] + core.strategies[node]] for node in own])
        times, place = np.unique(np.concatenate([timeline.first[own], timeline.end[own]]), return_inverse=True)
        changes = np.zeros((len(times), usages.shape[1]))
        np.add.at(changes, place, np.concatenate([usages, -usages]))
        keep = changes.any(axis=1)
        profiles.append(_Profile(times=times[keep], changes=changes[keep]))
    return profiles
