"""What backends that train say of their trials before any runs, whatever the library."""

import importlib.util
from dataclasses import replace

import pytest

from costmodels.job.proxy_job import Reduction
from hardware.io.errors import ConfigError
from tests.support.programs.small_backends import backend_of, cluster_of
from tests.support.programs.training_ranks import LLAMA, job_of
from trials.backend import HostNeeds
from trials.jax_training.framework import JAX
from trials.torch_training.framework import TORCH
from trials.training.planned import PlannedBackend

FRAMEWORKS = pytest.mark.parametrize("framework", [TORCH, JAX], ids=lambda each: each.name)


def planned(framework, devices=4, hosts=1, **options):
    """Build a backend that runs plans."""
    cluster = cluster_of(devices // hosts, hosts)
    return PlannedBackend(framework=framework, job=job_of(LLAMA), cluster=cluster, planner=None, **options)


@FRAMEWORKS
def test_the_clock_is_the_wall_where_every_device_has_a_core(framework):
    """With more devices than cores nobody gets a wall clock without asking for it; a host of its own has its cores."""
    assert planned(framework, cores=4).clock == "wall"
    assert planned(framework, cores=3).clock == "virtual"
    assert planned(framework, cores=3, chosen_clock="wall").clock == "wall"
    assert planned(framework, hosts=2, cores=2, spreads=True).clock == "wall"


def test_a_gpu_always_has_the_wall_clock():
    """No core is shared there."""
    assert replace(backend_of(cores=1), device="cuda").clock == "wall"


def test_a_trial_occupies_a_core_or_gpu_per_device():
    """On CPUs one machine stands for all hosts unless they are spread; the processes of JAX are those of hosts."""
    assert planned(TORCH, hosts=2).hosts == (HostNeeds(cpus=4),)
    assert planned(TORCH, hosts=2, spreads=True).hosts == (HostNeeds(cpus=2),) * 2
    assert planned(JAX, hosts=2).hosts == (HostNeeds(cpus=4, processes=2),)
    assert replace(backend_of(devices=2), device="cuda").hosts == (HostNeeds(cpus=1, gpus=2),)


def test_a_proxy_job_has_the_clock_of_its_study():
    """A job on fewer hosts, whose devices would each have a core, is measured by the virtual clock of the whole one."""
    whole = planned(JAX, hosts=2, cores=2)
    smaller = whole.reduced(Reduction(hosts=1, layers=1, global_batch_size=2))

    assert replace(smaller, chosen_clock="auto").clock == "wall"
    assert smaller.clock == whole.clock == "virtual"
    assert (smaller.cluster.num_hosts, smaller.job.global_batch_size) == (1, 2)


def test_what_gives_trials_their_meaning_is_told():
    """The clock that `auto` has become, and the device where there are several kinds."""
    assert planned(TORCH, cores=4).describe() == {"device": "cpu", "clock": "wall"}
    assert planned(JAX, cores=3).describe() == {"clock": "virtual"}


@FRAMEWORKS
def test_a_missing_library_is_named(framework, monkeypatch):
    """The message says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    with pytest.raises(ConfigError, match=rf"needs {framework.title}.*pip install 'meshtune\[{framework.name}\]'"):
        planned(framework).check()
