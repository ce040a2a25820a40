"""Runs or compiles planned JAX programs on eight virtual devices, and prints what came out as JSON.

A process of its own: the number of devices is fixed when JAX starts. Arguments: `numbers` and programs of the zoo, or
`bytes` and programs with a mesh and a planner, as `transformer@data=8@descent`. Little is optimised, so that compiling
is quick.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compiled_collectives import compiled_bytes, planned_bytes
from benchmarks.zoo import FACTORIES, Gemma, Mixture
from costmodels.device_mesh import mesh_of
from costmodels.frontends.jax_graph import graph_of_jax
from costmodels.plan import cost_of
from costmodels.plan_exports.axis_order import axis_orders
from costmodels.plan_exports.jax_apply import apply_plan, shardings
from hardware.cluster import find_cluster
from tuner.planners.planning import PlannerOptions, planned

WIDE = Gemma(layers=1, model=128, heads=8, head=32, hidden=512, vocabulary=1024, batch=32, tokens=256)
BIG_ENOUGH = {
    "transformer": WIDE.train_program,
    "experts": Mixture(base=WIDE, experts=8, capacity=64).train_program,
}
"""Programs whose plans cut more than their optimizer."""

CLUSTER = find_cluster("dgx-a100")


def numbers(name):
    """The largest difference of a planned step's outputs to those of the plain one, by their largest element."""
    function, arguments, donated = FACTORIES[name]()
    arguments = jax.tree.map(_widened, arguments)
    # D-Rec's plan: the best one sends nothing of so small a step
    plan = _plan(function, arguments, donated, "a=2,b=2,c=2", PlannerOptions(planner="recursive"))
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: _random(leaf, rng), arguments)
    inputs, outputs = shardings(function, plan, *arguments)
    found = jax.jit(apply_plan(function, plan), in_shardings=inputs, out_shardings=outputs)(*values)
    expected = jax.jit(function)(*values)
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    return {
        "error": max(_error(one, other) for one, other in pairs),
        "cut": sum(not one.sharding.is_fully_replicated for one, _ in pairs),
    }


def sent(name):
    """Bytes by the plan and by XLA, of a planner's plan whose axes are whole."""
    program, mesh, planner = name.split("@")
    function, arguments, donated = BIG_ENOUGH[program]()
    plan = _plan(
        function, arguments, donated, mesh, PlannerOptions(planner=planner, order="topological", whole_axes=True)
    )
    inputs, outputs = shardings(function, plan, *arguments)
    jitted = jax.jit(apply_plan(function, plan), in_shardings=inputs, out_shardings=outputs)
    return {
        "planned": planned_bytes(cost_of(plan), plan.mesh.sizes),
        "compiled": compiled_bytes(jitted.lower(*arguments)),
        "broken": len(axis_orders(plan).broken),
    }


def _plan(function, arguments, donated, mesh, options):
    return planned(graph_of_jax(function, *arguments, donated=donated), mesh_of(mesh, CLUSTER), options).plan


def _widened(leaf):
    """bfloat16 as float32, so that another order of additions changes little."""
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if leaf.dtype == jnp.bfloat16 else leaf.dtype)


def _random(leaf, rng):
    """Moments stay away from zero, where Adam's first step is the sign of a gradient."""
    if np.issubdtype(leaf.dtype, np.integer):
        return rng.integers(0, 5, leaf.shape).astype(leaf.dtype)
    return rng.uniform(0.02, 0.2, leaf.shape).astype(leaf.dtype)


def _error(one, other):
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    assert np.isfinite(one).all(), "the programs compute numbers"
    assert np.isfinite(other).all(), "the programs compute numbers"
    return float(np.max(np.abs(one - other)) / max(np.max(np.abs(other)), 1e-30))


if __name__ == "__main__":
    act = {"numbers": numbers, "bytes": sent}[sys.argv[1]]
    print(json.dumps({name: act(name) for name in sys.argv[2:]}))  # noqa: T201 # what the test reads
