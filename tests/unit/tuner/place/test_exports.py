import itertools
import re

import numpy as np
import pytest

from hardware.io.errors import ConfigError
from tests.support.settings.placements import drawn_problem, placed_rl
from tuner.place.exports.registry import EXPORTERS, export_placement, launchable_by

VERL_KEYS = re.compile(
    r"\+?(data|trainer|rollout|critic|reward_model|actor_rollout_ref\.(actor|ref|rollout|hybrid_engine))[.=]"
)


@pytest.mark.parametrize(("overlap", "framework"), list(itertools.product((0, 1), EXPORTERS)))
def test_a_framework_gets_devices_that_it_can_divide(overlap, framework):
    """Pools of an exported placement are disjoint and hold no more devices than the cluster."""
    problem, state = placed_rl(framework, overlap)
    lines = export_placement(problem, state, framework).lines
    where = {state.where[unit] for unit in problem.units}

    assert all(one == other or not one & other for one, other in itertools.combinations(where, 2))
    assert sum(cells.bit_count() for cells in where) <= problem.num_cells
    assert len({line.replace("=", " ").split()[0] for line in lines}) == len(lines)


def test_verl_keeps_one_pool_for_actor_critic_and_reference():
    """A synchronous placement for verl has actor, rollout, critic and reference on the devices of trainer.nnodes."""
    problem, state = placed_rl("verl", 0)
    lines = dict(line.split("=", 1) for line in export_placement(problem, state, "verl").lines)
    names = {module.name: unit for unit, module in enumerate(problem.workload.modules)}
    cells = {state.where[names[name]] for name in ("actor", "rollout", "critic", "reference")}

    assert len(cells) == 1
    assert int(lines["trainer.nnodes"]) * int(lines["trainer.n_gpus_per_node"]) == cells.pop().bit_count()
    assert lines["actor_rollout_ref.hybrid_engine"] == "True"
    assert all(VERL_KEYS.match(f"{key}=") for key in lines)
    tp, pp = (
        int(lines[f"actor_rollout_ref.actor.megatron.{name}_model_parallel_size"]) for name in ("tensor", "pipeline")
    )
    chosen = problem.options[names["actor"]][state.chosen[names["actor"]]]
    assert (tp, pp) == (chosen.layout.config.tp, chosen.layout.config.pp)


def test_verl_separates_generation_that_overlaps():
    """With overlapped steps the rollout has hosts of its own, which the trainer's nodes leave."""
    problem, state = placed_rl("verl", 1)
    lines = dict(line.split("=", 1) for line in export_placement(problem, state, "verl").lines)
    devices = [int(lines[f"{pool}.nnodes"]) * int(lines[f"{pool}.n_gpus_per_node"]) for pool in ("trainer", "rollout")]

    assert lines["actor_rollout_ref.hybrid_engine"] == "False"
    assert sum(devices) <= problem.workload.cluster.num_devices


def test_openrlhf_colocates_engines_as_it_asserts():
    """With --colocate_all_models, engines times their tensor degree are the actor's devices."""
    problem, state = placed_rl("openrlhf", 0)
    lines = dict((*line.split(" ", 1), "")[:2] for line in export_placement(problem, state, "openrlhf").lines)
    if "--colocate_all_models" not in lines:
        assert len({state.where[unit] for unit in problem.units}) > 1
        return
    engines = int(lines["--vllm_num_engines"]) * int(lines["--vllm_tensor_parallel_size"])

    assert engines == int(lines["--actor_num_nodes"]) * int(lines["--actor_num_gpus_per_node"])


def test_refuses_what_is_no_rl():
    """A workload without an actor that sends weights has no RL framework's keys."""
    workload = drawn_problem(np.random.default_rng(1)).workload
    without = type(workload)(
        name="none", cluster=workload.cluster, modules=workload.modules, edges=(), headroom=0.0, overlap_steps=0
    )
    with pytest.raises(ConfigError, match="sends its weights"):
        launchable_by(without, "verl")
    with pytest.raises(ConfigError, match="no framework"):
        launchable_by(without, "trl")
