"""Simulated leaders of a ranking: what is simulated, and what a long step is put together from."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.uneven_work import Assignment
from costmodels.simulator.leaders import is_worth_simulating, simulated_times_s
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory.peak import estimate_memory
from hardware.cluster_file import cluster_from_mapping, find_cluster
from tests.support.settings.random_settings import grid_of, job_of, setting_for

TWO_KINDS = cluster_from_mapping({"groups": [{"name": "dgx-h100"}, {"name": "dgx-a100"}]}, Path())


@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig(pp=2, tp=8),
        ParallelConfig(pp=4, tp=2, dp=2, assignment=Assignment(layers=(10, 10, 6, 6))),
        ParallelConfig(pp=2, tp=4, dp=2, vpp=2, assignment=Assignment(layers=(10, 6, 10, 6))),
        ParallelConfig(tp=8, dp=2),
    ],
)
def test_a_long_step_is_put_together_from_a_short_one(config):
    """A short step gives the time of a step of 64 micro-batches to half a percent."""
    setting, grid = setting_for(job_of(batch=64 * config.dp), TWO_KINDS), grid_of(config)
    memory = estimate_memory(setting, grid)

    (found,) = simulated_times_s(setting, grid, np.array([0]), memory=memory)
    assert found == pytest.approx(simulate_step(setting, config, memory=memory).step_time_s, rel=0.005)


def test_a_short_step_is_simulated_whole():
    """Few micro-batches through chunks are simulated as they are."""
    config = ParallelConfig(pp=2, tp=4, dp=2, vpp=2)
    setting, grid = setting_for(job_of(batch=8), TWO_KINDS), grid_of(config)
    memory = estimate_memory(setting, grid)

    (found,) = simulated_times_s(setting, grid, np.array([0]), memory=memory)
    assert found == pytest.approx(simulate_step(setting, config, memory=memory).step_time_s, rel=1e-12)


@given(
    pp=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2]),
    micro_batches=st.integers(4, 64),
    layers=st.lists(st.integers(1, 9), min_size=8, max_size=8),
)
@settings(max_examples=30)
def test_up_to_eight_rounds_without_chunks_take_the_time_of_the_whole_step(pp, tp, micro_batches, layers):
    """To a billionth, whether the pipeline repeats itself or not, and whether rounds are whole or not."""
    assume(micro_batches <= 8 * pp)
    cut = tuple(layers[:pp])
    config = ParallelConfig(
        pp=pp, tp=tp, dp=16 // (pp * tp), sequence_parallel=tp > 1, assignment=Assignment(layers=cut)
    )
    job = job_of(batch=micro_batches * config.dp, num_layers=sum(cut))
    setting, grid = setting_for(job, find_cluster("v100-pcie", hosts=2)), grid_of(config)
    memory = estimate_memory(setting, grid)
    whole_s = simulate_step(setting, config, memory=memory).step_time_s

    (found,) = simulated_times_s(setting, grid, np.array([0]), memory=memory)
    assert found == pytest.approx(whole_s, rel=1e-9)


def test_unlike_hosts_and_shared_adapters_are_worth_it():
    """Like hosts with adapters of their own are predicted well enough; unlike hosts and shared adapters are not."""
    assert not is_worth_simulating(find_cluster("dgx-h100", hosts=4))
    assert is_worth_simulating(find_cluster("v100-pcie", hosts=2))
    assert is_worth_simulating(TWO_KINDS)
