"""Compiles planned JAX programs for eight virtual devices, and prints what is sent as JSON.

A process of its own: the number of devices is fixed when JAX starts. Arguments: programs with a mesh and a planner, as
`transformer@data=8@descent`. Little is optimised, so that compiling is quick.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from benchmarks.compiled_collectives import compiled_bytes, planned_bytes
from benchmarks.zoo import Gemma, Mixture
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


if __name__ == "__main__":
    print(json.dumps({name: sent(name) for name in sys.argv[1:]}))  # noqa: T201 # what the test reads
