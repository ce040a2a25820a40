"""Program that plans a step with all that a user may say of it, trains on eight virtual devices, and prints JSON.

It needs its own process, because the number of devices is fixed when JAX starts. Its argument is a folder.
"""

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.support.quick_xla import on_devices

os.environ["XLA_FLAGS"] = on_devices(8)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tuner.planners import plan_jax

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


class Config(NamedTuple):
    """What a step is built from; it is no array."""

    width: int
    rate: float


@partial(jax.shard_map, mesh=MESH, in_specs=(P("data", "model"), P("model", None)), out_specs=P("data", None))
def down(hidden, weight):
    """Multiply by a weight whose rows each device has a part of."""
    return jax.lax.psum(jnp.tanh(hidden) @ weight, "model")


def step(config, params, moments, x):
    """A step of descent with momentum, of which the first argument is static."""

    def loss(params):
        return jnp.mean((down(x @ params["up"], params["down"]) * config.width - x) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    moments = jax.tree.map(lambda moment, grad: 0.9 * moment + grad, moments, grads)
    return jax.tree.map(lambda param, moment: param - config.rate * moment, params, moments), moments, value


def save(folder, tree):
    """Write each leaf to a file of its own."""
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        np.save(folder / f"{number}.npy", leaf)


def load(folder, tree, shardings):
    """Read leaves, of which each device gets its part."""
    files = iter(range(len(jax.tree.leaves(tree))))

    def read(leaf, sharding):
        whole = np.load(folder / f"{next(files)}.npy", mmap_mode="r")
        return jax.make_array_from_callback(leaf.shape, sharding, lambda part: whole[part])

    return jax.tree.map(read, tree, shardings)


def difference(one, other):
    """Return the largest difference of an element, over the largest element of its array."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(np.abs(np.asarray(left) - np.asarray(right)).max() / np.abs(right).max() for left, right in pairs)


def main(folder):
    """Return what the test compares."""
    rng = np.random.default_rng(0)
    params = {
        "up": jnp.asarray(rng.normal(size=(16, 64)), jnp.float32),
        "down": jnp.asarray(rng.normal(size=(64, 16)) / 8, jnp.float32),
    }
    moments = jax.tree.map(jnp.zeros_like, params)
    x = jnp.asarray(rng.normal(size=(32, 16)), jnp.float32)
    config = Config(width=1, rate=0.1)
    plan = plan_jax(step, config, params, moments, x, mesh=MESH, static=("config",), donated=("params", "moments"))
    jitted = jax.jit(
        plan.function,
        in_shardings=plan.in_shardings,
        out_shardings=plan.out_shardings,
        static_argnums=plan.static_argnums,
        donate_argnums=plan.donate_argnums,
    )
    whole = jax.jit(step, static_argnums=0)
    expected = whole(config, params, moments, x)
    again = whole(config, *expected[:2], x)
    compiled = jitted.lower(config, params, moments, x).compile()
    states = jax.device_put((params, moments), plan.in_shardings[:2])
    given = jax.device_put(x, plan.in_shardings[2])
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(states))
    found = jitted(config, *states, given)
    save(folder, found[:2])
    loaded = load(folder, found[:2], plan.in_shardings[:2])
    then = jitted(config, *loaded, given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other = jitted(config._replace(width=2), *load(folder, found[:2], plan.in_shardings[:2]), given)
    return {
        "specs": {name: str(spec) for name, spec in plan.in_specs[0].items()},
        "unknown": plan.planned.plan.graph.unknown,
        "held": all(report.is_held for report in plan.planned.found.reports),
        "pins": len(plan.planned.found.reports),
        "flop": [op.flop for op in plan.planned.plan.graph.ops if op.primitive == "shard_map"],
        "gathers": compiled.as_text().count(" all-gather("),
        "static": plan.static_argnums,
        "donated": plan.donate_argnums,
        "is_mesh": plan.mesh.devices.flatten().tolist() == MESH.devices.flatten().tolist(),
        "alias_bytes": compiled.memory_analysis().alias_size_in_bytes,
        "state_bytes": held,
        "is_gone": all(leaf.is_deleted() for leaf in jax.tree.leaves(states)),
        "error": float(difference(found, expected)),
        "error_after_loading": float(difference(then, again)),
        "error_of_other": float(difference(other, whole(config._replace(width=2), *expected[:2], x))),
        "is_placed": all(
            leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
            for leaf, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves(plan.in_shardings[:2]), strict=True)
        ),
        "warnings": [str(each.message) for each in caught],
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))  # noqa: T201 # what the test reads
