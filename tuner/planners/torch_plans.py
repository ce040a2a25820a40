"""A torch module's training step sharded over a mesh, for who wrote it: DTensor placements, and how to deal them out.

    plan = plan_torch(module, tokens, targets, loss=loss, mesh="data=4,model=2")
    device_mesh = plan.device_mesh("cuda")  # on every rank
    plan.distribute(module, device_mesh)
    found = loss(module, *plan.distribute_inputs(tokens, targets, device_mesh=device_mesh))

Placements say how a step's tensors begin. In between, DTensor decides by itself how operators compute and what is sent:
`redistributions` tell what the plan does there, and a module may follow with `redistribute`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import device_mesh as torch_meshes
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from costmodels.sharding.device_mesh import DeviceMesh, mesh_from
from costmodels.sharding.exports.torch_placements import Redistribution, torch_placements
from costmodels.sharding.frontends.torch.graph import MOMENTS, UPDATE, graph_of
from costmodels.sharding.frontends.torch.program import Loss, input_names, traced
from costmodels.sharding.layouts import Layout
from costmodels.sharding.plan import Plan
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from tuner.planners.planning import Planned, PlannerOptions, planned

WHOLE_AXES = PlannerOptions(whole_axes=True)
"""A mesh dim shards one dim of a tensor. Otherwise the plan's mesh has a dim for each prime factor, as `model.0`."""

Placements = tuple[Placement, ...]
"""Of one tensor, by dims of the mesh."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsaid:
    """Where DTensor has no words for what the plan does.

    Attributes:
        tensor: What is moved.
        op: The operator that writes or reads it.
        why: What DTensor does instead.
    """

    tensor: str
    op: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TorchPlan:
    """A module's training step with a plan.

    Attributes:
        planned: The plan, what a step costs with it, and how it was found.
        mesh: Names and sizes of the mesh's dims.
        parameters: Placements of the module's parameters and buffers, by name.
        optimizer: The same of Adam's moments, as `NAME.mean` and `NAME.square`.
        inputs: A tree like the tuple of inputs, with placements in place of tensors and None in place of all else.
        gradients: How the plan has the gradients of parameters, by the parameters' names.
        redistributions: Where the plan changes layouts, in the order of the operators.
        unsaid: Of these, what DTensor can't do as the plan does.
    """

    planned: Planned
    mesh: dict[str, int]
    parameters: dict[str, Placements]
    optimizer: dict[str, Placements]
    inputs: tuple[Any, ...]
    gradients: dict[str, Placements]
    redistributions: tuple[Redistribution, ...]
    unsaid: tuple[Unsaid, ...]
    _shapes: dict[str, tuple[int, ...]]

    def device_mesh(self, device_type: str) -> torch_meshes.DeviceMesh:
        """The plan's mesh of the ranks of the process group; called on all of them.

        Raises:
            ConfigError: these are not as many as the plan has devices.
        """
        num_ranks, num_devices = torch.distributed.get_world_size(), self.planned.plan.mesh.num_devices
        if num_ranks != num_devices:
            raise ConfigError(
                f"needs {num_devices} ranks",
                key="mesh",
                value=self.planned.plan.mesh.in_words,
                nearest=f"{num_ranks} are here",
            )
        return torch_meshes.init_device_mesh(device_type, tuple(self.mesh.values()), mesh_dim_names=tuple(self.mesh))

    def distribute(self, module: torch.nn.Module, device_mesh: torch_meshes.DeviceMesh) -> torch.nn.Module:
        """Makes a module's parameters and buffers DTensors as the plan has them, in place; called on all ranks.

        Rank 0's values are what all get. A parameter that stands in several places stays one.

        Raises:
            ConfigError: the module has others than what was planned, or the mesh is another.
        """
        self._check(device_mesh)
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        for name in (*shapes, *self._shapes):
            if shapes.get(name) != self._shapes.get(name):
                raise ConfigError(
                    "is not in both, the module and the plan, with one shape",
                    key="module",
                    value=name,
                    nearest="plan the module that is distributed",
                )
        dealt: dict[int, torch.Tensor] = {}
        for name, tensor in named.items():
            found = distribute_tensor(tensor.detach(), device_mesh, self.parameters[name])
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            dealt[id(tensor)] = torch.nn.Parameter(found, tensor.requires_grad) if is_parameter else found
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                part.register_parameter(name, dealt[id(parameter)])  # type: ignore[arg-type] # made above
            for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
                setattr(part, name, dealt[id(buffer)])
        return module

    def distribute_inputs(self, *inputs: Any, device_mesh: torch_meshes.DeviceMesh) -> tuple[Any, ...]:
        """Inputs as DTensors as the plan has them, of which rank 0's values are what all get; called on all ranks.

        Raises:
            ConfigError: they are no tree like the inputs of the plan, or the mesh is another.
        """
        self._check(device_mesh)
        leaves, tree = pytree.tree_flatten(inputs)
        places, planned_tree = pytree.tree_flatten(self.inputs, is_leaf=_is_placements)
        if tree != planned_tree:
            raise ConfigError("must be trees like those that were planned", key="inputs")
        found = [
            leaf if place is None else distribute_tensor(leaf, device_mesh, place)
            for leaf, place in zip(leaves, places, strict=True)
        ]
        made: tuple[Any, ...] = pytree.tree_unflatten(found, tree)
        return made

    def _check(self, device_mesh: torch_meshes.DeviceMesh) -> None:
        if _axes_of(device_mesh) != self.mesh:
            raise ConfigError(
                "is not the plan's", key="device_mesh", value=_axes_of(device_mesh), nearest=f"that is {self.mesh}"
            )


def plan_torch(
    module: torch.nn.Module,
    *inputs: Any,
    mesh: torch_meshes.DeviceMesh | DeviceMesh | Mapping[str, int] | str,
    loss: Loss | None = None,
    cluster: Cluster | str = "dgx-a100",
    options: PlannerOptions = WHOLE_AXES,
) -> TorchPlan:
    """Shards the training step of a module over a mesh: forward, backward and Adam; nothing is computed.

    Args:
        module: On any device, also `meta`; of its parameters those are trained that require gradients.
        inputs: Trees of tensors, of which shapes and types are read.
        mesh: torch's, or dims with their sizes, the slowest first, also as `data=4,model=2`. A dim of a tensor that
            one can't divide is whole along it.
        loss: What is differentiated, as `loss(module, *inputs)`; None where that is `module(*inputs)`.
        cluster: What the mesh's devices are, from the first host on in the order of the mesh: a cluster, or a name of
            the catalog for as few hosts as the mesh can fill. A `costmodels.sharding.device_mesh.DeviceMesh` stands on
            its own.
        options: How it is planned.

    Raises:
        ConfigError: there is no module, its loss can't be differentiated, the mesh can't be formed, or no plan is found
            that fits.
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            "must be a torch.nn.Module",
            key="module",
            value=getattr(module, "__name__", module),
            nearest="a function has no parameters to shard; give the module and loss=",
        )
    own_mesh = mesh_from(_axes_of(mesh) if isinstance(mesh, torch_meshes.DeviceMesh) else mesh, cluster)
    found = planned(graph_of(traced(module, inputs, loss)), own_mesh, options)
    plan, words = found.plan, torch_placements(found.plan)
    numbers = {tensor.name: number for number, tensor in enumerate(plan.graph.tensors)}

    def lying(name: str) -> Placements:
        # buffers that no step changes are constants in the graph, which each device has
        return _placements(plan.layout(numbers[name])) if name in numbers else _placements((-1,) * len(plan.mesh.sizes))

    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return TorchPlan(
        planned=found,
        mesh=words.mesh,
        parameters={name: lying(name) for name in named},
        optimizer={name: lying(name) for one in named for name in _moments(one) if name in numbers},
        inputs=_input_tree(inputs, lying),
        gradients=_gradients(plan),
        redistributions=words.redistributions,
        unsaid=tuple(
            Unsaid(
                tensor=tensor,
                op=op,
                why="two dims of the mesh cut one dim, the earlier as the major one; what stays there is not the "
                "major part before and after, so that DTensor moves more than the plan says",
            )
            for tensor, op in words.broken
        ),
        _shapes={name: tuple(tensor.shape) for name, tensor in named.items()},
    )


def _axes_of(mesh: torch_meshes.DeviceMesh) -> dict[str, int]:
    """Names and sizes of a mesh's dims.

    Raises:
        ConfigError: they have no names.
    """
    if mesh.mesh_dim_names is None:
        raise ConfigError("must have names of its dims", key="mesh", nearest="init_device_mesh(..., mesh_dim_names=)")
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def _placements(layout: Layout) -> Placements:
    """How a tensor lies, by dims of the mesh; what lies has no partial sums."""
    return tuple(Shard(dim) if dim >= 0 else Replicate() for dim in layout)


def _is_placements(node: Any) -> bool:
    return isinstance(node, tuple) and len(node) > 0 and all(isinstance(each, Placement) for each in node)


def _input_tree(inputs: tuple[Any, ...], lying: Callable[[str], Placements]) -> tuple[Any, ...]:
    """Placements in place of tensors, and None in place of all else."""
    leaves, tree = pytree.tree_flatten(inputs)
    names = iter(input_names(inputs))
    places = [lying(next(names)) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    made: tuple[Any, ...] = pytree.tree_unflatten(places, tree)
    return made


def _moments(name: str) -> list[str]:
    """What the optimizer keeps of a parameter."""
    return [f"{name}.{moment}" for moment in MOMENTS]


def _gradients(plan: Plan) -> dict[str, Placements]:
    """How gradients lie when the optimizer begins."""
    updates = {op.name.removesuffix(".update"): op for op in plan.graph.ops if op.primitive == UPDATE}
    return {name: _placements(plan.layout(op.operands[1])) for name, op in updates.items()}
