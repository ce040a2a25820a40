"""Solver of strategy assignments: contraction, then rounds of prices and messages and of large neighbourhoods.

Large steps of the prices lead to a first feasible assignment. Each round then begins with a cycle of sweeps, whose best
assignment starts a new walk through large neighbourhoods. It competes with the best walk so far, for equal work. A
challenger that gains too slowly to overtake gives way to the next round's. Rounds become longer. What a round does
depends on counted work only: a limit of time cuts the same way off sooner or later.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from hardware.arrays import IntArray
from hardware.io.errors import ConfigError
from tuner.planners.assignment.contraction import Core, contract
from tuner.planners.assignment.multipliers import Ascent
from tuner.planners.assignment.neighbourhoods import LocalSearch, Walk
from tuner.planners.assignment.problem import AssignmentProblem, is_close
from tuner.planners.assignment.timeline import Timeline, timeline_of
from tuner.planners.assignment.work import Meter
from tuner.planners.engine.outcome import ROUNDING, Incumbent, Known, Limits, Outcome, Progress, Stop

_MOST_TRIED = 500
"""Most assignments of a core of which all are tried."""

_FIRST_SWEEPS = 60
"""Number of sweeps of the first cycle."""
_GROWTH = 1.5
"""Growth of the work of a round over the last one's."""
_MOVING = 1.5
"""Work of the first round's moves, as a multiple of its sweeps'."""
_CHALLENGING = 0.35
"""Fraction of the moves' work that goes to the challenger of the best walk."""
_LEAST_RISE = 0.01
"""Rise of the bound in one cycle, as a fraction of it, for which the next cycle is longer."""


def solve(
    problem: AssignmentProblem,
    *,
    limits: Limits,
    rng: Generator,
    start_s: float | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome[IntArray]:
    """Find the cheapest assignment within the limits, and a lower bound of all assignments.

    Args:
        problem: Problem to solve.
        limits: Limits of seconds, of sweeps and moves (`nodes`), and the gap to the bound at which the search ends.
            Without a limit of time, equal arguments give equal assignments.
        rng: Source of the random choices.
        start_s: Time at which the limit of time begins to run, on `clock`; None for now.
        is_stopped: Function that is asked between steps; the search ends once it returns True.
        clock: Function that returns the time [s].

    Raises:
        ConfigError: neither the time nor the number of sweeps and moves is limited.
    """
    if math.isinf(limits.time_s) and math.isinf(limits.nodes):
        raise ConfigError("must be limited where nodes are not", key="limits.time_s", value=limits.time_s)
    meter = Meter(limits, clock() if start_s is None else start_s, is_stopped, clock)
    # Contraction finds problems in which every assignment is forbidden, and the leanest strategies those without
    # memory.
    core = contract(problem)
    timeline = timeline_of(problem)
    if core is None or _never_fits(problem):
        return _outcome(problem, None, math.inf, meter, [], limits, is_stopped)
    trace: list[Progress] = []
    gap = max(limits.gap, ROUNDING)
    if math.prod(np.diff(core.starts).tolist()) <= _MOST_TRIED:
        strategies = _best_of_all(problem, core)
        bound = math.inf if strategies is None else problem.cost_of(strategies)
        return _outcome(problem, strategies, bound, meter, trace, limits, is_stopped)
    states, bound = _search(problem, core, timeline, gap, meter, rng, trace)
    return _outcome(problem, core.lift(states), bound, meter, trace, limits, is_stopped)


def _search(
    problem: AssignmentProblem,
    core: Core,
    timeline: Timeline,
    gap: float,
    meter: Meter,
    rng: Generator,
    trace: list[Progress],
) -> tuple[IntArray, float]:
    """Search by prices and messages and by large neighbourhoods in turns; return the best states and the bound."""
    ascent = Ascent(core, timeline, problem.limit)
    least = math.inf

    def report(cost: float) -> None:
        """Append an assignment to the trace if it is the cheapest so far."""
        nonlocal least
        if cost < least or not trace:
            least = min(least, cost)
            trace.append(Progress(seconds=meter.seconds, nodes=meter.steps, cost=least, bound=ascent.bound))

    ascent.dive(meter.phase(math.inf))
    report(ascent.cost)
    local = LocalSearch(problem, core, timeline)

    def move(walk: Walk, work: float) -> Walk:
        """Go on with a walk for some work."""
        spent = meter.phase(work)
        return local.run(walk, spent, bound=ascent.bound, gap=gap, rng=rng, report=lambda: report(local.best_cost))

    best = Walk(states=ascent.states, cost=ascent.cost, prices=ascent.prices)
    challenger: Walk | None = None
    sweeping = _FIRST_SWEEPS * ascent.sweep_work
    moving = _MOVING * sweeping
    while not (meter.is_over or is_close(best.cost, ascent.bound, gap)):
        former = ascent.bound
        ascent.run(meter.phase(sweeping), gap=gap)
        report(ascent.cost)
        newcomer = Walk(states=ascent.states, cost=ascent.cost, prices=ascent.prices)
        is_useful = newcomer.cost < best.cost or ascent.bound - former > _LEAST_RISE * abs(former)
        if newcomer.cost < best.cost:
            best, newcomer = newcomer, best
        if challenger is None or newcomer.cost < challenger.cost:
            challenger = newcomer
        best = move(best, (1.0 - _CHALLENGING) * moving)
        before = challenger.cost
        challenger = move(challenger, _CHALLENGING * moving)
        if challenger.cost < best.cost:
            best, challenger = challenger, best
        # As much again as it gained in this round would not take the challenger past the best walk.
        elif math.isfinite(before) and 2.0 * challenger.cost - before > best.cost:
            challenger = None
        # Longer cycles pay only while they still find something.
        sweeping *= _GROWTH if is_useful else 1.0
        moving *= _GROWTH
    return best.states, ascent.bound


def _best_of_all(problem: AssignmentProblem, core: Core) -> IntArray | None:
    """Try all assignments, and return the cheapest feasible one; None if there is none."""
    found: IntArray | None = None
    least = math.inf
    for states in itertools.product(*map(range, np.diff(core.starts).tolist())):
        strategies = core.lift(np.array(states, dtype=np.int64))
        cost = problem.cost_of(strategies)
        if cost < least and problem.is_feasible(strategies):
            found, least = strategies, cost
    return found


def _never_fits(problem: AssignmentProblem) -> bool:
    """Return whether even the strategies of least memory exceed the limit."""
    if problem.num_nodes == 0:
        return False
    leanest = [int(own.argmin()) for own in np.split(problem.usages, problem.starts[1:-1])]
    return problem.peak_usage(leanest) > problem.limit


def _outcome(
    problem: AssignmentProblem,
    strategies: IntArray | None,
    bound: float,
    meter: Meter,
    trace: list[Progress],
    limits: Limits,
    is_stopped: Callable[[], bool],
) -> Outcome[IntArray]:
    """Return the assignment with its status and the reason for stopping."""
    best = None
    if strategies is not None and problem.is_feasible(strategies):
        best = Incumbent(cost=problem.cost_of(strategies), solution=strategies)
    cost = math.inf if best is None else best.cost
    if best is not None:
        bound = min(bound, cost)  # a bound above a cost is one by rounding alone
    # Without an assignment, an infinite bound proves that there is none.
    if best is None:
        known = Known.INFEASIBLE if bound == math.inf else Known.UNKNOWN
    else:
        known = Known.OPTIMAL if cost - bound <= ROUNDING * abs(cost) else Known.FEASIBLE
    if known in {Known.OPTIMAL, Known.INFEASIBLE}:
        stop = Stop.EXHAUSTED
    elif is_close(cost, bound, limits.gap):
        stop = Stop.GAP
    else:
        stop = Stop.NODES if meter.steps >= limits.nodes and not is_stopped() else Stop.TIME
    trace.append(Progress(seconds=meter.seconds, nodes=meter.steps, cost=cost, bound=bound))
    return Outcome(
        known=known,
        stop=stop,
        best=best,
        bound=bound,
        nodes=meter.steps,
        dominated=0,
        seconds=meter.seconds,
        trace=tuple(trace),
    )
