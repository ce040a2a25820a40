"""Solver of strategy assignments: contraction, then prices and messages, then large neighbourhoods."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from benchmarks.assignment.contraction import Core, contract
from benchmarks.assignment.multipliers import Ascent
from benchmarks.assignment.neighbourhoods import LocalSearch
from benchmarks.assignment.problem import AssignmentProblem, is_close
from benchmarks.assignment.timeline import Timeline, timeline_of
from hardware.arrays import IntArray
from hardware.io.errors import ConfigError
from tuner.planners.engine.outcome import ROUNDING, Incumbent, Known, Limits, Outcome, Progress, Stop

_MOST_TRIED = 500
"""Most assignments of a core of which all are tried."""

_ASCENT_SHARE = 0.4
"""Fraction of the limits that prices and messages may spend."""

_TO_FINISH_S, _TO_FINISH_SHARE = 0.5, 0.01
"""Time reserved for the last checks: seconds, and a fraction of the limit, beside twice the longest step so far."""


class _Meter:
    """Meter of the limits; everything counts as spent once `is_stopped` returns True.

    Attributes:
        steps: Number of sweeps and moves so far.
    """

    def __init__(self, limits: Limits, start_s: float, is_stopped: Callable[[], bool]) -> None:
        """Begin to count."""
        self._limits, self._is_stopped, self._start_s = limits, is_stopped, start_s
        self.steps = 0

    @property
    def seconds(self) -> float:
        """Time since the start [s]."""
        return time.perf_counter() - self._start_s

    def phase(self, share: float) -> Callable[[], float]:
        """Begin a phase that may spend a fraction of what is left; return the function that tells how much is spent.

        The function must be called once per step. Long steps end a phase early, so that the next one does not pass the
        limit.
        """
        begin_s, begin_steps = time.perf_counter(), self.steps
        end_s = self._start_s + (1.0 - _TO_FINISH_SHARE) * self._limits.time_s - _TO_FINISH_S
        num_steps = share * (self._limits.nodes - begin_steps)
        last_s, longest_s = begin_s, 0.0

        def spent() -> float:
            """Count one step, and return the fraction of the phase that is spent."""
            nonlocal last_s, longest_s
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
            self.steps += 1
            # Another step may take as long as the longest one so far, twice for safety.
            left_s = end_s - now_s - 2.0 * longest_s
            if self._is_stopped() or left_s <= 0.0 or num_steps <= 0.0:
                return 1.0
            # The limit that is nearer decides: of time, or of steps.
            by_time = (now_s - begin_s) / (share * (end_s - begin_s))
            return min(1.0, max(by_time, (self.steps - begin_steps) / num_steps))

        return spent


def solve(
    problem: AssignmentProblem,
    *,
    limits: Limits,
    rng: Generator,
    start_s: float | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Outcome[IntArray]:
    """Find the cheapest assignment within the limits, and a lower bound of all assignments.

    Args:
        problem: Problem to solve.
        limits: Limits of seconds, of sweeps and moves (`nodes`), and the gap to the bound at which the search ends.
            Without a limit of time, equal arguments give equal assignments.
        rng: Source of the random choices.
        start_s: Time when the clock began to run, from `time.perf_counter`; None for now.
        is_stopped: Function that is asked between steps; the search ends once it returns True.

    Raises:
        ConfigError: neither the time nor the number of sweeps and moves is limited.
    """
    if math.isinf(limits.time_s) and math.isinf(limits.nodes):
        raise ConfigError("must be limited where nodes are not", key="limits.time_s", value=limits.time_s)
    meter = _Meter(limits, time.perf_counter() if start_s is None else start_s, is_stopped)
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
    meter: _Meter,
    rng: Generator,
    trace: list[Progress],
) -> tuple[IntArray, float]:
    """Search by prices and messages, then by large neighbourhoods; return the best states and the bound."""
    ascent = Ascent(core, timeline, problem.limit)
    ascent.run(meter.phase(_ASCENT_SHARE), gap=gap)
    trace.append(Progress(seconds=meter.seconds, nodes=meter.steps, cost=ascent.cost, bound=ascent.bound))
    if is_close(ascent.cost, ascent.bound, gap):
        return ascent.states, ascent.bound
    local = LocalSearch(problem, core, timeline, ascent.states, ascent.prices)

    def report() -> None:
        """Append the best assignment to the trace."""
        trace.append(Progress(seconds=meter.seconds, nodes=meter.steps, cost=local.best_cost, bound=ascent.bound))

    local.run(meter.phase(1.0), bound=ascent.bound, gap=gap, rng=rng, report=report)
    return local.best_states, ascent.bound


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
    meter: _Meter,
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
