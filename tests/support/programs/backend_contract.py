"""Contract of all backends; the test file of a backend subclasses `BackendContract` and gives two fixtures."""

import math
import pickle

import pytest

from costmodels.job.proxy_job import Reduction
from trials.backend import MAX_LOG_TAIL, Observation, Status, TrialAbility

SMALLER = Reduction(hosts=1, layers=8, global_batch_size=16)


class BackendContract:
    """Tests that every backend passes. Subclass it and give the fixtures `backend` and `grid` (valid candidates)."""

    def test_observes_every_valid_candidate(self, backend, grid, capfd):
        """A valid candidate gives an observation with step times or the reason for their lack, and prints nothing.

        The times are positive and finite, and each was reported as its step ended, as many as were expected.
        """
        for position in range(len(grid)):
            config, reported = grid.config(position), []
            observation = backend.measure(config, trial_number=position, on_step=reported.append)

            assert isinstance(observation, Observation)
            assert observation.origin == backend.origin
            assert len(observation.log_tail) <= MAX_LOG_TAIL
            assert tuple(reported) == observation.step_times_s
            assert all(0 < seconds < math.inf for seconds in observation.step_times_s)
            assert (observation.step_time_s is not None) == (observation.status is Status.OK)
            if observation.status is Status.OK:
                assert backend.expected_steps(config) in (None, len(reported))
            else:
                assert observation.reason

        assert capfd.readouterr().out == ""

    def test_a_smaller_job_is_measured_in_the_same_way_or_not_at_all(self, backend):
        """The backend of a smaller job has the same origin and abilities; one that cannot measure it is not asked."""
        if TrialAbility.PROXIES not in backend.abilities:
            with pytest.raises(AssertionError, match="its own job only"):
                backend.reduced(SMALLER)
            return

        smaller = backend.reduced(SMALLER)

        assert (smaller.origin, smaller.abilities) == (backend.origin, backend.abilities)


class RepeatableBackendContract(BackendContract):
    """Further tests for backends that simulate or replay times; real backends measure anew each time."""

    def test_the_same_candidate_gives_the_same_observation(self, backend, grid):
        """Neither the trial's number nor the process changes what a configuration gives."""
        copy = pickle.loads(pickle.dumps(backend))  # noqa: S301 # our own bytes

        for position in range(len(grid)):
            config = grid.config(position)

            assert backend.measure(config, trial_number=1) == copy.measure(config, trial_number=2)

    def test_a_backend_pickles(self, backend):
        """It reaches its workers as it is, and so does that of a smaller job."""
        smaller = [backend.reduced(SMALLER)] if TrialAbility.PROXIES in backend.abilities else []

        for one in (backend, *smaller):
            assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301 # our own bytes
