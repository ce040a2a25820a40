"""Real training on Ray: the warm pool, and what becomes of trials whose ranks are killed."""

import contextlib
import dataclasses
import os
import signal
import sys
import time

import pytest

from benchmarks.support.process_table import ranks_by_server, running_ranks
from costmodels.job.parallel_config import ParallelConfig
from hardware.io.errors import ConfigError
from tests.support.listening_sockets import LOOPBACK, MARK, watch_listening
from tests.support.programs.small_backends import DP, PP, backend_of, cluster_of
from trials.backend import Status
from trials.on_ray.executor import RayExecutor


@pytest.fixture(scope="module")
def executor():
    """One slot of two ranks, whose processes are marked as this one's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(os.getpid()))
        with RayExecutor(backend_of(), parallel_trials=3, address="local") as running:
            yield running


def _measured(executor, number, config):
    executor.submit(number, config)
    return _polled(executor)[number]


def _polled(executor, limit_s=120.0):
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        ended = dict(executor.poll(1.0))
        if ended:
            return ended
    pytest.fail("no trial has ended")


def test_trials_train_one_after_the_other_in_warm_workers(executor):
    """A second trial pays no start: its ranks are forked from the server that the first one started."""
    first, servers = _measured(executor, 0, DP), set(ranks_by_server())
    second = _measured(executor, 1, PP)

    assert (first.status, second.status) == (Status.OK, Status.OK), first.reason + second.reason
    assert set(ranks_by_server()) == servers
    assert servers


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's list of sockets is Linux's")
def test_trials_listen_on_this_machine_alone(executor):
    """While ranks train on the local Ray, every socket that any process of ours listens at is of the loopback address:
    Ray's own, that at which ranks find one another, and gloo's.
    """
    with watch_listening() as seen:
        assert _measured(executor, 2, DP).status is Status.OK

    for program in ("gcs_server", "raylet", "trials.ranks.server"):
        assert any(program in each for _, _, each in seen), seen
    assert {found for found in seen if found[0] not in LOOPBACK} == set()


def test_slots_that_would_share_cores_are_not_made(executor):
    """Trials that would want more cores than the machine has do not run at once, and the run says so."""
    cores = os.cpu_count() or 1

    assert executor.num_free_slots == min(3, max(cores // 2, 1))
    assert ("at once instead of 3" in executor.slots_note) == (executor.num_free_slots < 3)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, Status.INCIDENT), (signal.SIGSEGV, Status.CRASHED)])
def test_ranks_that_are_killed_twice(executor, number, status):
    """The first death is retried in fresh ranks, and the second one given up: an incident if the signal came from
    outside, a crash if the program has twice ended itself by it. The worker itself lives on.
    """
    executor.submit(7, ParallelConfig(dp=2, mbs=1, sequence_parallel=False))
    killed = set()
    ended = {}
    deadline_s = time.monotonic() + 120
    while not ended and time.monotonic() < deadline_s:
        for pid in running_ranks() - killed:
            with contextlib.suppress(ProcessLookupError):  # it has followed its peer
                os.kill(pid, number)
            killed.add(pid)
        ended = dict(executor.poll(0.05))

    assert ended[7].status is status, ended
    assert f"was killed by {number.name}" in ended[7].reason
    assert ("retried once" in ended[7].reason) == (status is Status.CRASHED)
    assert _measured(executor, 8, DP).status is Status.OK


def test_a_server_that_is_killed_between_trials_costs_no_trial(executor):
    """The worker that lost it is replaced, and the next trial runs in a fresh one."""
    for pid in ranks_by_server():
        os.kill(pid, signal.SIGKILL)

    found = _measured(executor, 9, DP)

    assert found.status is Status.OK, found.log_tail
    assert "retried once" in found.reason


def test_trials_want_no_more_hosts_than_this_machine():
    """On local Ray a study of several real hosts is refused with the way out."""
    spread = dataclasses.replace(backend_of(), cluster=cluster_of(2, hosts=2), spreads=True)

    with (
        pytest.raises(ConfigError, match="a trial wants 2 hosts of 2 CPUs"),
        RayExecutor(spread, parallel_trials=1, address="local"),
    ):
        pass
