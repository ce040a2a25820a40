"""A rack by the hosts that are launched and as one host: both are the same machine."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import cluster_from_mapping

JOB = TrainingJob(
    model=find_model("mixtral-8x7b"), sequence_length=4096, global_batch_size=256, precision="bf16", recompute="full"
)
CONFIGS = (
    ParallelConfig(pp=1, tp=4, dp=32, ep=8, mbs=1),
    ParallelConfig(pp=4, tp=2, dp=16, ep=8, vpp=2, mbs=1),
    ParallelConfig(pp=2, tp=16, dp=4, mbs=2),
    ParallelConfig(pp=4, tp=4, dp=8, cp=1, ep=4, mbs=1),
)


def setting(**keys):
    """128 GB200 that train Mixtral."""
    cluster = cluster_from_mapping({"name": "gb200-nvl72", **keys}, Path())
    return Setting(job=JOB, cluster=cluster, runtime=find_runtime("megatron-core"))


AS_ONE, LAUNCHED = setting(hosts=2, devices_per_host=64), setting(hosts=32, devices_per_host=4)


def predicted(of, grid):
    """Step times and memory."""
    memory = estimate_memory(of, grid)
    return estimate_step(of, grid, memory=memory), memory


def test_both_spellings_predict_the_same_to_the_last_bit():
    """Step time, its parts and memory do not depend on how many hosts make up a domain."""
    grid = ConfigGrid.from_configs(CONFIGS)
    (one, one_memory), (other, other_memory) = (predicted(each, grid) for each in (AS_ONE, LAUNCHED))

    assert one.step_time_s.tolist() == other.step_time_s.tolist()
    assert {part: seconds.tolist() for part, seconds in one.breakdown_s.items()} == {
        part: seconds.tolist() for part, seconds in other.breakdown_s.items()
    }
    assert one_memory.peak_bytes.tolist() == other_memory.peak_bytes.tolist()


@pytest.mark.parametrize("config", CONFIGS)
def test_both_spellings_are_simulated_alike(config):
    """The simulator sends messages inside a domain over its links, whatever hosts it has."""
    one, other = (simulate_step(each, config) for each in (AS_ONE, LAUNCHED))

    assert one.step_time_s == other.step_time_s


def test_links_that_end_at_the_host_are_slower():
    """Experts on eight ranks of two hosts need the adapters where a domain is a host of four."""
    grid = ConfigGrid.from_configs(CONFIGS[:1])
    alone = replace(LAUNCHED, cluster=setting(hosts=32, devices_per_host=4, hosts_per_domain=1).cluster)

    (inside, _), (outside, _) = predicted(LAUNCHED, grid), predicted(alone, grid)

    assert outside.breakdown_s["ep"][0] > 2 * inside.breakdown_s["ep"][0]
    assert outside.breakdown_s["tp"][0] == inside.breakdown_s["tp"][0]


def test_a_domain_of_fewer_hosts_slows_the_stages_on_it():
    """With domains of unlike size, stages that cross one's end are slower, and the pipeline as slow as they are."""
    even, ragged = setting(hosts=32, devices_per_host=4), setting(hosts=32, devices_per_host=4)
    groups = tuple(replace(even.cluster.groups[0], hosts=hosts) for hosts in (18, 14))
    ragged = replace(even, cluster=replace(even.cluster, groups=groups))
    grid = ConfigGrid.from_configs(CONFIGS)

    assert ragged.cluster.has_unlike_links
    assert not even.cluster.has_unlike_links
    assert np.all(predicted(ragged, grid)[0].step_time_s >= predicted(even, grid)[0].step_time_s)
