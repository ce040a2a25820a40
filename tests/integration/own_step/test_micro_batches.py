"""Studies of a user's own step whose factory takes the number of micro-batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from costmodels.job.parallel_config import ParallelConfig
from hardware.io.errors import ConfigError
from tests.support.quick_xla import on_devices
from tests.support.studies.exported_programs import write_program
from trials.backend import Status
from trials.rank_backend import OpenBackend
from trials.ranks.processes import RankProcesses
from tuner import load_study
from tuner.own_step.plans import OwnStepPlans

ROOT = Path(__file__).resolve().parents[3]

JAX = """
import jax
import jax.numpy as jnp


def step(micro_batches=1):
    def train_step(params, batch):
        def loss(params, part):
            return jnp.mean((jax.nn.relu(part["x"] @ params["up"]) @ params["down"] - part["y"]) ** 2)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, part)), None

        parts = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, micro_batches, *x.shape[1:]), 0, 1), batch)
        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (value, grads), _ = jax.lax.scan(add, zeros, parts)
        return jax.tree.map(lambda p, g: p - 0.1 * g / micro_batches, params, grads), value / micro_batches

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"up": array(32, 64), "down": array(64, 32)}
    return train_step, (params, {"x": array(8, 32), "y": array(8, 32)}), ("params",)


def whole_step():
    return step()
"""

TORCH = """
import torch
from torch import nn


def squared(module, x, y):
    return ((module(x) - y) ** 2).mean()


def step(micro_batches=1):
    module = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))
    rows = 8 // micro_batches
    return module, (torch.ones(rows, 32), torch.zeros(rows, 32)), squared


def whole_step():
    return step()
"""

PROGRAMS = {"jax": JAX, "torch": TORCH}


@pytest.fixture(params=["jax", "torch"])
def world(request):
    """Library of the step."""
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture
def config(new_study, world):
    """A study of two devices with two sizes of micro-batches."""
    return load_study(new_study(world, PROGRAMS[world])(devices=2, space={"mbs": [2, 4, 8]}))


def test_sizes_that_divide_the_batch_are_candidates(config):
    """Each mesh has plans for each size that divides its rows, of a step with the number of micro-batches; others are
    told, and so are plans that went through JSON.
    """
    space, plans = config.problem.space(), config.problem.subject.plans
    found = {(each.dp, each.mbs) for each in map(space.grid.config, range(len(space.grid)))}
    again = OwnStepPlans(step=plans.step, cluster=plans.cluster, planner="unknown", mbs=plans.mbs)
    again.restore(json.loads(json.dumps(plans.as_json())))

    assert found == {(2, 2), (2, 4), (1, 2), (1, 4), (1, 8)}
    assert plans.step_of(ParallelConfig(dp=2, mbs=2)).micro_batches == 2
    assert plans.step_of(ParallelConfig(tp=2, mbs=2)).micro_batches == 4
    assert list(
        config.problem.subject.reasons_against(config.problem.options, ParallelConfig(dp=2, mbs=8, zero_stage=0), space)
    ) == ["plan"]
    assert again.as_json() == plans.as_json()


def test_each_micro_batch_has_its_passes_and_its_sums(config):
    """With twice as many micro-batches, gradients are added up along `data` once more."""
    few, many = (ParallelConfig(dp=2, mbs=size, zero_stage=0) for size in (4, 2))
    plans = config.problem.subject.plans

    assert plans.step_time_s(many)[1] > 1.5 * plans.step_time_s(few)[1]


def test_trials_run_all_micro_batches(config):
    """The losses of steps with one micro-batch and with several are the same, as the sizes say nothing about it."""
    with RankProcesses(config.trials.backend.rank_setup) as ranks:
        opened = OpenBackend(backend=config.trials.backend, ranks=ranks)
        trials = [
            opened.measure(each, trial_number=0)
            for each in (
                ParallelConfig(dp=2, mbs=4, zero_stage=0),
                ParallelConfig(dp=2, mbs=2, zero_stage=0),
                ParallelConfig(tp=2, mbs=2, zero_stage=0),
            )
        ]

    assert {trial.status for trial in trials} == {Status.OK}, [trial.log_tail for trial in trials]
    one, *others = (dict(trial.conditions)["loss"] for trial in trials)
    assert others == pytest.approx([one, one], rel=1e-5)


def test_the_exported_program_has_the_number(config, world, tmp_path):
    """The written module calls the factory with the number of micro-batches, and trains as it stands."""
    module = tmp_path / "sharded.py"
    write_program(config, ParallelConfig(tp=2, mbs=2, zero_stage=0), world, module)
    launcher = {"jax": [], "torch": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]}
    flags = {"XLA_FLAGS": on_devices(2), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher[world], "sharded.py"],
        cwd=tmp_path,
        env=os.environ | flags | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert "factory(micro_batches=4)" in module.read_text(encoding="utf-8")


def test_a_factory_without_the_argument_has_one_micro_batch(new_study, world):
    """`space.mbs` is refused for a factory that takes no number, and a study without it has whole batches alone."""
    write = new_study(world, PROGRAMS[world])
    with pytest.raises(ConfigError, match=r"space.mbs = .*needs a factory that takes micro_batches"):
        load_study(write("own_program:whole_step", space={"mbs": [1, 2]}))

    grid = load_study(write(devices=2)).problem.space().grid
    assert set(grid.mbs.tolist()) == {1}
