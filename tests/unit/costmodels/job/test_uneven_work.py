"""Uneven work: how it is written, and what it changes of memory and step time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig, concatenate, parse_config
from costmodels.job.runtime import find_runtime
from costmodels.job.uneven_work import EVEN, Assignment, numbers_in_words, parse_assignment, parse_numbers
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.support.settings.random_settings import MIXED, grid_of, job_of, setting_for

MEGATRON = find_runtime("megatron-core")
HOST = find_cluster("dgx-h100")
NUMBERS = st.lists(st.integers(0, 40), min_size=1, max_size=12).map(tuple)


JOB, PIPELINE = job_of(batch=64), ParallelConfig(pp=2, tp=2, dp=2)


def step_s(job, cluster, *configs):
    """The closed form's step times."""
    return estimate_step(setting_for(job, cluster), grid_of(*configs)).step_time_s


def peak_bytes(*configs, **rest):
    """Peaks of memory on one host."""
    return estimate_memory(setting_for(JOB, HOST), grid_of(*configs), **rest).peak_bytes


@given(NUMBERS)
def test_numbers_are_read_as_they_are_written(numbers):
    """Runs of equal and of ascending numbers are shortened, and come back."""
    assert parse_numbers(numbers_in_words(numbers), "layers") == numbers


def test_runs_are_short():
    """Equal neighbours are counted, ascending ones become a range."""
    assert numbers_in_words((22, 22, 22, 30, 4, 5, 6, 7)) == "22x3/30/4-7"
    assert str(EVEN) == ""


@given(NUMBERS, NUMBERS, st.permutations(range(7)))
def test_assignments_are_read_as_they_are_written(layers, recomputed, hosts):
    """Every field comes back from the text that studies and `--config` take."""
    assignment = Assignment(layers=layers, recomputed=recomputed, micro_batches=(3, 1), hosts=tuple(hosts))
    config = ParallelConfig(pp=2, assignment=assignment)

    assert parse_assignment(str(assignment)) == assignment
    assert parse_config(str(config), {}) == config
    assert ParallelConfig(**config.values(["pp", "assignment"])) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers=22/x", "assignment.layers = '22/x': must be whole numbers between slashes"),
        ("layers=7-3", "assignment.layers = '7-3': has a range that descends"),
        ("layers=1x9999999", "assignment.layers = '1x9999999': has more than 1,000,000 numbers"),
        ("layrs=1/2", "assignment = 'layrs=1/2': is no part of an assignment"),
        ("hosts=1/1", "hosts = (1, 1): must name each host once"),
        ("micro_batches=0/4", "micro_batches = (0, 4): must give every replica a micro-batch"),
    ],
)
def test_a_bad_assignment_is_told(text, message):
    """The key, the value and the rule stand in one message."""
    with pytest.raises(ConfigError) as raised:
        parse_assignment(text)

    assert message in str(raised.value)


def test_a_grid_keeps_its_assignments():
    """They come back from positions, parts and concatenations of grids."""
    uneven = ParallelConfig(pp=2, assignment=Assignment(layers=(20, 12)))
    other = ParallelConfig(pp=2, assignment=Assignment(layers=(18, 14)))
    grid = concatenate([grid_of(ParallelConfig(pp=2), uneven), grid_of(other, uneven)])

    assert [grid.config(at) for at in range(4)] == [ParallelConfig(pp=2), uneven, other, uneven]
    assert grid.take(np.array([2])).config(0) == other
    assert ConfigGrid.from_configs([other, uneven], ("assignment",)).positions() == {
        (2, 1, 1, 1, 1, 1, 1, 1, "layers=18/14"): 0,
        (2, 1, 1, 1, 1, 1, 1, 1, "layers=20/12"): 1,
    }


@pytest.mark.parametrize("vpp", [1, 2])
def test_an_even_assignment_in_words_changes_nothing(vpp):
    """Naming the runtime's own shares gives its own memory and step time."""
    config = replace(PIPELINE, vpp=vpp)
    told = Assignment(layers=(32 // (2 * vpp),) * (2 * vpp), micro_batches=(32, 32), hosts=(0,))
    configs = (config, replace(config, assignment=told))

    assert np.ptp(step_s(JOB, HOST, *configs)) == pytest.approx(0, abs=1e-9)
    assert np.ptp(peak_bytes(*configs)) == 0


def test_all_layers_recomputed_are_full_recomputation():
    """Recomputing every layer of every stage costs what `recompute: full` costs, in time and memory."""
    full = replace(PIPELINE, mbs=2, recompute="full")
    every = replace(PIPELINE, mbs=2, assignment=Assignment(recomputed=(16, 16)))

    for found in (step_s(JOB, HOST, full, every), peak_bytes(full, every)):
        assert found[0] == pytest.approx(found[1])


def test_recomputing_more_layers_takes_longer_and_less_memory():
    """From none to all layers of the first stage, time rises and the peak falls."""
    configs = [replace(PIPELINE, assignment=Assignment(recomputed=(first, 16))) for first in (0, 4, 8, 16)]

    assert (np.diff(step_s(JOB, HOST, *configs)) > 0).all()
    assert (np.diff(peak_bytes(*configs, stage="first")) < 0).all()


@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig(pp=2, tp=8, assignment=Assignment(layers=(10, 22))),
        ParallelConfig(pp=2, tp=8, assignment=Assignment(layers=(22, 10), hosts=(1, 0))),
        ParallelConfig(pp=2, tp=8, assignment=Assignment(layers=(20, 12), recomputed=(0, 6))),
        ParallelConfig(tp=8, dp=2, assignment=Assignment(micro_batches=(40, 88))),
        ParallelConfig(tp=8, dp=2, assignment=Assignment(micro_batches=(88, 40), hosts=(1, 0))),
    ],
)
def test_the_closed_form_prices_uneven_work_as_the_simulator_runs_it(config):
    """Within 4% on A100 beside H100, where the pipeline's bubble is an upper bound of the simulated one."""
    job = job_of(batch=128)

    simulated_s = simulate_step(setting_for(job, MIXED), config).step_time_s
    assert step_s(job, MIXED, config)[0] == pytest.approx(simulated_s, rel=0.04)


def test_unequal_shares_go_to_the_replica_they_name():
    """The A100's replica with fewer micro-batches ends sooner than with an equal share, the H100's later."""
    job, config = job_of(batch=512), ParallelConfig(tp=8, dp=2, mbs=4)
    shares = [replace(config, assignment=Assignment(micro_batches=(few, 128 - few))) for few in (32, 40, 64, 96)]
    found = step_s(job, MIXED, *shares)

    assert found.argmin() in (0, 1)
    assert found[3] > found[2] > found.min()
