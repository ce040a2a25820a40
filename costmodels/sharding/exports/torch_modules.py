"""Module that trains as a plan says, on the ranks of a mesh: parameters are DTensors, and each rank computes its parts.

A call of the module returns the loss that was planned, whole on every rank, and its backward pass leaves the gradients
with the parameters. Optimizers, gradient clipping and checkpoints of torch take both as they take those of FSDP2.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import device_mesh as torch_meshes
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from costmodels.sharding.exports.torch_apply import LocalStep
from costmodels.sharding.exports.torch_ranks import layout_of, placements_of
from costmodels.sharding.frontends.torch.program import Program
from costmodels.sharding.plan import Plan
from hardware.io.errors import ConfigError

Traced = tuple[Program, Plan]
"""Traced step and the plan of its graph."""

MOST_VALUES = 8
"""Largest number of plans for inputs of one form that differ in what the module's code reads from them."""

Case = tuple[str, ...]
"""What a trace depends on, in words: inputs, modes of submodules and autocast."""


def case_of(module: torch.nn.Module, inputs: tuple[Any, ...], device_type: str = "cpu") -> Case:
    """Return what a module's trace depends on beside its parameters.

    Args:
        module: Module to trace.
        inputs: Its inputs.
        device_type: Type of the device of which autocast is read.
    """
    leaves, _ = pytree.tree_flatten_with_path(inputs)
    is_cast = torch.is_autocast_enabled(device_type)
    return (
        *(
            f"inputs{pytree.keystr(path)}: {f'{leaf.dtype} {tuple(leaf.shape)}' if _is_tensor(leaf) else repr(leaf)}"
            for path, leaf in leaves
        ),
        f"autocast: {torch.get_autocast_dtype(device_type) if is_cast else 'off'}",
        *(f"{name or 'module'}: {'training' if part.training else 'eval'}" for name, part in module.named_modules()),
    )


class PlannedModule(torch.nn.Module):
    """Module whose forward and backward pass run sharded; `TorchPlan.parallelize` makes it.

    It has the names, parameters and buffers of the module that was planned, which shares them. Hooks of that module do
    not run. A call takes the inputs of the plan: DTensors on the mesh in any placements, or whole tensors that are the
    same on every rank, which the first call checks; dicts may have their keys in any order. It returns the loss. Inputs
    of other shapes, inputs from which the module's code reads other values, another mode of a submodule and another
    autocast are planned when they first come, with a warning.

    Args:
        module: Module whose parameters are DTensors on the mesh.
        device_mesh: Mesh with the axes of the plan.
        traced: Traced step and its plan.
        case: What the trace depends on.
        plan_again: Function that traces and plans the module on other inputs.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_mesh: torch_meshes.DeviceMesh,
        traced: Traced,
        case: Case,
        plan_again: Callable[[torch.nn.Module, tuple[Any, ...]], Traced],
    ) -> None:
        super().__init__()
        # in a tuple, it is no part of this module, so that names stay those of the planned one
        self._planned = (module,)
        self.__dict__.update(_parameters=module._parameters, _buffers=module._buffers)
        self.__dict__.update(_modules=module._modules, _non_persistent_buffers_set=module._non_persistent_buffers_set)
        self.training = module.training
        self._device_mesh, self._first, self._plan_again = device_mesh, case, plan_again
        self._steps = {case: [self._step_of(traced)]}
        self._checked: set[Case] = set()
        self._own_forward = module.__dict__.get("forward")

    def forward(self, *inputs: Any) -> Tensor:
        """Return the loss of the inputs.

        Raises:
            ConfigError: the plan of other inputs can't be run, or whole inputs are not the same on all ranks.
        """
        inputs = tuple(self._in_order(at, one) if type(one) is dict else one for at, one in enumerate(inputs))
        parameters = list(self._planned[0].parameters())
        others = [*self._planned[0].buffers(), *(leaf for leaf in pytree.tree_leaves(inputs) if _is_tensor(leaf))]
        step = self._step_on(inputs, [*parameters, *others])
        found: Tensor = _PlannedLoss.apply(step, others, *parameters)  # type: ignore[no-untyped-call] # as torch has it
        return found

    @property
    def module_planned(self) -> torch.nn.Module:
        """Module that was planned, whose parameters are this one's."""
        return self._planned[0]

    def joined(self, parts: Any) -> Any:
        """Return a batch of which each rank has a part, as a tree of DTensors; to be called on all ranks.

        Args:
            parts: Tree of tensors, which are joined along their first dim. Tensors without dims must be the same on all
                ranks, and stay.

        Raises:
            ConfigError: the parts have other shapes on other ranks, or a tensor without dims has other values.
        """
        leaves, tree = pytree.tree_flatten(parts)
        tensors = [leaf for leaf in leaves if _is_tensor(leaf)]
        words = [repr((str(each.dtype), tuple(each.shape), None if each.dim() else each.item())) for each in tensors]
        if not self._agree([word.encode() for word in words]):
            raise ConfigError(
                "have other shapes, or other numbers, on other ranks",
                key="inputs",
                value=f"{'; '.join(words)} here",
                nearest="pad the parts to one length, and drop the last batch if it is smaller",
            )
        rows = [Shard(0)] * self._device_mesh.ndim
        found = [
            DTensor.from_local(leaf, self._device_mesh, rows, run_check=False)
            if _is_tensor(leaf) and leaf.dim()
            else leaf
            for leaf in leaves
        ]
        return pytree.tree_unflatten(found, tree)

    def replace_forward(self, forward: Callable[..., Any]) -> None:
        """Let calls of the module that was planned run a function; it is planned again by its own code."""
        self._planned[0].forward = forward

    def train(self, mode: bool = True) -> PlannedModule:
        """Set the mode of the module and its parts."""
        self._planned[0].train(mode)
        self.training = mode
        return self

    def _in_order(self, at: int, given: dict[Any, Any]) -> dict[Any, Any]:
        """Return an input with its keys in the order in which they were planned."""
        words = [word for word in self._first if word.startswith(f"inputs[{at}]")]

        def place(key: Any) -> int:
            start = f"inputs[{at}][{key!r}]"
            return next((number for number, word in enumerate(words) if word.startswith(start)), len(words))

        return {key: given[key] for key in sorted(given, key=place)}

    def _step_on(self, inputs: tuple[Any, ...], arguments: Sequence[Tensor]) -> LocalStep:
        case = case_of(self._planned[0], inputs, self._device_mesh.device_type)
        if case not in self._steps:
            pairs = zip(self._first, case, strict=False)
            own, other = next((pair for pair in pairs if pair[0] != pair[1]), ("other inputs", "these"))
            name = type(self._planned[0]).__name__
            warnings.warn(f"{name} is planned again: with {other}; it was planned with {own}", stacklevel=3)
            self._steps[case] = [self._step_again(inputs)]
        if case not in self._checked:  # once, as it needs a message
            self._check_inputs(inputs)
            self._checked.add(case)
        return next((step for step in self._steps[case] if step.holds_for(arguments)), None) or self._step_for(
            inputs, case, arguments
        )

    def _step_for(self, inputs: tuple[Any, ...], case: Case, arguments: Sequence[Tensor]) -> LocalStep:
        """Plan inputs from which the module's code reads other values.

        Raises:
            ConfigError: there are too many of them.
        """
        known, name = self._steps[case], type(self._planned[0]).__name__
        differing = next(each for each in known[0].taken if each.of(arguments) != each.value)
        value = differing.of(arguments)
        if len(known) == MOST_VALUES:
            raise ConfigError(
                f"reads other values of its inputs in each call, and {MOST_VALUES} plans are kept",
                key="parallelize",
                value=f"{name}: {differing.place} reads {value!r}",
                nearest="compute with masks (torch.where), or pad inputs so that the value stays",
            )
        warnings.warn(
            f"{name} is planned again: {differing.place} reads {value!r}; it was planned with {differing.value!r}",
            stacklevel=4,
        )
        known.append(self._step_again(inputs))
        return known[-1]

    def _step_again(self, inputs: tuple[Any, ...]) -> LocalStep:
        """Plan other inputs by the module's own code, whatever its calls run."""
        module = self._planned[0]
        replaced = module.__dict__.pop("forward", None)
        if self._own_forward is not None:
            module.forward = self._own_forward
        try:
            return self._step_of(self._plan_again(module, inputs))
        finally:
            module.__dict__.pop("forward", None)
            if replaced is not None:
                module.forward = replaced

    def _step_of(self, traced: Traced) -> LocalStep:
        """Return the step of a plan.

        Raises:
            ConfigError: the plan can't be run, or the ranks have different ones.
        """
        step = LocalStep(*traced, self._device_mesh)
        plan = traced[1]
        words = [plan.served.astype("<i8").tobytes(), *(op.name.encode() for op in plan.graph.ops)]
        if not self._agree(words):
            raise ConfigError(
                "is not the same on all ranks", key="plan", nearest="plan on each rank with the same model and options"
            )
        return step

    def _check_inputs(self, inputs: tuple[Any, ...]) -> None:
        """Check that tensors without placements are the same on all ranks.

        Raises:
            ConfigError: they are not.
        """
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if _is_tensor(leaf) and not isinstance(leaf, DTensor)]
        flat = [leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for leaf in leaves]
        if not self._agree([each.numpy().tobytes() for each in flat]):
            raise ConfigError(
                "are not the same on all ranks",
                key="inputs",
                nearest="DTensor.from_local(own_part, device_mesh, [Shard(0)]) joins parts",
            )

    def _agree(self, words: Sequence[bytes]) -> bool:
        """Return whether all ranks have the same bytes; to be called on all of them."""
        number = zlib.crc32(b"\n".join(words))
        seen = torch.tensor([number, -number], device=self._device_mesh.device_type)
        for group in self._device_mesh.get_all_groups():
            distributed.all_reduce(seen, distributed.ReduceOp.MAX, group=group)
        return not seen.sum()


class _PlannedLoss(torch.autograd.Function):
    """Loss of a planned step, with the gradients that the step computes."""

    @staticmethod
    def forward(ctx: Any, step: LocalStep, others: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        """Return the loss; buffers among the others are updated in place."""
        with torch.autocast(step.rank.mesh.device_type, enabled=False):
            loss, replaced, saved = step.forward([*parameters, *others])
            for number, part in replaced.items():
                buffer = others[number - len(parameters)]
                assert isinstance(buffer, DTensor), "buffers that a step replaces are distributed"
                layout = layout_of(buffer.placements)
                own = step.rank.move(part, tuple(buffer.shape), step.layout(number), layout)
                buffer.to_local().copy_(own)
        ctx.step, ctx.saved = step, saved
        ctx.places = [
            (tuple(each.shape), layout_of(each.placements)) if isinstance(each, DTensor) else None
            for each in parameters
        ]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the parameters' gradients, as DTensors that lie as the parameters do."""
        if ctx.saved is None:
            raise RuntimeError("the planned step keeps nothing for a second backward pass; call the module again")
        step, saved = ctx.step, ctx.saved
        ctx.saved = None
        layouts = {number: place[1] for number, place in enumerate(ctx.places) if ctx.needs_input_grad[2 + number]}
        with torch.autocast(step.rank.mesh.device_type, enabled=False):
            parts = step.backward(saved, layouts)
        return (None, None, *(_spread(ctx, number, parts, grad) for number in range(len(ctx.places))))


def _spread(ctx: Any, number: int, parts: dict[int, Tensor], grad: Tensor) -> DTensor | None:
    """Return a gradient as a DTensor, scaled by the gradient of the loss."""
    if number not in parts:
        return None
    shape, layout = ctx.places[number]
    return DTensor.from_local(
        parts[number] * grad.to(parts[number].dtype).reshape(()),
        ctx.step.rank.mesh,
        placements_of(layout),
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))),
    )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
