"""Program that compiles a step for eight virtual devices with sharded arguments, and prints the traffic as JSON.

It needs its own process, because the number of devices is fixed when JAX starts. Its arguments are names of SHARDED.
The output compares the traffic of XLA with that of the plan read from Shardy's propagation of these arguments.
"""

import json
import os
import sys

from tests.support.quick_xla import on_devices

os.environ["XLA_FLAGS"] = on_devices(8)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.papers.propagated_plans import PlanReader
from benchmarks.papers.propagation import Propagation
from benchmarks.support.sent_bytes import by_kind, planned_bytes
from benchmarks.support.xla_program import compiled
from costmodels.sharding.device_mesh import mesh_of
from costmodels.sharding.frontends.jax.graph import graph_of
from costmodels.sharding.frontends.jax.program import trace_function
from costmodels.sharding.plan import cost_of, violations
from hardware.cluster_file import find_cluster
from tests.support.graphs.wide_step import WIDE

DATA = {"batch.": (0, -1)}
HIDDEN = {".gate_up": (-1, 2), ".down": (-1, 0)}
SHARDED = {
    "data on both axes": {"batch.": (0, 0)},
    "data and Megatron": DATA | HIDDEN | {".query": (-1, 1), ".0.out": (-1, 0)},
}
"""Dim that each axis shards, for arguments selected by a part of their names."""


def sent(name):
    """Return the bytes sent by the plan and by XLA."""
    function, arguments, donated = WIDE.train_program()
    program = trace_function(function, *arguments, donated=donated)
    graph, mesh = graph_of(program), mesh_of("data=4,model=2", find_cluster("dgx-a100"))
    given = {
        tensor: layout
        for tensor, array in enumerate(graph.tensors)
        for part, layout in SHARDED[name].items()
        if part in array.name and graph.ops[graph.maker[tensor][0]].begins
    }
    layouts = Propagation(program, graph, mesh).layouts(given).layouts
    plan = PlanReader(graph, mesh).plan(layouts)
    numbers = {array.name: number for number, array in enumerate(graph.tensors)}
    devices = Mesh(np.array(jax.devices()).reshape(mesh.sizes), mesh.names)

    def sharding(argument, leaf):
        layout = layouts[numbers[argument.name]] if argument.name in numbers else None
        dims = [
            tuple(name for name, cut in zip(mesh.names, layout or (), strict=False) if cut == dim) or None
            for dim in range(len(leaf.shape))
        ]
        return NamedSharding(devices, PartitionSpec(*dims))

    leaves, tree = jax.tree.flatten(arguments)
    inputs = [sharding(argument, leaf) for argument, leaf in zip(program.arguments, leaves, strict=True)]
    outputs = [None] * len(program.outputs)
    for argument, one in zip(program.arguments, inputs, strict=True):
        if argument.kept_by is not None:
            outputs[argument.kept_by] = one
    out_tree = jax.tree.unflatten(program.out_tree, outputs)
    lowered = jax.jit(function, in_shardings=jax.tree.unflatten(tree, inputs), out_shardings=out_tree).lower(*arguments)
    return {
        "planned": by_kind(planned_bytes(cost_of(plan), mesh)),
        "compiled": by_kind(compiled(lowered, dict(zip(mesh.names, mesh.sizes, strict=True))).device.sent),
        "violations": violations(plan),
    }


if __name__ == "__main__":
    print(json.dumps({name: sent(name) for name in sys.argv[1:]}))  # noqa: T201 # what the test reads
