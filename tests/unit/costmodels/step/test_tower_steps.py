"""Steps and memory of models with a vision tower."""

import numpy as np
import pytest

from costmodels.blocks.operator import Family
from costmodels.job.hugging_face.reader import model_from_hugging_face
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.tower import TowerWork
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import execution_s
from costmodels.operators.layer_operators import step_operators
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory.peak import estimate_memory, stage_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from tests.support.settings.multimodal import QWEN3_VL_8B
from tests.support.settings.random_settings import grid_of, setting_for
from tuner.planners.pipeline.uneven import plan_layers

CLUSTER = find_cluster("dgx-h100", hosts=2)


def setting_of(trained, *, images=2.0, patches=2048):
    """Qwen3-VL on two hosts; without its tower where `trained` is None."""
    towers = {} if trained is None else {"vision": TowerWork(images=images, patches=patches, trained=trained)}
    model = model_from_hugging_face(QWEN3_VL_8B, name="qwen3-vl", file="config.json", towers=towers)
    return setting_for(TrainingJob(model=model, sequence_length=8192, global_batch_size=128), CLUSTER)


SETTINGS = {trained: setting_of(trained) for trained in (None, False, True)}
TOWER = SETTINGS[True].job.model.towers[0]


def seconds(setting, config):
    """The estimated step time."""
    return float(estimate_step(setting, grid_of(config)).step_time_s[0])


@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig(tp=2, dp=8),
        ParallelConfig(pp=2, dp=8),
        ParallelConfig(tp=2, pp=4, dp=2, sequence_parallel=True, recompute="full"),
        ParallelConfig(cp=2, dp=8, recompute="selective"),
        ParallelConfig(tp=4, dp=4, zero_stage=3),
    ],
)
@pytest.mark.parametrize("trained", [False, True])
def test_the_closed_form_and_the_simulator_agree(config, trained):
    """Within 2%, as they do of stages without towers."""
    setting = SETTINGS[trained]

    assert simulate_step(setting, config).step_time_s == pytest.approx(seconds(setting, config), rel=0.02)


def kernels_s(setting, grid):
    """Time of all kernels of the tower for one micro-batch."""
    job, counts = setting.job, dict.fromkeys(setting.job.model.block_names, 0.0)
    for block in job.model.pieces[job.model.tower_pieces[0]].blocks:
        counts[job.model.block_names[block]] += 1
    return sum(
        counts[one.block] * float(execution_s(one, CLUSTER.devices[0], job, setting.runtime, grid)[0])
        for one in step_operators(job, setting.runtime, grid)
        if one.family is Family.TOWER
    )


@pytest.mark.parametrize("config", [{"dp": 16}, {"tp": 4, "dp": 4}, {"cp": 2, "dp": 8}, {"up": 2, "tp": 2, "dp": 4}])
def test_further_images_take_the_time_of_their_kernels(config):
    """Every rank runs all of the tower on the images of its micro-batch: tp, cp and up cut nothing of it.

    Waiting for launches, which is shorter the longer the kernels are, makes the rest.
    """
    config = ParallelConfig(**config)
    settings = SETTINGS[True], setting_of(True, images=4.0)
    two, four = (estimate_step(setting, grid_of(config)).breakdown_s["compute"][0] for setting in settings)
    kernels = [kernels_s(setting, grid_of(config)) for setting in settings]

    assert four - two == pytest.approx((kernels[1] - kernels[0]) * 128 / config.dp, rel=0.02)
    assert 1.7 < kernels[1] / kernels[0] < 2.0  # larger kernels are quicker for their size
    assert kernels[0] == pytest.approx(kernels_s(SETTINGS[True], grid_of(ParallelConfig())), rel=1e-12)


def test_frozen_towers_run_forward_alone():
    """No operator of the backward pass belongs to a part that is not trained; those of its projection stay."""
    job, runtime = SETTINGS[False].job, SETTINGS[False].runtime
    backward = {one.block for one in step_operators(job, runtime, grid_of(ParallelConfig())) if one.phase == "backward"}
    named = zip(job.model.block_names, job.model.blocks, strict=True)
    parts = {name: part for name, part in named if part in job.model.towers[0].parts}

    assert {name for name, part in parts.items() if part.trained} == parts.keys() & backward
    plain, frozen, trained = (seconds(SETTINGS[each], ParallelConfig(dp=16)) for each in (None, False, True))
    assert plain < frozen < trained


def test_the_first_stage_alone_holds_the_tower():
    """Its weights, states and activations are on the first of four stages, and the others are as they were."""
    config = ParallelConfig(pp=4, dp=4)
    plain, frozen, trained = (stage_memory(SETTINGS[each], config) for each in (None, False, True))

    for found in (frozen, trained):
        assert np.array_equal(found.peak_bytes[1:], plain.peak_bytes[1:])
        assert found.parts_bytes["weights"][0] - plain.parts_bytes["weights"][0] == 2 * TOWER.parameters
    assert plain.peak_bytes[0] < frozen.peak_bytes[0] < trained.peak_bytes[0]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_frozen_weights_have_no_gradients_and_no_states(tp):
    """Each rank of tp holds the whole tower; but for weights, only the projection's parameters need memory."""
    config = grid_of(ParallelConfig(tp=tp, dp=16 // tp, zero_stage=0))
    of_projection = sum(part.parameters for part in TOWER.parts[-8:])
    plain, frozen, trained = (estimate_memory(SETTINGS[each], config).parts_bytes for each in (None, False, True))

    for part in ("gradients", "optimizer"):
        more = [float(found[part][0] - plain[part][0]) for found in (frozen, trained)]
        assert more[0] / more[1] == pytest.approx(of_projection / TOWER.parameters, rel=1e-9)
    for found in (frozen, trained):
        assert float(found["weights"][0] - plain["weights"][0]) == pytest.approx(2 * TOWER.parameters)


def test_unequal_layers_leave_the_first_stage_room_for_the_tower():
    """Planned for the whole model, the first of four stages has fewer layers than without its tower."""
    of_first = []
    for trained in (None, True):
        grid, _ = plan_layers(SETTINGS[trained], grid_of(ParallelConfig(pp=4, dp=4)), memory_headroom=0.0)
        (config,) = (grid.config(at) for at in range(len(grid)))
        of_first.append(config.assignment.layers[0])

    assert of_first[1] < of_first[0]
