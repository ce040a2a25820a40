"""Real training on Ray: the warm pool, and what becomes of trials whose ranks are killed."""

import os
import signal
import time
from pathlib import Path

import pytest

from costmodels.parallel import ParallelConfig
from tests.trials.torch_training.small_backends import DP, PP, backend_of
from trials.backend import Status
from trials.ray_executor import RayExecutor


@pytest.fixture(scope="module")
def executor():
    """One slot of two ranks."""
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
    first, second = (_measured(executor, number, config) for number, config in enumerate((DP, PP)))

    assert (first.status, second.status) == (Status.OK, Status.OK), first.reason + second.reason
    assert dict(second.conditions)["group_s"] < 1.0
    assert second.elapsed_s < first.elapsed_s + 5.0


def test_slots_that_would_share_cores_are_not_made(executor):
    """Trials that would want more cores than the machine has do not run at once, and the run says so."""
    cores = os.cpu_count() or 1

    assert executor.num_slots == min(3, max(cores // 2, 1))
    assert ("run at once instead of 3" in executor.slots_note) == (executor.num_slots < 3)


def test_a_rank_that_is_killed_twice_is_an_incident(executor):
    """The first death is retried in fresh ranks, and the second one given up; the worker itself lives on."""
    executor.submit(7, ParallelConfig(dp=2, mbs=1, sequence_parallel=False))
    killed = set()
    ended = {}
    deadline_s = time.monotonic() + 120
    while not ended and time.monotonic() < deadline_s:
        for pid in _ranks() - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        ended = dict(executor.poll(0.05))

    assert ended[7].status is Status.INCIDENT, ended
    assert "killed by SIGKILL" in ended[7].reason
    assert _measured(executor, 8, DP).status is Status.OK


def _ranks():
    """The processes whose parent is a server of ranks that a Ray worker has started."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                parent = Path("/proc") / fields[1]
                is_server = b"rank_server" in (parent / "cmdline").read_bytes()
                grand = (parent / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
                is_rays = b"ray::" in (Path("/proc") / grand / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue
            if is_server and is_rays:
                found.add(int(entry.name))
    return found
