"""Plans of a user's step in JAX, which a trial of the user's own command loads and pins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="steps in JAX need JAX: pip install 'meshtune[jax]'")

from tuner import load_study

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def train_step(params, batch):
    def loss(params):
        hidden = jax.nn.relu(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), value


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step():
    params, batch = {"up": array(32, 64), "down": array(64, 32)}, {"x": array(8, 32), "y": array(8, 32)}
    return train_step, (params, batch), ("params",)


def main(path):
    from tuner import load_plan

    plan = load_plan(path)
    function, arguments, donated = step()
    mesh = jax.make_mesh(tuple(plan.mesh.values()), tuple(plan.mesh), axis_types=(AxisType.Auto,) * len(plan.mesh))

    def shardings(group, layouts, tree):
        cut = {name: PartitionSpec(*(axes or None for axes in layouts[f"{group}.{name}"])) for name in tree}
        return {name: NamedSharding(mesh, spec) for name, spec in cut.items()}

    places = shardings("params", plan.parameters, arguments[0]), shardings("batch", plan.inputs, arguments[1])
    values = jax.tree.map(lambda one: np.random.default_rng(0).normal(size=one.shape).astype(np.float32), arguments)
    pinned = jax.jit(plan.pin(function, *arguments, donated=donated), in_shardings=places)
    for found, expected in zip(*map(jax.tree.leaves, (pinned(*values), function(*values))), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_a_pinned_step_computes_what_the_function_computes(new_study, tmp_path):
    """Each candidate's plan, loaded from the file that its trial gets, runs on four virtual devices."""
    trial = {"backend": "command", "command": ["python", "own_program.py", "{plan}"]}
    study = load_study(new_study("jax", PROGRAM)(trial=trial | {"log": {"pattern": ["took (?P<step_s>.*) s"]}}))
    plans, backend = study.problem.subject.plans, study.trials.backend
    configs = [each.config for tp in (1, 2, 4) for each in plans.on(tp).candidates]

    assert {(config.dp, config.tp) for config in configs} == {(4, 1), (2, 2), (1, 4)}
    for config in configs:
        (tmp_path / "plan.json").write_text(backend.plan(config, 0).files[0][2], encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "own_program.py", "plan.json"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (config, done.stderr[-2000:])
