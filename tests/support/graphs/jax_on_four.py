"""Program that plans functions with branches, loops and matrices on four virtual devices, runs them, and prints JSON.

It needs its own process, because the number of devices is fixed when JAX starts.
"""

import json
import os

from tests.support.quick_xla import on_devices

os.environ["XLA_FLAGS"] = on_devices(4)
os.environ["JAX_PLATFORMS"] = "cpu"

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.integration.frontends.jax.test_loops_and_branches import repeated, switched
from tuner.planners import plan_jax
from tuner.planners.planning import WHOLE_AXES
from tuner.planners.sharding.pins import Pin


def added_up(x, w):
    """Scan from a number."""
    return lax.scan(lambda total, row: (total + (row @ w).sum(), row * 2), 0.0, x)


def grouped(x, w, sizes):
    """Multiply groups of rows, and differentiate."""
    return jax.value_and_grad(lambda x, w: (lax.ragged_dot(x, w, sizes) ** 2).mean(), argnums=(0, 1))(x, w)


def solved(a, b):
    """Solve systems, and differentiate."""
    return jax.value_and_grad(lambda a: jnp.linalg.solve(a + 8 * jnp.eye(8), b).sum())(a)


def transformed(x):
    """Transform the last two dims."""
    return jnp.abs(jnp.fft.rfft2(x))


def given(*shape):
    """Return random numbers of a shape."""
    return np.random.default_rng(0).uniform(0.1, 1.0, shape).astype(np.float32)


PROGRAMS = {
    "switched": (switched, (given(64, 32), given(32, 32), np.int32(0))),
    "repeated": (repeated, (given(64, 32), given(32, 32))),
    "added_up": (added_up, (given(4, 64, 32), given(32, 32))),
    "grouped": (grouped, (given(64, 32), given(4, 32, 32), np.array([10, 20, 4, 30], np.int32))),
    "solved": (solved, (given(16, 8, 8), given(16, 8, 2))),
    "transformed": (transformed, (given(16, 8, 8),)),
}

PINNED = {"switched": "x", "repeated": "x", "added_up": "x", "grouped": "w", "solved": "a", "transformed": "x"}
"""Argument of each program whose dim is cut; small programs would not be cut for their time."""


def run(name):
    """Return the largest relative error of a planned program, and the number of its cut arguments and results."""
    function, values = PROGRAMS[name]
    pin = Pin(op=PINNED[name], dim="result.1" if name == "added_up" else "result.0", axis="data")
    plan = plan_jax(function, *values, mesh={"data": 4}, options=replace(WHOLE_AXES, pins=(pin,), effort=0))
    step = jax.jit(plan.function, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    pairs = zip(
        jax.tree.leaves(jax.jit(function)(*values)),
        jax.tree.leaves(step(*jax.device_put(values, plan.in_shardings))),
        strict=True,
    )
    error = max(
        float(np.max(np.abs(np.asarray(one) - np.asarray(other))) / np.max(np.abs(np.asarray(one))))
        for one, other in pairs
    )
    shardings = jax.tree.leaves((plan.in_shardings, plan.out_shardings))
    return {"error": error, "cut": sum(not each.is_fully_replicated for each in shardings)}


if __name__ == "__main__":
    print(json.dumps({name: run(name) for name in PROGRAMS}))  # noqa: T201 # what the test reads
