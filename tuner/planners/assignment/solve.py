"""Solves assignment problems: contraction, then prices and messages, then large neighbourhoods."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from hardware.arrays import IntArray
from hardware.io.errors import ConfigError
from tuner.planners.assignment.contraction import Core, contracted
from tuner.planners.assignment.multipliers import Ascent
from tuner.planners.assignment.neighbourhoods import LocalSearch
from tuner.planners.assignment.problem import AssignmentProblem, is_close
from tuner.planners.assignment.timeline import Timeline, timeline_of
from tuner.planners.engine.outcome import ROUNDING, Incumbent, Known, Limits, Outcome, Progress, Stop

_MOST_TRIED = 500
"""Assignments of a core up to which all are tried."""

_ASCENT_SHARE = 0.4
"""Of what the limits leave: for prices and messages."""

_TO_FINISH_S, _TO_FINISH_SHARE = 0.5, 0.01
"""Seconds, and the share of the limit, for the last checks, beside twice the longest step so far."""


class _Meter:
    """How much of the limits is spent; once `is_stopped` says so, everything is."""

    def __init__(self, limits: Limits, start_s: float, is_stopped: Callable[[], bool]) -> None:
        self._limits, self._is_stopped, self._start_s = limits, is_stopped, start_s
        self.steps = 0

    @property
    def seconds(self) -> float:
        """Since the time began to run."""
        return time.perf_counter() - self._start_s

    def phase(self, share: float) -> Callable[[], float]:
        """A phase that begins now, and may spend a share of what is left; it asks once a step how much of it is spent.

        Steps that take long end a phase before its time, so that the next one does not pass the limit.
        """
        begin_s, begin_steps = time.perf_counter(), self.steps
        end_s = self._start_s + (1.0 - _TO_FINISH_SHARE) * self._limits.time_s - _TO_FINISH_S
        num_steps = share * (self._limits.nodes - begin_steps)
        last_s, longest_s = begin_s, 0.0

        def spent() -> float:
            nonlocal last_s, longest_s
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
            self.steps += 1
            left_s = end_s - now_s - 2.0 * longest_s
            if self._is_stopped() or left_s <= 0.0 or num_steps <= 0.0:
                return 1.0
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
    """The cheapest assignment found within the limits, and a bound below all of them.

    Args:
        problem: What is to be assigned.
        limits: Seconds, sweeps and moves (`nodes`), and the gap to the bound at which the search ends. Without a limit
            on the time, equal arguments give equal assignments.
        rng: Chooses the neighbourhoods.
        start_s: When the time began to run, as `time.perf_counter` tells it; None for now.
        is_stopped: Asked between steps; once it says so, the best assignment so far is returned.

    Raises:
        ConfigError: If neither the time nor the number of sweeps and moves is limited.
    """
    if math.isinf(limits.time_s) and math.isinf(limits.nodes):
        raise ConfigError("must be limited where nodes are not", key="limits.time_s", value=limits.time_s)
    meter = _Meter(limits, time.perf_counter() if start_s is None else start_s, is_stopped)
    core = contracted(problem)
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
    return _outcome(problem, core.lifted(states), bound, meter, trace, limits, is_stopped)


def _search(
    problem: AssignmentProblem,
    core: Core,
    timeline: Timeline,
    gap: float,
    meter: _Meter,
    rng: Generator,
    trace: list[Progress],
) -> tuple[IntArray, float]:
    ascent = Ascent(core, timeline, problem.limit)
    ascent.run(meter.phase(_ASCENT_SHARE), gap=gap)
    trace.append(Progress(seconds=meter.seconds, nodes=meter.steps, cost=ascent.cost, bound=ascent.bound))
    if is_close(ascent.cost, ascent.bound, gap):
        return ascent.states, ascent.bound
    local = LocalSearch(problem, core, timeline, ascent.states, ascent.prices)

    def report() -> None:
        trace.append(Progress(seconds=meter.seconds, nodes=meter.steps, cost=local.best_cost, bound=ascent.bound))

    local.run(meter.phase(1.0), bound=ascent.bound, gap=gap, rng=rng, report=report)
    return local.best_states, ascent.bound


def _best_of_all(problem: AssignmentProblem, core: Core) -> IntArray | None:
    """The cheapest of all feasible assignments; None if there is none."""
    found: IntArray | None = None
    least = math.inf
    for states in itertools.product(*map(range, np.diff(core.starts).tolist())):
        strategies = core.lifted(np.array(states, dtype=np.int64))
        cost = problem.cost_of(strategies)
        if cost < least and problem.is_feasible(strategies):
            found, least = strategies, cost
    return found


def _never_fits(problem: AssignmentProblem) -> bool:
    """Whether even the leanest strategies hold too much."""
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
    best = None
    if strategies is not None and problem.is_feasible(strategies):
        best = Incumbent(cost=problem.cost_of(strategies), solution=strategies)
    cost = math.inf if best is None else best.cost
    if best is not None:
        bound = min(bound, cost)  # a bound above a cost is one by rounding alone
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
