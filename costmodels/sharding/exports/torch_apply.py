"""Application of a plan to a traced torch step: each rank computes its parts, with the plan's collectives in between.

The operators of the trace run one after the other, each on this rank's parts, in the layout in which the plan serves it
(`torch_local`). Where layouts differ, parts are moved (`torch_changes`). Sums that nothing reads yet, such as
gradients, are added up in buckets (`torch_buckets`). Views that were folded into an operator's rule are applied to its
parts. Values that depend on no argument are computed whole on every rank, which keeps its part of them. This includes
random numbers: all ranks draw the whole, from the state of the first rank's generator, so that they draw what a single
process would.

What an operator leaves for the backward pass stays in the layout of the plan. Parts are freed after their last reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import device_mesh as torch_meshes
from torch.distributed.tensor import DTensor
from torch.fx import Node

from costmodels.sharding.exports.torch_buckets import Buckets
from costmodels.sharding.exports.torch_calls import local_shape
from costmodels.sharding.exports.torch_kernels import Held, LocalKernel, localised
from costmodels.sharding.exports.torch_local import REDUCED_BY
from costmodels.sharding.exports.torch_ranks import Rank
from costmodels.sharding.exports.torch_schedule import is_shape_read, scheduled
from costmodels.sharding.exports.torch_wholes import Wholes
from costmodels.sharding.frontends.torch.graph import flatten
from costmodels.sharding.frontends.torch.program import Program
from costmodels.sharding.frontends.torch.sampled_values import TakenValue
from costmodels.sharding.graph import TensorKind
from costmodels.sharding.layouts import Layout
from costmodels.sharding.plan import Plan


@dataclass(slots=True)
class Saved:
    """Tensors that a forward pass keeps for the backward pass, which frees them."""

    held: dict[Held, Tensor] = field(default_factory=dict)


class LocalStep:
    """Training step of a plan on one rank.

    Attributes:
        rank: This rank.

    Args:
        program: Traced step.
        plan: Plan of its graph.
        device_mesh: Mesh with the plan's axes.

    Raises:
        ConfigError: An operator can't run on parts as the plan cuts them, or draws random numbers in the backward pass.
    """

    def __init__(self, program: Program, plan: Plan, device_mesh: torch_meshes.DeviceMesh) -> None:
        self.rank = Rank.on(device_mesh)
        self._program, self._plan = program, plan
        self._flat, self._outputs, kernels = flatten(program)
        self._tensors = {tensor.name: number for number, tensor in enumerate(plan.graph.tensors)}
        self._wholes = Wholes(program, self._flat.known, [value.varies for value in self._flat.values])
        rows = {op.name: row for op, row in zip(plan.graph.ops, plan.served.tolist(), strict=True)}
        self._schedule = scheduled(
            program,
            self._flat,
            [output for output in self._outputs if output is not None],
            [localised(kernel, rows[kernel.step.name], self.rank) for kernel in kernels],
            self._wholes,
            self.layout,
        )

    @property
    def taken(self) -> tuple[TakenValue, ...]:
        """Values of the inputs on which the step depends."""
        return self._program.taken

    def holds_for(self, arguments: Sequence[Tensor]) -> bool:
        """Return whether the module's code reads the traced values from these arguments; all ranks ask together."""
        return all(each.of(arguments) == each.value for each in self.taken)

    def layout(self, number: int) -> Layout:
        """Return the plan's layout of a value, such as an argument; constants are everywhere."""
        value = self._flat.values[number]
        return self._plan.layout(self._tensors[value.name]) if value.varies else self.rank.everywhere

    def forward(self, arguments: Sequence[Tensor]) -> tuple[Tensor, dict[int, Tensor], Saved]:
        """Compute the loss.

        Args:
            arguments: Arguments of the program: DTensors on the mesh, or whole tensors.

        Returns:
            The loss, the parts of arguments that the step replaces, by their numbers and in the plan's layout, and what
            the backward pass needs.
        """
        self._wholes.known = {}
        held: dict[Held, Tensor] = {}
        for number, (given, argument) in enumerate(zip(arguments, self._program.arguments, strict=True)):
            if argument.kind == TensorKind.CONSTANT or not self._flat.values[number].varies:
                self._wholes.known[number] = given.full_tensor() if isinstance(given, DTensor) else given
                self._keep_parts(held, number)
            else:
                held[number, self.layout(number)] = self.rank.part(given, self.layout(number))
        if self._schedule.is_random:
            self.rank.share_generator()
        self._run(held, range(self._schedule.boundary))
        loss = self._taken(held, self._outputs[0], self.rank.everywhere)
        replaced = {
            number: self._taken(held, self._outputs[argument.after], self.layout(number))
            for number, argument in enumerate(self._program.arguments)
            if argument.after is not None
        }
        kept = {
            key: value for key, value in held.items() if self._schedule.last.get(key, -1) >= self._schedule.boundary
        }
        self._wholes.known = {}
        return loss, replaced, Saved(held=kept)

    def backward(self, saved: Saved, layouts: Mapping[int, Layout]) -> dict[int, Tensor]:
        """Compute gradients, and return this rank's parts of them in the given layouts, by arguments."""
        held = saved.held
        self._run(held, range(self._schedule.boundary, len(self._schedule.order)))
        found = {
            number: self._taken(held, self._outputs[after], layout)
            for number, layout in layouts.items()
            if (after := self._program.arguments[number].gradient) is not None
        }
        held.clear()
        self._wholes.known = {}
        return found

    def _run(self, held: dict[Held, Tensor], numbers: Iterable[int]) -> None:
        """Run a part of the step."""
        buckets = Buckets(self.rank, held)
        for number in numbers:
            one = self._schedule.order[number]
            if isinstance(one, Node):
                for value in self._wholes.compute(one, self.rank.device):
                    self._keep_parts(held, value)
                for value in self._schedule.forgotten.get(number, ()):
                    self._wholes.known.pop(value, None)
            else:
                self._run_kernel(held, buckets, one)
            for key in self._schedule.ends.get(number, ()):
                held.pop(key, None)
            if number == self._schedule.boundary - 1:
                # copies of parameters are made again in the backward pass
                for key in [key for key in held if key[0] in self._schedule.states and key[1] != self.layout(key[0])]:
                    del held[key]
        buckets.settle_all()

    def _run_kernel(self, held: dict[Held, Tensor], buckets: Buckets, one: LocalKernel) -> None:
        """Compute this rank's parts of an operator's results, and add up partial sums, or let them wait for others."""
        kernel, own = one.kernel, one.kernel.own_rule
        assert own is not None, "operators of a trace have rules of their own"
        operands = []
        for slot, (value, layout) in enumerate(one.reads):
            if is_shape_read(self._flat, one, slot):
                shape = local_shape(own.operand_shape(slot), layout, self.rank.sizes)
                dtype = _dtype(self._flat.values[value].dtype)
                operands.append(torch.empty(shape, dtype=dtype, device=self.rank.device))
                continue
            buckets.settle((value, self.layout(value)))
            part = self._taken(held, value, layout)
            operands.append(one.read(slot, part, self.rank) if slot < len(kernel.step.operands) else part)
        reduced_by = REDUCED_BY.get(kernel.step.primitive, "sum")
        for slot, (made, value) in enumerate(zip(one.run(operands, self.rank), kernel.step.results, strict=True)):
            part, left = one.written(slot, made, self.rank), one.result_layouts[slot][-1]
            key = (value, self.layout(value))
            if key in self._schedule.last and not (reduced_by == "sum" and buckets.add(key, part, left, key[1])):
                held[key] = self.rank.move(part, self._flat.values[value].shape, left, key[1], reduced_by=reduced_by)

    def _taken(self, held: dict[Held, Tensor], value: int | None, layout: Layout) -> Tensor:
        """Return this rank's part of a value in a layout; it is kept for later readers."""
        assert value is not None, "an output that is needed is a tensor"
        key = (value, layout)
        if key not in held:
            if not self._flat.values[value].varies:
                whole = held[value, self.rank.everywhere]
                return self.rank.cut(whole, layout)
            lies = self.layout(value)
            held[key] = self.rank.move(held[value, lies], self._flat.values[value].shape, lies, layout)
        return held[key]

    def _keep_parts(self, held: dict[Held, Tensor], value: int) -> None:
        """Keep the parts of a whole value that operators read."""
        for layout in self._schedule.layouts.get(value, ()):
            part = self.rank.cut(self._wholes.known[value], layout)
            # a part alone needs less memory than a view of the whole
            held[value, layout] = part if part.numel() == self._wholes.known[value].numel() else part.clone()


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
