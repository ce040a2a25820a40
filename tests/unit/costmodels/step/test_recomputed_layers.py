"""Some layers of each virtual stage that run again in full: the dimension `recompute_layers`."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.uneven_work import Assignment
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.executions import operator_executions
from costmodels.step.memory.activations import layer_activations
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import grid_of, job_of, setting_for

SETTING = setting_for(job_of(batch=64), find_cluster("dgx-h100", hosts=4))  # 32 layers
PIPELINES = [ParallelConfig(pp=4, tp=2, dp=4), ParallelConfig(pp=4, tp=8, vpp=2), ParallelConfig(tp=8, dp=4)]


def figures(*configs, setting=SETTING):
    """Predicted step times [s] and peaks [bytes]."""
    grid = grid_of(*configs)
    memory = estimate_memory(setting, grid)
    return np.stack([estimate_step(setting, grid, memory=memory).step_time_s, memory.peak_bytes])


def again(config, layers, **changes):
    """The configuration with so many layers of each virtual stage recomputed."""
    return replace(config, recompute_layers=layers, **changes)


@pytest.mark.parametrize("config", PIPELINES)
def test_the_number_means_the_assignment_of_as_many_everywhere(config):
    """A number of layers is what an assignment of this number for every virtual stage is."""
    stated = replace(config, assignment=Assignment(recomputed=(3,) * (config.pp * config.vpp)))

    found = figures(again(config, 3), stated)
    assert found[:, 0] == pytest.approx(found[:, 1], rel=1e-12)


@pytest.mark.parametrize("config", PIPELINES)
def test_more_recomputed_layers_take_longer_and_less_memory(config):
    """From none to all of a stage's layers, time grows evenly and memory falls; all of them are full recomputation."""
    layers = SETTING.job.model.num_layers // (config.pp * config.vpp)
    numbers = [0, 1, layers // 2, layers - 1, layers, layers + 5]

    seconds, peaks = figures(*[again(config, number) for number in numbers], replace(config, recompute="full"))

    assert (np.diff(seconds[:5]) > 0).all()
    assert (np.diff(peaks[1:5]) < 0).all()
    assert seconds[4] == pytest.approx(seconds[5], rel=1e-12) == pytest.approx(seconds[6], rel=1e-12)
    assert peaks[4] == pytest.approx(peaks[6], rel=1e-12)
    share = (seconds[2] - seconds[0]) / (seconds[4] - seconds[0])
    assert share == pytest.approx((layers // 2) / layers, abs=0.08)


@pytest.mark.parametrize("config", PIPELINES)
def test_the_simulator_runs_them_again(config):
    """The simulated step grows by the recomputed layers as the closed form does."""
    grown = [simulate_step(SETTING, again(config, number)).step_time_s for number in (0, 2)]
    expected = figures(config, again(config, 2))[0]

    assert grown[1] - grown[0] == pytest.approx(expected[1] - expected[0], rel=0.1)


def test_a_profile_counts_them():
    """Of 32 layers in 4 stages, 2 of each stage run their forward products twice."""
    config = ParallelConfig(pp=4, tp=2, dp=4, mbs=2)
    counts = [
        {op.name: float(count[0]) for op, count in operator_executions(SETTING.job, SETTING.runtime, grid_of(one))}
        for one in (config, again(config, 2))
    ]

    assert counts[1]["attention.qkv"] == pytest.approx(counts[0]["attention.qkv"] * (1 + 8 / 32))


def test_a_unit_of_layers_keeps_one_input_and_works_on_all():
    """Of 8 layers that run again 2 by 2, 4 inputs are kept per micro-batch, and 2 layers' tensors while they run."""
    one = ParallelConfig(tp=8, dp=4, recompute="full")
    pairs = replace(SETTING, job=replace(SETTING.job, recompute_unit=2))
    runtime = SETTING.runtime
    tokens = SETTING.job.sequence_length // 8  # split along the sequence over tp
    hidden = 2 * tokens * SETTING.job.model.hidden_size

    shapes = grid_of(one)
    single, double = (layer_activations(setting.job, runtime, shapes) for setting in (SETTING, pairs))

    assert (single.kept[0, 0], double.kept[0, 0]) == (hidden, hidden / 2)
    assert double.working[0, 0] == 2 * single.working[0, 0]
    assert figures(one)[0] == pytest.approx(figures(one, setting=pairs)[0])
