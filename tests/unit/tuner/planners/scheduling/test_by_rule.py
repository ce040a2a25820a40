"""Schedules by simple rules, and the search that begins with them."""

import numpy as np
import pytest

from tests.oracles.schedule_check import violations
from tests.support.graphs.workloads import link, random_workload, workload
from tuner.planners.engine.branch_and_bound import branch_and_bound
from tuner.planners.engine.outcome import Limits
from tuner.planners.scheduling.by_rule import by_heft, on_one_device
from tuner.planners.scheduling.ranks import upward_ranks_s
from tuner.planners.scheduling.search import SchedulingProblem
from tuner.planners.scheduling.tables import schedule_tables

EXEC_S = (
    *((14, 16, 9), (13, 19, 18), (11, 13, 19), (13, 8, 17), (12, 13, 10)),
    *((13, 16, 9), (7, 15, 11), (5, 11, 14), (18, 12, 20), (21, 7, 16)),
)
SENT_S = {
    (0, 1): 18,
    (0, 2): 12,
    (0, 3): 9,
    (0, 4): 11,
    (0, 5): 14,
    (1, 7): 19,
    (1, 8): 16,
    (2, 6): 23,
    (3, 7): 27,
    (3, 8): 23,
    (4, 8): 13,
    (5, 7): 15,
    (6, 9): 17,
    (7, 9): 11,
    (8, 9): 13,
}
RANKS_S = (108, 77, 80, 80, 69, 63.333, 42.667, 35.667, 44.333, 14.667)


def published():
    """Return the example of Topcuoglu et al. 2002, figure 2: ten tasks on three processors without contention."""
    pairs = [(source, target) for source in range(3) for target in range(3) if source != target]
    links = tuple(link(*pair, group="one of them") for pair in pairs for _ in range(5))
    return workload(EXEC_S, list(SENT_S), data_bytes=np.array(list(SENT_S.values()), dtype=np.float64), links=links)


def test_heft_gives_its_published_schedule():
    """The example of HEFT's paper has its upward ranks (table 2) and its makespan of 80."""
    of = published()

    assert upward_ranks_s(of, schedule_tables(of)) == pytest.approx(RANKS_S, abs=1e-3)
    assert by_heft(of).cost == 80


@pytest.mark.parametrize("seed", range(15))
def test_rules_give_schedules_that_the_search_is_no_worse_than(seed):
    """What a rule finds breaks no limit, and a search that begins with it costs no more even if stopped at once."""
    of = random_workload(np.random.default_rng(seed), num_ops=5, num_devices=3, num_splits=1, num_fusions=1)
    found = [one for one in (on_one_device(of), by_heft(of)) if one is not None]
    known = [one.solution for one in found]
    started = branch_and_bound(SchedulingProblem(of, known=known), limits=Limits(nodes=0))

    assert all(violations(of, schedule) == [] for schedule in known)
    assert all(started.best.cost <= one.cost for one in found)


def test_one_device_runs_the_weightier_model_first():
    """Of two models on the faster device the one with less time per weight comes first, which costs least."""
    of = workload([[4, 5], [2, 3]], model_of=np.array([0, 1]), weights=np.array([1.0, 1.0]))

    best = on_one_device(of)

    assert best.solution.devices() == {0: 0, 1: 0}
    assert best.solution.completion_s(of).tolist() == [6, 2]


def test_no_device_that_can_run_everything_is_no_schedule():
    """Without a device for all operators, or a link between the two that are needed, the rules find nothing."""
    of = workload([[1.0, np.inf], [np.inf, 1.0]], [(0, 1)])

    assert on_one_device(of) is None
    assert by_heft(of) is None
