"""Application of a plan that was found before: a module that trains by it, from a table of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import device_mesh as torch_meshes

from costmodels.sharding.device_mesh import mesh_from
from costmodels.sharding.exports.served import plan_of_table
from costmodels.sharding.exports.torch_modules import PlannedModule, Traced, case_of
from costmodels.sharding.exports.torch_parallel import parallel_module
from costmodels.sharding.frontends.torch.graph import graph_of
from costmodels.sharding.frontends.torch.program import Loss, trace_module
from hardware.io.errors import ConfigError
from tuner.planners.planning import WITHOUT_TREES, plan_graph
from tuner.planners.torch_plans import axes_of


def parallelize_as(
    module: torch.nn.Module,
    *inputs: Any,
    mesh: torch_meshes.DeviceMesh,
    served: Sequence[Sequence[int]],
    loss: Loss | None = None,
    micro_batches: int = 1,
) -> PlannedModule:
    """Return a module that trains as a plan says that was found before; to be called on all ranks.

    `meshtune export --to torch` writes programs that call it. The module's parameters become DTensors, as those of
    `TorchPlan.parallelize`. Inputs of other shapes, and other modes, follow the table where it fits, and are planned
    where it does not.

    Args:
        module: Module that was planned, or one like it.
        inputs: Its inputs, of which only shapes and types are read.
        mesh: Mesh of all ranks with the names and sizes of the plan's axes, the slowest first.
        served: For each axis, the number of the factor that it serves at each operator, or -1.
        loss: Function that was planned, called as `loss(module, *inputs)`; None for `module(*inputs)`.
        micro_batches: Number of calls before each update that were planned.

    Raises:
        ConfigError: The table belongs to another module, or to other shapes.
    """
    axes = axes_of(mesh)

    def traced(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Traced:
        program = trace_module(module, inputs, loss)
        return program, plan_of_table(graph_of(program, micro_batches=micro_batches), axes, served)

    def plan_again(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Traced:
        try:
            return traced(module, inputs)
        except ConfigError:
            program = trace_module(module, inputs, loss)
            graph = graph_of(program, micro_batches=micro_batches)
            return program, plan_graph(graph, mesh_from(axes, "dgx-a100"), WITHOUT_TREES).plan

    case = case_of(module, inputs, mesh.device_type)
    return parallel_module(module, mesh, traced(module, inputs), case, plan_again)
