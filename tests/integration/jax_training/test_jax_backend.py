"""Trials that train in JAX: the contract of backends, what they count, and how they fail."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.job.model_catalog import load_model
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.training_job import TrainingJob
from tests.support.programs.backend_contract import BackendContract
from tests.support.programs.small_backends import cluster_of
from trials.backend import Status
from trials.jax_training.framework import JAX, JAX_RANKS
from trials.rank_backend import OpenBackend
from trials.ranks.processes import RankProcesses
from trials.training.planned import PlannedBackend
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.step_planner import LayeredStepPlanner

MODEL = load_model("gpt-tiny.yaml", Path(__file__).parents[3] / "configs" / "models").changed(num_layers=1)
CONFIG = ParallelConfig(dp=2, tp=2, mbs=2)


def backend_of(devices=4, hosts=1, **changes):
    """Build a backend of a tiny job with three steps."""
    options = {"min_steps": 3, "max_steps": 3, "hang_limit_s": 300.0} | changes
    return PlannedBackend(
        framework=JAX,
        job=TrainingJob(model=MODEL, sequence_length=64, global_batch_size=4, precision="fp32"),
        cluster=cluster_of(devices // hosts, hosts),
        planner=LayeredStepPlanner(planning=LayerPlanning()),
        **options,
    )


@pytest.fixture(scope="module")
def rank_processes():
    """One server of processes for all tests."""
    with RankProcesses(JAX_RANKS) as processes:
        yield processes


@pytest.fixture
def opened(rank_processes):
    """Gives a backend the tests' server."""
    return lambda backend: OpenBackend(backend=backend, ranks=rank_processes)


class TestJaxBackend(BackendContract):
    """The contract of every backend."""

    @pytest.fixture
    def backend(self, opened):
        """With the tests' server."""
        return opened(backend_of())

    @pytest.fixture
    def grid(self):
        """One configuration."""
        return ConfigGrid.from_configs([CONFIG])


@pytest.mark.parametrize("clock", ["wall", "virtual"])
def test_processes_of_several_hosts_train_as_one_does(opened, clock):
    """Two processes that are connected by gloo have the loss and the memory of one, and the clock that was chosen.

    A step by the virtual clock takes longer than its collectives on the links that the processes have.
    """
    one = opened(backend_of(chosen_clock=clock)).measure(CONFIG, trial_number=0)
    two = opened(backend_of(hosts=2, chosen_clock=clock)).measure(CONFIG, trial_number=1)

    assert (one.status, two.status) == (Status.OK, Status.OK), one.log_tail + two.log_tail
    assert (one.clock, two.clock) == (clock, clock)
    assert (dict(one.conditions)["processes"], dict(two.conditions)["processes"]) == (1, 2)
    assert dict(two.conditions)["loss"] == pytest.approx(dict(one.conditions)["loss"], abs=1e-5)
    assert two.peak_memory_bytes == pytest.approx(one.peak_memory_bytes, rel=0.1)
    links_s = [dict(trial.conditions).get("collectives_s", 0.0) for trial in (one, two)]
    assert all(least_s < min(trial.step_times_s) for least_s, trial in zip(links_s, (one, two), strict=True))
    # within a host and between hosts the links differ
    assert (links_s[0] != links_s[1]) == (clock == "virtual")


def test_a_program_that_was_compiled_before_has_its_virtual_clock(tmp_path, monkeypatch):
    """A user's persistent cache of compiled programs takes nothing from the second trial of a layout."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    backend = backend_of(chosen_clock="virtual")

    first, second = (backend.measure(CONFIG, trial_number=number) for number in (0, 1))

    assert (first.status, second.status) == (Status.OK, Status.OK), second.log_tail
    assert dict(second.conditions)["collectives_s"] == dict(first.conditions)["collectives_s"]


def test_a_step_that_does_not_fit_is_out_of_memory(opened):
    """A step that needs more than a device has by XLA's analysis is not run, and both figures are told."""
    backend = backend_of()
    (group,) = backend.cluster.groups
    device = replace(group.device, memory_bytes=200_000)
    small = replace(backend, cluster=replace(backend.cluster, groups=(replace(group, device=device),)))

    found = opened(small).measure(CONFIG, trial_number=0)

    assert found.status is Status.OUT_OF_MEMORY
    assert "by XLA's memory analysis" in found.reason
    assert found.peak_memory_bytes > 200_000


def test_a_killed_process_is_an_incident(opened, rank_processes):
    """A process that dies by a signal ends its trial, which keeps its steps; the next trial finds nothing of it."""

    def kill(_):
        server = rank_processes._server.pid
        children = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii").split()
        os.kill(int(children[-1]), signal.SIGKILL)

    found = opened(backend_of(min_steps=50, max_steps=50)).measure(CONFIG, trial_number=0, on_step=kill)

    assert found.status is Status.INCIDENT, found.log_tail
    assert "was killed by SIGKILL" in found.reason
    assert found.step_times_s


def test_a_candidate_that_the_rules_exclude_is_never_run(opened):
    """Where a study switches a rule off, a batch that micro-batches do not fill is a crash, and no time of another
    step.
    """
    with pytest.raises(AssertionError, match="equal micro-batches"):
        opened(backend_of()).measure(replace(CONFIG, mbs=3), trial_number=0)
