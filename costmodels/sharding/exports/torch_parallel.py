"""Placements of a module's tensors under a plan, and the module that trains with them; see `torch_modules.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed import device_mesh as torch_meshes
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from costmodels.sharding.exports.torch_modules import Case, PlannedModule, Traced
from costmodels.sharding.frontends.torch.graph import UPDATE
from costmodels.sharding.layouts import Layout
from costmodels.sharding.plan import Plan

Placements = tuple[Placement, ...]
"""Placements of one tensor, by dims of the mesh."""

ValueOf = Callable[[str, torch.Tensor], torch.Tensor]
"""Function that returns the whole value of a parameter or buffer, given by its name."""


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and the buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def planned_placements(plan: Plan, names: Iterable[str]) -> dict[str, Placements]:
    """Return the placements in which a plan keeps arguments of the step.

    Buffers that no step changes are constants in the graph, which each device has.
    """
    numbers = {tensor.name: number for number, tensor in enumerate(plan.graph.tensors)}
    everywhere: Layout = (-1,) * len(plan.mesh.sizes)
    return {name: _placements(plan.layout(numbers[name]) if name in numbers else everywhere) for name in names}


def gradient_placements(plan: Plan) -> dict[str, Placements]:
    """Return the placements of gradients when the optimizer begins, by the parameters' names."""
    updates = {op.name.removesuffix(".update"): op for op in plan.graph.ops if op.primitive == UPDATE}
    return {name: _placements(plan.layout(op.operands[1])) for name, op in updates.items()}


def trained_placements(plan: Plan, names: Iterable[str]) -> dict[str, Placements]:
    """Return the placements of a training module's tensors: trained parameters lie where the plan updates them."""
    return planned_placements(plan, names) | gradient_placements(plan)


def parallel_module(
    module: torch.nn.Module,
    device_mesh: torch_meshes.DeviceMesh,
    traced: Traced,
    case: Case,
    plan_again: Callable[[torch.nn.Module, tuple[Any, ...]], Traced],
    *,
    value_of: ValueOf | None = None,
) -> PlannedModule:
    """Return a module that trains as planned; to be called on all ranks.

    Args:
        module: Module that was traced, or one like it, whose tensors become DTensors with rank 0's values.
        device_mesh: Mesh with the axes of the plan.
        traced: Traced step and its plan.
        case: What the trace depends on.
        plan_again: Function that traces and plans the module on other inputs.
        value_of: Function that returns the value of a tensor; None for the tensor's own.
    """
    deal(module, device_mesh, trained_placements(traced[1], tensors_of(module)), value_of=value_of)
    return PlannedModule(module, device_mesh, traced, case, plan_again)


def deal(
    module: torch.nn.Module,
    device_mesh: torch_meshes.DeviceMesh,
    placements: Mapping[str, Placements],
    *,
    value_of: ValueOf | None = None,
) -> torch.nn.Module:
    """Replace a module's parameters and buffers by DTensors in place, with rank 0's values; to be called on all ranks.

    A parameter that is used in several places stays one parameter.

    Args:
        module: Module whose tensors are replaced.
        device_mesh: Mesh of the ranks.
        placements: Placements by the tensors' names.
        value_of: Function that returns the value of a tensor by its name; None for the tensor's own.
    """
    # Tensors are identified by id, so that a shared parameter is distributed once.
    dealt: dict[int, torch.Tensor] = {}
    for name, tensor in tensors_of(module).items():
        value = tensor if value_of is None else value_of(name, tensor)
        found = distribute_tensor(value.detach(), device_mesh, placements[name])
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        dealt[id(tensor)] = torch.nn.Parameter(found, tensor.requires_grad) if is_parameter else found
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            part.register_parameter(name, dealt[id(parameter)])  # type: ignore[arg-type] # made above
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, name, dealt[id(buffer)])
    return module


def _placements(layout: Layout) -> Placements:
    """Convert a layout to placements; a layout here has no partial sums."""
    return tuple(Shard(dim) if dim >= 0 else Replicate() for dim in layout)
