import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from costmodels.blocks.operator import COLLECTIVES, OpKind, Phase
from costmodels.calibration.measured_runs import read_measured_group
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.proxy_job import Reduction
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.simulator.simulated_step import simulate_step
from costmodels.simulator.trace import operator_events
from costmodels.step.step_time import estimate_step
from costmodels.surrogates.error_terms import step_terms
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.support.programs.backend_contract import RepeatableBackendContract
from trials.backend import Status
from trials.replay.backend import ReplayBackend
from trials.simulated.backend import SimulatedBackend

MEASURED = Path(__file__).resolve().parents[4] / "configs" / "measured"


@pytest.fixture(scope="module")
def world():
    """A world of one seed: the shipped sweep's job on its cluster."""
    group = read_measured_group(["ultrascale-llama-8b-128.csv"], {}, MEASURED)
    job = TrainingJob(model=group.model, sequence_length=4096, global_batch_size=256)
    cluster = find_cluster("p5-h100", hosts=16)
    return SimulatedBackend(job=job, cluster=cluster, runtime=find_runtime("nanotron"), seed=3)


@pytest.fixture(scope="module")
def event_world(world):
    """The same kernels and collectives, put together by the event simulator."""
    return dataclasses.replace(world, fidelity="simulator")


@pytest.fixture(scope="module")
def all_candidates():
    """The 176 configurations of the shipped sweep."""
    files = ["ultrascale-llama-8b-128.csv", "ultrascale-llama-8b-128_failed.csv"]
    return ReplayBackend(group=read_measured_group(files, {}, MEASURED)).candidates(("zero_stage",))


def log_error(world, grid):
    """How far the world is from what the cost model says of its memory, as the log of their ratio [n]."""
    believed = estimate_step(world.setting, grid, memory=world.hidden_memory(grid))
    return np.log(world.hidden_step(grid).step_time_s / believed.step_time_s)


class TestSimulatedBackend(RepeatableBackendContract):
    @pytest.fixture
    def backend(self, world):
        """That world."""
        return world

    @pytest.fixture
    def grid(self, all_candidates):
        """Every eighth configuration."""
        return all_candidates.take(np.arange(0, len(all_candidates), 8))


class TestSimulatedBackendOfEvents(RepeatableBackendContract):
    @pytest.fixture
    def backend(self, event_world):
        """The same world under the event simulator."""
        return event_world

    @pytest.fixture
    def grid(self, all_candidates):
        """Some configurations."""
        return all_candidates.take(np.arange(0, len(all_candidates), 16))


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


def test_an_exact_world_of_events_is_the_simulators(event_world, all_candidates):
    """With no operator error a world of the event simulator has the simulator's steps, and the closed form misses them
    by a little.
    """
    exact = dataclasses.replace(event_world, operator_error=0.0)
    some = all_candidates.take(np.arange(0, len(all_candidates), 16))
    hidden = exact.hidden_step(some)

    config = some.config(3)
    memory = exact.hidden_memory(ConfigGrid.from_configs([config]))
    step = simulate_step(exact.setting, config, memory=memory)
    assert hidden.step_time_s[3] == pytest.approx(step.step_time_s)
    assert 0.0001 < log_error(exact, some).std() < 0.1


def test_the_fidelity_changes_steps_and_nothing_else(world, event_world, all_candidates):
    """Both kinds of worlds agree on memory, on what fits, and on the operators that a trial measures."""
    for position in range(0, len(all_candidates), 25):
        config = all_candidates.config(position)
        closed, events = (backend.measure(config, trial_number=0) for backend in (world, event_world))

        assert closed.status == events.status
        assert closed.peak_memory_bytes == events.peak_memory_bytes
        assert closed.operator_samples == events.operator_samples
        assert closed.status is not Status.OK or closed.step_times_s != events.step_times_s


def test_a_trial_samples_what_the_event_simulator_runs(event_world):
    """Operators and collectives of the layers are executed as often as the simulator runs them on one pipeline."""
    config = ParallelConfig(pp=4, tp=4, dp=8, mbs=2, recompute="selective")
    step = simulate_step(event_world.setting, config)
    events = operator_events(step)
    ran = Counter(events.names[name] for name in events.name[events.device < config.pp])
    sampled = Counter()
    for sample in event_world.measure(config, trial_number=0).operator_samples:
        sampled[sample.name] += sample.count

    in_layers = {name for name in sampled if not name.startswith(("weights.", "tp.softmax"))}
    assert len(in_layers) > 20
    assert {name: ran[name] for name in in_layers} == {name: sampled[name] for name in in_layers}


def test_another_seed_is_another_world(world, all_candidates):
    """Worlds of two seeds order the candidates differently."""
    other = dataclasses.replace(world, seed=world.seed + 1)

    assert not np.allclose(log_error(world, all_candidates), log_error(other, all_candidates))


@pytest.mark.slow
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


def test_collectives_are_sampled_as_operators(world, all_candidates):
    """A trial reports each collective with its message, ranks and hosts; together they are its world's exposed tp."""
    # residuals of layers change a step beyond its operators and collectives
    runtime = dataclasses.replace(world.runtime, residuals=())
    still = dataclasses.replace(world, noise=0.0, runtime=runtime)
    config = next(c for c in map(all_candidates.config, range(176)) if c.pp == 1 and c.tp == 8)
    samples = [s for s in still.measure(config, trial_number=0).operator_samples if s.name.startswith("tp.")]
    micro_batches = 256 // (config.dp * config.mbs)

    gather = next(s for s in samples if s.name == "tp.all_gather" and s.phase is Phase.FORWARD)

    assert gather.kind is OpKind.ALL_GATHER
    assert gather.shape == (2 * config.mbs * 4096 * 4096, 8, 1)
    # before attention, before the MLP, and before the head
    assert gather.count == (2 * 32 + 1) * micro_batches
    exposed_s = still.hidden_step(ConfigGrid.from_configs([config])).breakdown_s["tp"][0]
    assert not world.runtime.overlaps_tensor_gradients
    assert sum(s.time_s * s.count for s in samples) == pytest.approx(exposed_s)


@pytest.mark.slow
def test_collectives_of_one_shape_err_alike(world, all_candidates):
    """A collective's error is its kind's, at its shape: the same in every trial, and another at another shape."""
    erring = dataclasses.replace(world, noise=0.0)
    exact = dataclasses.replace(erring, operator_error=0.0)
    errors = {}
    for config in map(all_candidates.config, range(0, 176, 5)):
        both = (backend.measure(config, trial_number=0).operator_samples for backend in (erring, exact))
        for sample, right in zip(*both, strict=True):
            if sample.kind in COLLECTIVES:
                of_shape = errors.setdefault((sample.kind, sample.shape), [])
                of_shape.append(np.log(sample.time_s / right.time_s))

    repeated = [found for found in errors.values() if len(found) > 1]
    assert len(repeated) > 10
    assert all(np.ptp(found) < 1e-9 for found in repeated)
    assert np.std([found[0] for found in errors.values()]) > 0.1


def test_samples_have_the_shapes_of_the_terms(world, all_candidates):
    """What a trial measures is what its step's terms ask for: each term's shape is among the samples of its name."""
    places = range(0, 176, 5)
    terms = step_terms(world.setting, all_candidates.take(np.array(places))).terms
    for position, config in enumerate(map(all_candidates.config, places)):
        samples = world.measure(config, trial_number=0).operator_samples
        measured = {(sample.name, sample.shape) for sample in samples}
        asked = {(term.name, tuple(term.shape[term.row[position]])) for term in terms}

        # of the terms, all have a shape here, also those that this configuration does not use
        assert {name for name, _ in measured} <= {name for name, _ in asked}
        used = {name for name, _ in measured}
        assert {(name, shape) for name, shape in asked if name in used} <= measured


@pytest.mark.parametrize(
    "field", [{"noise": -0.1}, {"operator_error": 2.0}, {"num_steps": 0}, {"seed": -1}, {"fidelity": "exact"}]
)
def test_a_senseless_world_is_refused(world, field):
    """A field out of its range is named in the message."""
    with pytest.raises(ConfigError, match=next(iter(field))):
        dataclasses.replace(world, **field)


def test_a_smaller_job_keeps_the_fidelity(event_world):
    """A proxy of a world of the event simulator runs in it, too."""
    smaller = event_world.reduced(Reduction(hosts=1, layers=8, global_batch_size=16))
    observation = smaller.measure(ParallelConfig(pp=2, tp=2, dp=2, mbs=2), trial_number=0)

    assert smaller.fidelity == "simulator"
    assert observation.status is Status.OK


def test_a_smaller_job_runs_in_the_same_world(world):
    """Operators of a job on one host that have the shapes of the full job's take the times that they take there, up to
    noise.
    """
    full = ParallelConfig(pp=4, tp=2, dp=16, mbs=2)
    reduction = Reduction(hosts=1, layers=16, global_batch_size=16)
    samples, smaller = (
        {(one.name, one.phase, one.shape): one.time_s for one in observation.operator_samples}
        for observation in (
            world.measure(full, trial_number=0),
            world.reduced(reduction).measure(dataclasses.replace(full, pp=2, dp=2), trial_number=0),
        )
    )
    common = samples.keys() & smaller.keys()

    assert len(common) > 20
    for key in common:
        assert smaller[key] == pytest.approx(samples[key], rel=5 * world.noise)
