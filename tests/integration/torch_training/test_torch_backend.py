import dataclasses
import os
import pickle
import signal
from pathlib import Path

import pytest

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.proxy_job import Reduction
from tests.support.programs.backend_contract import BackendContract
from tests.support.programs.small_backends import DP, PP, backend_of, cluster_of
from tests.support.programs.training_ranks import LLAMA, MIXTRAL, job_of
from trials.backend import Status
from trials.rank_backend import OpenBackend


@pytest.fixture
def opened(rank_processes):
    """Gives a backend the tests' server of ranks."""
    return lambda backend: OpenBackend(backend=backend, ranks=rank_processes)


class TestTorchBackend(BackendContract):
    """The contract of every backend."""

    @pytest.fixture
    def backend(self, opened):
        """With the tests' server."""
        return opened(backend_of())

    @pytest.fixture
    def grid(self):
        """One configuration of each kind."""
        return ConfigGrid.from_configs([DP, PP])


def test_a_backend_opens_its_own_server():
    """A backend that was pickled measures in another process, with ranks of its own."""
    copy = pickle.loads(pickle.dumps(backend_of()))  # noqa: S301 # our own bytes

    assert copy == backend_of()
    assert copy.measure(DP, trial_number=0).status is Status.OK


@pytest.mark.parametrize(("clock", "kind"), [("wall", "wall"), ("virtual", "virtual"), ("cpu", "cpu")])
def test_an_observation_says_what_its_times_count(opened, clock, kind):
    """Each clock gives positive step times under its own name, told step by step."""
    heard = []

    found = opened(backend_of(chosen_clock=clock)).measure(PP, trial_number=0, on_step=heard.append)

    assert (found.status, found.clock) == (Status.OK, kind), found.reason + found.log_tail
    assert found.step_times_s == tuple(heard)
    assert len(heard) == 3
    conditions = dict(found.conditions)
    assert conditions["ranks"] == 2
    assert conditions["build_s"] > 0
    assert found.peak_memory_bytes > 10_000


def test_a_model_learns_in_trials(opened):
    """The loss of the last step is told, and lies below that of an untrained model."""
    found = opened(backend_of(min_steps=5, max_steps=5)).measure(DP, trial_number=0)

    assert 3.0 < dict(found.conditions)["loss"] < 5.4


@pytest.mark.parametrize("clock", ["wall", "virtual"])
def test_a_trial_tells_what_it_communicated_otherwise(opened, clock):
    """The profiled step's calls are compared with the prediction: here gradients are taken to be sent in 16 bits."""
    backend = backend_of(chosen_clock=clock, profiles=True)
    narrow = dataclasses.replace(backend, runtime=dataclasses.replace(backend.runtime, gradient_message_bytes=2))

    found = opened(narrow).measure(DP, trial_number=0)

    assert found.status is Status.OK, found.reason + found.log_tail
    assert "weights.reduce_scatter: predicted 311 kB in 4 calls, saw 622 kB in 5 calls" in found.reason
    assert "all_gather" not in found.reason


def test_a_killed_rank_is_an_incident(opened, rank_processes):
    """A rank that dies by a signal ends its trial, which keeps its steps and says nothing against the candidate."""
    found = opened(backend_of(min_steps=50, max_steps=50)).measure(
        DP, trial_number=0, on_step=lambda _: _signalled(rank_processes, signal.SIGKILL)
    )

    assert found.status is Status.INCIDENT
    assert "was killed by SIGKILL" in found.reason
    assert found.step_times_s
    assert opened(backend_of()).measure(DP, trial_number=1).status is Status.OK


def test_a_hanging_rank_is_an_incident(opened, rank_processes):
    """A rank that is stopped is noticed by its silence; the next trial finds nothing of it."""
    found = opened(backend_of(min_steps=50, max_steps=50, hang_limit_s=2.0)).measure(
        DP, trial_number=0, on_step=lambda _: _signalled(rank_processes, signal.SIGSTOP)
    )

    assert found.status is Status.INCIDENT
    assert "sent nothing for 2 s" in found.reason
    assert opened(backend_of()).measure(DP, trial_number=1).status is Status.OK


def test_a_rank_without_memory_is_out_of_memory(opened):
    """A device too small for the batch gives out_of_memory with the peak that was reached, not a crash."""
    backend = backend_of(min_steps=3)
    small = dataclasses.replace(
        backend,
        job=job_of(LLAMA.changed(vocab_size=100_000), sequence_length=512),
        cluster=_with_memory(backend.cluster, 400 * 2**20),
    )

    found = opened(small).measure(dataclasses.replace(DP, mbs=4), trial_number=0)

    assert found.status is Status.OUT_OF_MEMORY, found.reason
    assert found.peak_memory_bytes > 100 * 2**20


def test_an_error_in_a_rank_is_a_crash_with_its_traceback(opened):
    """What the trainer raises removes the candidate, and the observation shows where it happened."""
    broken = dataclasses.replace(DP, mbs=3)  # no share of the batch

    found = opened(backend_of()).measure(broken, trial_number=0)

    assert found.status is Status.CRASHED
    assert "Traceback" in found.log_tail


def test_experts_drop_tokens_where_a_capacity_is_given(opened):
    """A capacity factor reaches the ranks: dropping changes the loss."""
    config = dataclasses.replace(DP, ep=2)
    losses = [
        dict(opened(backend_of(MIXTRAL, capacity_factor=factor)).measure(config, trial_number=0).conditions)["loss"]
        for factor in (None, 0.5)
    ]

    assert losses[0] != losses[1]


def test_a_smaller_job_is_trained_too(opened):
    """A proxy's job has its own layers, batch and devices."""
    backend = dataclasses.replace(backend_of(), cluster=cluster_of(2, hosts=2))
    reduction = Reduction(hosts=1, layers=2, global_batch_size=4)

    found = opened(backend).reduced(reduction).measure(DP, trial_number=0)

    assert found.status is Status.OK, found.reason


def _signalled(processes, number):
    """Sends a signal to one of the ranks that run."""
    server = processes._server.pid
    children = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii").split()
    os.kill(int(children[-1]), number)


def _with_memory(cluster, size):
    groups = tuple(
        dataclasses.replace(group, device=dataclasses.replace(group.device, memory_bytes=size))
        for group in cluster.groups
    )
    return dataclasses.replace(cluster, groups=groups)
