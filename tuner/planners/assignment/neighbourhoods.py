"""Large neighbourhoods: regions of variables that are assigned anew, exactly, while all others stay.

A region is what grows at random around one to three variables. Within it costs and the price of memory are minimised
by elimination; where that would take too large tables, some of its variables stay as well. What comes out may hold too
much at some times: these become dearer, and the region is assigned again. Prices do not reach every assignment that
fits, so of regions with few combinations all are tried as well. An assignment is taken if it is cheaper, or if it frees
memory that is worth more than it costs: what it frees is spent elsewhere. How much dearer than the best one that may be
shrinks to nothing as time goes on.
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
from tuner.planners.engine.elimination import Term, cheapest_order, least

_REGION_SIZES = (8, 20, 50, 120, 300)
_TRIED_SHARE = 0.3
"""Of the moves: those that try all combinations of a few variables."""

_MOST_TRIED = 3
_MOST_COMBINATIONS = 1_000
_MOST_SEEDS = 3
_AIMED_SHARE, _REPAIRING_SHARE = 0.2, 0.6
"""Of the moves: those that start where memory is dear, or where something is wrong; the others start anywhere."""

_MOST_NEIGHBOURS = 12
"""Neighbours of one variable by which a region grows: hubs would fill it with what has nothing else in common."""

_PRICE_FACTORS = (0.0, 0.3, 0.7, 1.0, 1.3)
_REPAIRING_FACTORS = (0.7, 1.0, 3.0, 10.0)
_REPAIRING_PRICE = 0.3
"""Of the mean price: what memory costs beside its price at each time while no feasible assignment is known."""

_MOST_ENTRIES = 20_000
_ATTEMPTS = 4
_FIRST_SURCHARGE, _SURCHARGE_GROWTH = 0.3, 4.0
"""Of the mean price: what times become dearer by at which too much is held, and how that grows by attempt."""

_TOLERANCE = 0.01
"""Share of the best cost by which the present one may be above it at the start."""

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Profile:
    """What a variable holds: at some times the amount changes.

    Attributes:
        times: When it does [c].
        changes: By how much in each state [c, states]; they add up to nothing.
    """

    times: IntArray
    changes: FloatArray


class LocalSearch:
    """An assignment that becomes cheaper region by region.

    Attributes:
        best_states: Of the cheapest feasible assignment found; of the present one while there is none.
        best_cost: Its cost; inf while there is none.
        num_moves: Regions assigned anew.
    """

    def __init__(
        self, problem: AssignmentProblem, core: Core, timeline: Timeline, states: IntArray, prices: FloatArray
    ) -> None:
        """Prepares the graph.

        Args:
            problem: What is solved.
            core: Its variables.
            timeline: When they hold memory.
            states: Where the search starts; it need not be feasible [v].
            prices: Of a unit of memory at each time [times].
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
        self._neighbours = [list(own) for own in self._beside]
        self._profiles = _profiles(problem, core, timeline, num_variables)
        self._given_prices = prices
        self._paid_until = np.cumsum(prices)
        self._total_price = float(self._paid_until[-1]) if len(prices) else 0.0
        positive = prices[prices > 0.0]
        mean_cost = abs(self._sum.of(states)) / max(problem.limit, 1.0) / max(timeline.size, 1)
        self._mean_price = float(positive.mean()) if len(positive) else mean_cost
        self._prices = prices + _REPAIRING_PRICE * self._mean_price
        self._base = timeline.held(core.base)
        self.best_states = states.copy()
        self.best_cost = math.inf
        self.num_moves = 0
        self._set(states)

    def run(
        self, spent: Callable[[], float], *, bound: float, gap: float, rng: Generator, report: Callable[[], None]
    ) -> None:
        """Moves until all is spent, or the cost comes close to the bound.

        Args:
            spent: The share of the time that is spent; called once for each move.
            bound: No assignment costs less.
            gap: Share of the cost that it may be above the bound.
            rng: Chooses the regions.
            report: Called at every improvement.
        """
        while (share := spent()) < 1.0 and not is_close(self.best_cost, bound, gap):
            tolerance = _TOLERANCE * (1.0 - share) ** 1.5
            near = tolerance * abs(self.best_cost) if self._is_found else 0.0
            factor = float(rng.choice(_PRICE_FACTORS if self._is_found else _REPAIRING_FACTORS))
            is_tried = rng.random() < _TRIED_SHARE
            size = int(rng.integers(1, _MOST_TRIED + 1)) if is_tried else int(rng.choice(_REGION_SIZES))
            region = self._region(size, self._seeds(int(rng.integers(1, _MOST_SEEDS + 1)), rng), rng)
            (self._try_all if is_tried else self._eliminate)(region, factor, near)
            self.num_moves += 1
            if self._note():
                report()
            elif self._cost > self.best_cost + 2.0 * _TOLERANCE * abs(self.best_cost):
                self._set(self.best_states)

    @property
    def _is_found(self) -> bool:
        """Whether a feasible assignment is known."""
        return math.isfinite(self.best_cost)

    def _set(self, states: IntArray) -> None:
        self._states = states.tolist()
        self._cost = self._sum.of(states)
        self._over = self._base + self._timeline.held(held_by_node(self._core, states)) - self._limit
        self._note()

    def _note(self) -> bool:
        """Keeps the present assignment if it is feasible and the best."""
        if self._over.max(initial=0.0) > 0.0 or self._cost >= 0.5 * self._forbidden:
            return False
        if not self._cost < self.best_cost - _ROUNDING * abs(self._cost):
            return False
        self.best_cost, self.best_states = self._cost, np.array(self._states, dtype=np.int64)
        self._prices = self._given_prices
        return True

    def _seeds(self, number: int, rng: Generator) -> list[int]:
        """Some variables: any, or those that hold memory when it is dear, or those that make the present infeasible."""
        pool: IntArray | None = None
        if rng.random() < (_AIMED_SHARE if self._is_found else _REPAIRING_SHARE):
            is_over = self._over > 0.0
            if is_over.any():
                pool = self._held_at(int(rng.choice(np.flatnonzero(is_over))))
            elif self._cost >= 0.5 * self._forbidden:
                pool = self._sum.forbidden_ends(np.array(self._states, dtype=np.int64))
            elif self._total_price > 0.0:
                paid = float(rng.random()) * self._total_price
                pool = self._held_at(int(np.searchsorted(self._paid_until, paid, side="right")))
        if pool is None or not len(pool):
            return [int(seed) for seed in rng.integers(0, len(self._sizes), number)]
        return [int(seed) for seed in rng.choice(pool, number)]

    def _held_at(self, when: int) -> IntArray:
        """The variables of nodes that hold memory at a time, once for each node."""
        timeline, variable_of = self._timeline, self._core.variable_of
        return variable_of[(timeline.first <= when) & (when < timeline.end) & (variable_of >= 0)]

    def _region(self, size: int, seeds: list[int], rng: Generator) -> list[int]:
        """Some variables around others, in ascending order."""
        border = list(seeds)
        found: set[int] = set()
        while border and len(found) < size:
            place = int(rng.random() * len(border))
            variable = border[place]
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
        """Gives a small region the best of all combinations that fit, if that is worth it."""
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
        costs, paid = np.zeros(sizes), np.zeros(sizes)
        more = np.zeros((len(times), *sizes))
        for place, profile in enumerate(profiles):
            shape = [-1 if place == other else 1 for other in range(len(region))]
            costs += own[place].reshape(shape)
            if profile is not None:
                paid -= (total_prices[profile.times] @ profile.changes).reshape(shape)
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
        """Assigns a region anew if that is worth it; whether it was.

        Args:
            region: The variables.
            values: Their new states.
            over: What all then hold above the limit [times].
            dearer: What the assignment then costs more.
            factor: What a unit of memory is worth, in prices.
            change: What all then hold more [times].
            tolerance: How much above the best cost it may be.
        """
        if not self._is_worth(over, dearer, factor * float(self._prices @ change), tolerance):
            return False
        for variable, value in zip(region, values, strict=True):
            self._states[variable] = value
        self._over = over
        self._cost += dearer
        return True

    def _eliminate(self, region: list[int], factor: float, tolerance: float) -> None:
        """Assigns a region anew by elimination, if that is worth it."""
        now = [self._states[variable] for variable in region]
        own, pairs = self._terms(region)
        sizes = [self._sizes[variable] for variable in region]
        order = cheapest_order(sizes, [(first, second) for first, second, _ in pairs], most_entries=_MOST_ENTRIES)
        pairs = _conditioned(own, pairs, order.fixed, now)
        between = [Term(scope=(first, second), table=table) for first, second, table in pairs]

        def cost_of(values: list[int]) -> float:
            alone = sum(own[place][values[place]] for place in order.variables)
            return float(alone + sum(table[values[first], values[second]] for first, second, table in pairs))

        prices = factor * self._prices
        over = self._over
        for attempt in range(_ATTEMPTS):
            if attempt or over.max(initial=0.0) > 0.0:
                prices = prices + (over > 0.0) * (self._mean_price * _FIRST_SURCHARGE * _SURCHARGE_GROWTH**attempt)
            total = np.concatenate([[0.0], np.cumsum(prices)])
            alone = [
                Term(scope=(place,), table=own[place] + self._paid(region[place], total)) for place in order.variables
            ]
            values = list(least(sizes, [*alone, *between], order.variables).values)
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
        if self._over.max(initial=0.0) > 0.0:
            return float(over.clip(min=0.0).sum()) < float(self._over.clip(min=0.0).sum())
        if over.max(initial=0.0) > 0.0:
            return False
        least_gain = -_ROUNDING * abs(self._cost)
        is_near = self._cost + dearer <= self.best_cost + tolerance
        return dearer < least_gain or (is_near and dearer + paid_more < least_gain)

    def _terms(self, region: list[int]) -> tuple[list[FloatArray], list[tuple[int, int, FloatArray]]]:
        """What each variable of a region costs by itself and beside those that stay; the edges within."""
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

    def _paid(self, variable: int, total_prices: FloatArray) -> FloatArray | float:
        """What each state pays for its memory: what is held from a change on is paid for from then on."""
        profile = self._profiles[variable]
        return 0.0 if profile is None else -(total_prices[profile.times] @ profile.changes)

    def _held_more(self, moves: list[tuple[int, int, int]]) -> FloatArray:
        """By how much more variables hold at each time: each with its state now and then."""
        changes = np.zeros(self._timeline.size + 1)
        for variable, now, then in moves:
            profile = self._profiles[variable]
            if profile is not None:
                changes[profile.times] += profile.changes[:, then] - profile.changes[:, now]
        return np.cumsum(changes)[:-1]


def _above_all(core: Core) -> float:
    """A cost far above that of any assignment, which makes each forbidden choice the worst; finite, to be summed."""
    dearest = np.abs(core.costs).sum() + abs(core.constant)
    dearest += sum(float(np.abs(table[np.isfinite(table)]).max()) for table in core.edges.values())
    return 10.0 * float(dearest) + 1.0


def _conditioned(
    own: list[FloatArray], pairs: list[tuple[int, int, FloatArray]], fixed: frozenset[int], now: list[int]
) -> list[tuple[int, int, FloatArray]]:
    """The edges between variables that are not fixed; the others' costs are added to their free ends' own."""
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
    members: list[list[int]] = [[] for _ in range(num_variables)]
    for node in np.flatnonzero((core.variable_of >= 0) & (timeline.end > timeline.first)).tolist():
        members[core.variable_of[node]].append(node)
    profiles: list[_Profile | None] = []
    for own in members:
        if not own:
            profiles.append(None)
            continue
        usages = np.stack([problem.usages[problem.starts[node] + core.strategies[node]] for node in own])
        times, place = np.unique(np.concatenate([timeline.first[own], timeline.end[own]]), return_inverse=True)
        changes = np.zeros((len(times), usages.shape[1]))
        np.add.at(changes, place, np.concatenate([usages, -usages]))
        keep = changes.any(axis=1)
        profiles.append(_Profile(times=times[keep], changes=changes[keep]))
    return profiles
