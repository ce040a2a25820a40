"""Sharding of a torch module's training step over a mesh: DTensor placements, and their distribution to the ranks.

    plan = plan_torch(module, tokens, targets, loss=loss, mesh="data=4,model=2")
    device_mesh = plan.device_mesh("cuda")  # on every rank
    planned = plan.parallelize(module, device_mesh)
    optimizer = torch.optim.AdamW(planned.parameters())
    planned(tokens, targets).backward()

`parallelize` runs the plan. `distribute` only places parameters: DTensor then decides by itself how operators compute
and what is sent. `redistributions` lists what the plan does there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import device_mesh as torch_meshes
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from costmodels.sharding.device_mesh import DeviceMesh, mesh_from
from costmodels.sharding.exports.torch_modules import Case, PlannedModule, Traced, case_of
from costmodels.sharding.exports.torch_parallel import (
    Placements,
    deal,
    gradient_placements,
    parallel_module,
    planned_placements,
    tensors_of,
)
from costmodels.sharding.exports.torch_placements import Redistribution, torch_placements
from costmodels.sharding.frontends.torch.graph import MOMENTS, graph_of
from costmodels.sharding.frontends.torch.program import Loss, Program, input_names, trace_module
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from tuner.planners.doubts import check_known, warn_of_sampled, warn_of_useless
from tuner.planners.planning import WITHOUT_TREES, Planned, PlannerOptions, plan_graph


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsaid:
    """Redistribution of the plan that DTensor can't express.

    Attributes:
        tensor: Name of the tensor that is sent.
        op: Name of the operator that writes or reads it.
        why: Sentence on what DTensor does instead.
    """

    tensor: str
    op: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TorchPlan:
    """Plan of a module's training step, in DTensor's terms.

    Attributes:
        planned: Plan with its cost, and the way it was found.
        mesh: Names and sizes of the mesh's dims.
        parameters: Placements of the module's parameters and buffers, by name.
        optimizer: Placements of Adam's moments, named `NAME.mean` and `NAME.square`.
        inputs: Tree like the tuple of inputs, with placements for tensors and None for everything else.
        gradients: Placements of the parameters' gradients in the plan, by the parameters' names.
        redistributions: Changes of layouts in the plan, in the order of the operators.
        unsaid: Redistributions that contiguous parts can't do as the plan does.
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
    _program: Program
    _case: Case
    _plan_again: Callable[[torch.nn.Module, tuple[Any, ...]], Traced]

    def device_mesh(self, device_type: str) -> torch_meshes.DeviceMesh:
        """Build the plan's mesh from the ranks of the process group; to be called on all of them.

        Raises:
            ConfigError: there are more or fewer ranks than the plan has devices.
        """
        return mesh_of_ranks(self.mesh, device_type)

    def distribute(self, module: torch.nn.Module, device_mesh: torch_meshes.DeviceMesh) -> torch.nn.Module:
        """Replace a module's parameters and buffers by DTensors in place, as planned; to be called on all ranks.

        All ranks get rank 0's values. A parameter that is used in several places stays one parameter.

        Raises:
            ConfigError: the module has other parameters or buffers than the planned one, or the mesh is another.
        """
        self._check_tensors(module, device_mesh)
        return deal(module, device_mesh, self.parameters)

    def parallelize(self, module: torch.nn.Module, device_mesh: torch_meshes.DeviceMesh | None = None) -> PlannedModule:
        """Return a module that trains as planned; to be called on all ranks.

        The module's parameters become DTensors, with rank 0's values. They lie where the plan updates them, so that
        gradients and the moments of torch's optimizers lie there, too. Where the plan keeps a parameter in another
        layout, each forward pass brings it there, which the plan does at the end of a step.

        Args:
            module: Module like the planned one.
            device_mesh: Mesh like the plan's; None for one of all ranks on the type of the parameters' device.

        Raises:
            ConfigError: the module has other parameters or buffers than the planned one or other parts in training, the
                mesh is another, or an operator can't run as the plan cuts it.
        """
        if device_mesh is None:
            device_mesh = self.device_mesh(next(module.parameters()).device.type)
        modes = [words for words in case_of(module, ()) if not words.startswith("autocast")]
        for words in modes:
            if words not in self._case:
                raise ConfigError(
                    "is not in the mode in which it was planned",
                    key="module",
                    value=words,
                    nearest="call train() or eval() on the module before plan_torch",
                )
        plan = self.planned.plan
        self._check_tensors(module, device_mesh)
        return parallel_module(module, device_mesh, (self._program, plan), self._case, self._plan_again)

    def _check_tensors(self, module: torch.nn.Module, device_mesh: torch_meshes.DeviceMesh) -> None:
        """Check that a mesh is the plan's, and that a module has the planned parameters and buffers.

        Raises:
            ConfigError: it has others, or the mesh is another.
        """
        self._check(device_mesh)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(module).items()}
        for name in (*shapes, *self._shapes):
            if shapes.get(name) != self._shapes.get(name):
                raise ConfigError(
                    "is not in both, the module and the plan, with one shape",
                    key="module",
                    value=name,
                    nearest="plan the module that is distributed",
                )

    def distribute_inputs(self, *inputs: Any, device_mesh: torch_meshes.DeviceMesh) -> tuple[Any, ...]:
        """Return inputs as DTensors, as planned, with rank 0's values; to be called on all ranks.

        Raises:
            ConfigError: the inputs are no tree like the planned ones, or the mesh is another.
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
        """Check that a mesh is the plan's.

        Raises:
            ConfigError: it has other dims or sizes.
        """
        if axes_of(device_mesh) != self.mesh:
            raise ConfigError(
                "is not the plan's", key="device_mesh", value=axes_of(device_mesh), nearest=f"that is {self.mesh}"
            )


def plan_torch(
    module: torch.nn.Module,
    *inputs: Any,
    mesh: torch_meshes.DeviceMesh | DeviceMesh | Mapping[str, int] | str,
    loss: Loss | None = None,
    cluster: Cluster | str = "dgx-a100",
    options: PlannerOptions = WITHOUT_TREES,
    strict: bool = False,
) -> TorchPlan:
    """Shard the training step of a module over a mesh: forward, backward and Adam; nothing is computed.

    Args:
        module: Module on any device, also `meta`; its parameters that require gradients are trained.
        inputs: Trees of tensors, of which only shapes and types are read.
        mesh: Mesh of torch, or dims with their sizes, the slowest first, also as `data=4,model=2`. A mesh dim that does
            not divide a dim of a tensor leaves it whole.
        loss: Function to differentiate, called as `loss(module, *inputs)`; None for `module(*inputs)`.
        cluster: Cluster of the mesh's devices, from its first host on in the order of the mesh, or a name of the
            catalog for as few hosts as the mesh can fill. A `costmodels.sharding.device_mesh.DeviceMesh` brings its own
            cluster.
        options: Planner and its options.
        strict: Whether to refuse a module with operators that have no sharding rule.

    Raises:
        ConfigError: the module is none, its loss can't be differentiated, the mesh can't be formed, no plan is found
            that fits, or an operator has no rule and `strict` is set.

    Warns:
        UserWarning: an operator has no rule, a dim of the mesh divides no dim that can be cut, or the plan depends on
            values of the inputs.
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            "must be a torch.nn.Module",
            key="module",
            value=getattr(module, "__name__", module),
            nearest="a function has no parameters to shard; give the module and loss=",
        )
    own_mesh = mesh_from(axes_of(mesh) if isinstance(mesh, torch_meshes.DeviceMesh) else mesh, cluster)
    program = trace_module(module, inputs, loss)
    graph = graph_of(program)
    check_known(graph, strict=strict)
    found = plan_graph(graph, own_mesh, options)

    def plan_again(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Traced:
        other = trace_module(module, inputs, loss)
        other_graph = graph_of(other)
        check_known(other_graph, strict=strict)
        return other, plan_graph(other_graph, own_mesh, options).plan

    warn_of_useless(graph, found.plan.mesh)
    warn_of_sampled(graph)
    plan, words = found.plan, torch_placements(found.plan)
    known = {tensor.name for tensor in plan.graph.tensors}
    named = tensors_of(module)
    moments = [name for one in named for name in _moments(one) if name in known]
    places = planned_placements(plan, [*named, *moments, *input_names(inputs)])
    return TorchPlan(
        planned=found,
        mesh=words.mesh,
        parameters={name: places[name] for name in named},
        optimizer={name: places[name] for name in moments},
        inputs=_input_tree(inputs, places),
        gradients=gradient_placements(plan),
        redistributions=words.redistributions,
        unsaid=tuple(
            Unsaid(
                tensor=tensor,
                op=op,
                why="two dims of the mesh shard one dim of the tensor, the earlier one as the major one; this change "
                "of layout does not keep that order, so that it sends other bytes than the plan says",
            )
            for tensor, op in words.broken
        ),
        _shapes={name: tuple(tensor.shape) for name, tensor in named.items()},
        _program=program,
        _case=case_of(module, inputs),
        _plan_again=plan_again,
    )


def mesh_of_ranks(axes: Mapping[str, int], device_type: str) -> torch_meshes.DeviceMesh:
    """Build a mesh from all ranks of the process group; to be called on all of them.

    Raises:
        ConfigError: there are more or fewer ranks than the mesh has devices.
    """
    num_ranks, num_devices = torch.distributed.get_world_size(), math.prod(axes.values())
    if num_ranks != num_devices:
        in_words = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ConfigError(f"needs {num_devices} ranks", key="mesh", value=in_words, nearest=f"{num_ranks} are here")
    return torch_meshes.init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def axes_of(mesh: torch_meshes.DeviceMesh) -> dict[str, int]:
    """Return names and sizes of a mesh's dims.

    Raises:
        ConfigError: the dims have no names.
    """
    if mesh.mesh_dim_names is None:
        raise ConfigError("must have names of its dims", key="mesh", nearest="init_device_mesh(..., mesh_dim_names=)")
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def _is_placements(node: Any) -> bool:
    """Return whether a node of a tree is the placements of a tensor."""
    return isinstance(node, tuple) and len(node) > 0 and all(isinstance(each, Placement) for each in node)


def _input_tree(inputs: tuple[Any, ...], placements: Mapping[str, Placements]) -> tuple[Any, ...]:
    """Return the inputs with placements for tensors and None for everything else."""
    leaves, tree = pytree.tree_flatten(inputs)
    names = iter(input_names(inputs))
    places = [placements[next(names)] if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    made: tuple[Any, ...] = pytree.tree_unflatten(places, tree)
    return made


def _moments(name: str) -> list[str]:
    return [f"{name}.{moment}" for moment in MOMENTS]
