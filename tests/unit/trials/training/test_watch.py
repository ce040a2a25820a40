"""What becomes of the messages of a trial's ranks, whatever the library; no rank runs."""

from dataclasses import dataclass, replace

import pytest

from tests.support.programs.small_backends import cluster_of
from trials.backend import Status
from trials.jax_training.framework import JAX
from trials.ranks.messages import Exit, Told
from trials.torch_training.framework import TORCH
from trials.training.messages import Failed, Finished, Ready, StepTaken
from trials.training.watch import watch_ranks
from trials.training.work import AbstractWork


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Work(AbstractWork):
    """Work on as many devices as a test wants."""

    devices: int = 2

    @property
    def num_devices(self):
        """Number of devices."""
        return self.devices


class Ranks:
    """Ranks whose messages are known beforehand."""

    def __init__(self, *events):
        self.left = list(events)

    @property
    def running(self):
        """Rank 0 while there are messages."""
        return frozenset({0} if self.left else ())

    def events(self, timeout_s):  # noqa: ARG002 # the contract's
        """The next message."""
        return [self.left.pop(0)]

    def printed(self):
        """Nothing."""
        return ""


def step(rank, number, **detail):
    """Message of a rank that it has taken a step of two seconds."""
    told = {"wall_s": 2.0 + number, "cpu_s": 3.0, "loss": 5.0 - number} | detail
    return Told(rank=rank, value=StepTaken(number=number, **told))


def done(rank, build_s=1.0):
    """Messages of a rank that ends well."""
    return [
        Told(rank=rank, value=Ready(conditions={"build_s": build_s})),
        Told(rank=rank, value=Finished(peak_bytes=100 + rank, conditions={"profile_s": 0.5})),
        Exit(rank=rank, code=0, peak_bytes=1, cpu_s=0.0),
    ]


def watched(framework, *events, work=None, cores=2, compare=None):
    """Watch two ranks, and return their observation and the steps that were told."""
    heard = []
    framework = replace(framework, compare=compare or (lambda *_: ((), [])))
    found = watch_ranks(
        Ranks(*events),
        work or Work(clock="wall"),
        framework,
        cluster_of(2),
        num_ranks=2,
        cores=cores,
        hang_limit_s=60.0,
        on_step=heard.append,
    )
    return found, heard


@pytest.mark.parametrize(("clock", "seconds"), [("wall", (2.0, 3.0)), ("cpu", (3.0, 3.0)), ("virtual", (7.0, 8.0))])
def test_a_step_counts_once_all_ranks_have_told_it(clock, seconds):
    """Its time is that of the work's clock, and the observation has the loss of the last step."""
    steps = [step(rank, number, detail=7.0 + number) for number in (0, 1) for rank in (0, 1)]

    found, heard = watched(JAX, *steps, step(0, 2), *done(0), *done(1), work=Work(clock=clock))

    assert (found.status, found.clock) == (Status.OK, clock)
    assert found.step_times_s == tuple(heard) == seconds
    assert dict(found.conditions)["loss"] == 4.0


def test_conditions_are_those_of_the_slowest_rank():
    """Times by name are the largest of all ranks; only where a rank has many devices, their number is told too."""
    events = [step(0, 0), step(1, 0), *done(0, build_s=1.0), *done(1, build_s=4.0)]

    of_torch, of_jax = (dict(watched(framework, *events)[0].conditions) for framework in (TORCH, JAX))

    assert (of_torch["ranks"], of_torch["build_s"], of_torch["profile_s"]) == (2, 4.0, 0.5)
    assert of_jax["processes"] == 2
    assert "processes" not in of_torch


def test_an_observation_says_what_was_unusual():
    """The plan of a planner, more devices than cores under the wall clock, and what the library has compared."""
    work = Work(clock="wall", is_by_hand=False, devices=8)
    events = [step(0, 0), step(1, 0), *done(0), *done(1)]

    of_torch, of_jax = (
        watched(framework, *events, work=work, compare=lambda *_: ((), ["differs"]))[0].reason
        for framework in (TORCH, JAX)
    )

    assert of_torch.startswith("ran as the study's planner shards it; ")
    assert of_torch.endswith("wall clock of 8 ranks on 2 cores tells their total work only; differs")
    assert "wall clock of 8 devices on 2 cores" in of_jax


@pytest.mark.parametrize("peak_bytes", [None, 0, 50])
def test_a_failure_before_the_memory_is_known_has_no_peak(peak_bytes):
    """A rank that fails ends the trial with its own reason, and its peak is kept if it knew one."""
    failed = Failed(is_out_of_memory=False, is_memory_used_up=False, reason="lost", text="trace", peak_bytes=peak_bytes)

    found, _ = watched(TORCH, Told(rank=0, value=failed), Exit(rank=0, code=0, peak_bytes=9, cpu_s=0.0))

    assert (found.status, found.reason, found.log_tail) == (Status.CRASHED, "rank 0: lost", "trace")
    assert found.peak_memory_bytes == peak_bytes
