import dataclasses
from pathlib import Path

import numpy as np
import pytest

from costmodels.job import TrainingJob
from costmodels.measured import read_measured_group
from costmodels.runtime import find_runtime
from costmodels.step_time import estimate_step
from hardware.cluster import find_cluster
from hardware.errors import ConfigError
from tests.trials.backend_contract import BackendContract
from trials.backend import Status
from trials.replay import ReplayBackend
from trials.simulated import SimulatedBackend

MEASURED = Path(__file__).resolve().parents[2] / "configs" / "measured"


@pytest.fixture(scope="module")
def world():
    """A world of one seed: the shipped sweep's job on its cluster."""
    group = read_measured_group(["ultrascale-llama-8b-128.csv"], {}, MEASURED)
    job = TrainingJob(model=group.model, sequence_length=4096, global_batch_size=256)
    cluster = find_cluster("p5-h100", hosts=16)
    return SimulatedBackend(job=job, cluster=cluster, runtime=find_runtime("nanotron"), seed=3)


@pytest.fixture(scope="module")
def all_candidates():
    """The 176 configurations of the shipped sweep."""
    files = ["ultrascale-llama-8b-128.csv", "ultrascale-llama-8b-128_failed.csv"]
    return ReplayBackend(group=read_measured_group(files, {}, MEASURED)).candidates(("zero_stage",))


def log_error(world, grid):
    """How far the world is from what the cost model says of its memory, as the log of their ratio [n]."""
    believed = estimate_step(world.job, world.cluster, world.runtime, grid, memory=world.hidden_memory(grid))
    return np.log(world.hidden_step(grid).step_time_s / believed.step_time_s)


class TestSimulatedBackend(BackendContract):
    @pytest.fixture
    def backend(self, world):
        """That world."""
        return world

    @pytest.fixture
    def grid(self, all_candidates):
        """Every fourth configuration."""
        return all_candidates.take(np.arange(0, len(all_candidates), 4))


def test_trials_scatter_around_the_hidden_time(world, all_candidates):
    """The median of a trial's steps is the hidden step time, up to the noise asked for."""
    hidden_s = world.hidden_step(all_candidates).step_time_s
    for position in range(0, len(all_candidates), 10):
        observation = world.measure(all_candidates.config(position), trial_number=0)
        if observation.status is Status.OK:
            assert observation.step_time_s == pytest.approx(hidden_s[position], rel=5 * world.noise)
            assert len(observation.step_times_s) == world.num_steps


def test_the_cost_model_is_wrong_about_it(world, all_candidates):
    """The world differs from the cost model by some percent, not by a common factor alone."""
    assert 0.005 < log_error(world, all_candidates).std() < 0.3


def test_without_error_it_is_the_cost_model(world, all_candidates):
    """With no operator error the hidden step time is the cost model's own."""
    exact = dataclasses.replace(world, operator_error=0.0)

    assert log_error(exact, all_candidates) == pytest.approx(0.0, abs=1e-12)


def test_another_seed_is_another_world(world, all_candidates):
    """Worlds of two seeds order the candidates differently."""
    other = dataclasses.replace(world, seed=world.seed + 1)

    assert not np.allclose(log_error(world, all_candidates), log_error(other, all_candidates))


def test_out_of_memory_is_told_from_the_hidden_peak(world, all_candidates):
    """A trial runs out of memory exactly where more is needed in the world than the device has, and both ends occur."""
    needed = world.hidden_memory(all_candidates).needed_bytes
    observations = [world.measure(all_candidates.config(i), trial_number=i) for i in range(len(all_candidates))]
    failed = np.array([observation.status is Status.OUT_OF_MEMORY for observation in observations])

    assert 0 < failed.sum() < len(failed)
    assert np.array_equal(failed, needed > world.cluster.memory_bytes)


def test_operator_samples_cover_the_layers(world, all_candidates):
    """A trial reports forward and backward operators with the number of times they ran."""
    config = next(c for c in map(all_candidates.config, range(176)) if c.pp == 1 and c.tp == 8)
    samples = world.measure(config, trial_number=0).operator_samples
    micro_batches = 256 // (config.dp * config.mbs)

    assert {str(sample.phase) for sample in samples} == {"forward", "backward"}
    assert next(s for s in samples if s.name == "attention.qkv").count == 32 * micro_batches
    assert next(s for s in samples if s.name == "head.logits").count == micro_batches
    assert all(sample.time_s > 0 for sample in samples)


@pytest.mark.parametrize("field", [{"noise": -0.1}, {"operator_error": 2.0}, {"num_steps": 0}, {"seed": -1}])
def test_a_senseless_world_is_refused(world, field):
    """A field out of its range is named in the message."""
    with pytest.raises(ConfigError, match=next(iter(field))):
        dataclasses.replace(world, **field)
