"""Schedules that are run again with exact times."""

import numpy as np
import pytest

from tests.oracles.schedule_check import violations
from tests.support.graphs.workloads import random_workload, workload
from tuner.planners.engine.branch_and_bound import branch_and_bound
from tuner.planners.scheduling.problem import Run, Schedule
from tuner.planners.scheduling.program import is_small, schedule_by_milp
from tuner.planners.scheduling.replay import replayed
from tuner.planners.scheduling.search import SchedulingProblem


def rounded(schedule, rng):
    """Return the schedule with starts and ends that are a little off, as a solver has them."""
    off = [
        tuple(event._replace(start_s=event.start_s + rng.uniform(-1e-6, 1e-6)) for event in events)
        for events in (schedule.runs, schedule.transfers)
    ]
    return Schedule(runs=off[0], transfers=off[1])


@pytest.mark.parametrize("seed", range(12))
def test_decisions_of_a_schedule_give_its_exact_cost(seed):
    """An optimal schedule whose times were rounded is found again, with splits and fusions, and breaks nothing."""
    rng = np.random.default_rng(seed)
    of = random_workload(rng, num_ops=5, num_devices=3, num_splits=1, num_fusions=1)
    best = branch_and_bound(SchedulingProblem(of)).best
    if best is None:
        return
    again = replayed(of, rounded(best.solution, rng))

    assert again.cost == pytest.approx(best.cost, rel=1e-9)
    assert violations(of, again.solution) == []


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_of_highs_is_cheaper_than_the_proven_bound(seed):
    """The exact cost of HiGHS's decisions is never below the bound, although its own times may be."""
    of = random_workload(np.random.default_rng(seed), num_ops=4, num_devices=3)
    bound = branch_and_bound(SchedulingProblem(of)).bound
    theirs = schedule_by_milp(of).best
    again = None if theirs is None else replayed(of, theirs.solution)

    assert again is None or again.cost >= bound * (1 - 1e-12)


def test_decisions_that_do_not_fit_are_no_schedule():
    """Two operators whose memory exceeds their device's by more than rounding are no schedule."""
    of = workload([[1.0], [1.0]], memory_bytes=np.array([6.0, 6.0]), capacity_bytes=np.array([10.0]))
    runs = tuple(Run(ops=(op,), devices=(0,), start_s=float(op), end_s=op + 1.0) for op in (0, 1))

    assert replayed(of, Schedule(runs=runs, transfers=())) is None


def test_times_that_highs_cannot_tell_apart_make_no_small_problem():
    """Operators of a microsecond beside one of an hour are beyond HiGHS's tolerances."""
    assert is_small(workload([[1.0], [1e-3]]))
    assert not is_small(workload([[3600.0], [1e-6]]))
