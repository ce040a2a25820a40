import dataclasses
import math

import pytest

from hardware.io.errors import ConfigError
from tests.support.graphs.partition import HARD, HARD_OPTIMUM
from tests.support.settings import worker_tasks
from tuner.planners.engine.branch_and_bound import branch_and_bound
from tuner.planners.engine.outcome import Known
from tuner.planners.engine.workers import InProcessWorkers, ProcessWorkers


class WorkersContract:
    """What every kind of workers does; a subclass gives the fixture `workers`."""

    def test_results_come_in_the_order_of_the_tasks(self, workers):
        """Every task's result stands at the place of its task, also if there are more tasks than workers, or none."""
        assert workers.map(worker_tasks.squared, range(7)) == [0, 1, 4, 9, 16, 25, 36]
        assert workers.map(worker_tasks.squared, []) == []

    def test_a_failure_is_raised_where_it_was_asked_for(self, workers):
        """What the function raises ends the map."""
        with pytest.raises(ValueError, match="one too many"):
            workers.map(worker_tasks.failing, [1, 2, 3])

    def test_the_bound_begins_where_it_is_told(self, workers):
        """A task sees the cost that is known already, and none of an earlier map."""
        workers.map(worker_tasks.lowered, [1.0])

        assert workers.map(worker_tasks.bound_seen, [0]) == [math.inf]
        assert workers.map(worker_tasks.bound_seen, [0], best_known=3.5) == [3.5]

    def test_the_bound_only_falls(self, workers):
        """An offer above the bound changes nothing, one below it is known at once where it was made."""
        assert workers.map(worker_tasks.lowered, [5.0], best_known=3.5) == [3.5]
        assert workers.map(worker_tasks.lowered, [2.0], best_known=3.5) == [2.0]

    def test_what_one_offers_the_others_see(self, workers):
        """An offer reaches tasks that run at the same time or later."""
        assert workers.map(worker_tasks.offer_or_wait, range(2), best_known=10.0) == [7.0, 7.0]

    def test_a_search_together_ends_as_one_alone(self, workers):
        """Searched by several, a problem has the same optimum, and its lack of a solution is found too."""
        together = branch_and_bound(HARD, workers=workers)
        too_full = branch_and_bound(dataclasses.replace(HARD, capacity=HARD_OPTIMUM - 1), workers=workers)

        assert (together.known, together.best.cost) == (Known.OPTIMAL, HARD_OPTIMUM)
        assert (too_full.known, too_full.best) == (Known.INFEASIBLE, None)


class TestInProcessWorkers(WorkersContract):
    @pytest.fixture(scope="class")
    @classmethod
    def workers(cls):
        """This process."""
        with InProcessWorkers() as workers:
            yield workers


class TestProcessWorkers(WorkersContract):
    @pytest.fixture(scope="class")
    @classmethod
    def workers(cls):
        """Two processes."""
        with ProcessWorkers(2) as workers:
            yield workers


def test_no_workers_are_a_mistake():
    """Fewer than one worker is refused in words."""
    with pytest.raises(ConfigError, match="num_workers = 0: must be at least 1"):
        ProcessWorkers(0)
