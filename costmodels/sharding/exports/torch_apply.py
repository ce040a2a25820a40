"""Application of a plan to a traced torch step: each rank computes its parts, with the plan's collectives in between.

The operators of the trace run one after the other, each on this rank's parts, in the layout in which the plan serves it
(`torch_local`). Where layouts differ, DTensor redistributes: it gathers, exchanges and adds up. Views that were folded
into an operator's rule are applied to its parts. Values that depend on no argument are computed whole on every rank,
which keeps its part of them. This includes random numbers: all ranks draw the whole, from the state of the first rank's
generator, so that they draw what a single process would.

What an operator leaves for the backward pass stays in the layout of the plan. Parts are freed after their last reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import device_mesh as torch_meshes
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx import Node
from torch.fx.node import map_arg

from costmodels.sharding.dims import FactorKind, Place
from costmodels.sharding.exports.torch_calls import LocalCall, Runs, local_shape, part_of, runs_of
from costmodels.sharding.exports.torch_local import REDUCED_BY, can_add_up, can_run, is_random, run_local
from costmodels.sharding.frontends.flat_program import Kernel
from costmodels.sharding.frontends.torch.calls import name_of
from costmodels.sharding.frontends.torch.flat import OF_A_SHAPE
from costmodels.sharding.frontends.torch.graph import flatten
from costmodels.sharding.frontends.torch.program import BACKWARD, Program
from costmodels.sharding.graph import TensorKind
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout
from costmodels.sharding.plan import NONE, Plan, wanted_layout, written_layout
from hardware.io.errors import ConfigError

Held = tuple[int, Layout]
"""A value of the flat program in a layout."""


def placements_of(layout: Layout, reduced_by: str = "sum") -> tuple[Placement, ...]:
    """Return a layout as DTensor's placements, one per axis."""
    known = {REPLICATED: Replicate(), PARTIAL: Partial(reduced_by)}
    return tuple(known[dim] if dim < 0 else Shard(dim) for dim in layout)


def layout_of(placements: Sequence[Placement]) -> Layout:
    """Return placements without partial sums as a layout."""
    return tuple(each.dim if isinstance(each, Shard) else REPLICATED for each in placements)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Local:
    """An operator as every rank runs it.

    Attributes:
        kernel: Operator with the views that were folded into it.
        reads: Value and layout of each operand, and then of each unread value.
        layouts: Layouts of these between all views: where the step reads them, behind each view, the last one at the
            operator.
        result_layouts: Layouts of the results in the same way: at the operator first, and last where the step leaves
            them.
    """

    kernel: Kernel
    reads: tuple[Held, ...]
    layouts: tuple[tuple[Layout, ...], ...]
    result_layouts: tuple[tuple[Layout, ...], ...]
    held: tuple[tuple[Runs, ...], ...]
    result_held: tuple[tuple[Runs, ...], ...]


@dataclass(slots=True)
class Saved:
    """Tensors that a forward pass keeps for the backward pass, which frees them."""

    held: dict[Held, Tensor] = field(default_factory=dict)


class LocalStep:
    """Training step of a plan on one rank.

    Args:
        program: Traced step.
        plan: Plan of its graph.
        device_mesh: Mesh with the plan's axes.

    Raises:
        ConfigError: An operator can't run on parts as the plan cuts them, or draws random numbers in the backward pass.
    """

    def __init__(self, program: Program, plan: Plan, device_mesh: torch_meshes.DeviceMesh) -> None:
        self._program, self._plan, self._mesh = program, plan, device_mesh
        self._sizes = plan.mesh.sizes
        place = device_mesh.get_coordinate()
        assert place is not None, "every rank is in the mesh"
        self._place = tuple(place)
        self._device = torch.device(device_mesh.device_type)
        if self._device.type != "cpu":
            self._device = torch.device(self._device.type, torch.get_device_module(self._device.type).current_device())
        self._flat, self._outputs, kernels = flatten(program)
        self._tensors = {tensor.name: number for number, tensor in enumerate(plan.graph.tensors)}
        self._rows = {op.name: row for op, row in zip(plan.graph.ops, plan.served.tolist(), strict=True)}
        self._wholes = _Wholes(program, self._flat.known, [value.varies for value in self._flat.values])
        locals_ = [self._localised(kernel) for kernel in kernels]
        self._schedule(locals_)

    @property
    def mesh(self) -> torch_meshes.DeviceMesh:
        """Mesh of the ranks."""
        return self._mesh

    def layout(self, number: int) -> Layout:
        """Return the plan's layout of an argument; constants are everywhere."""
        value = self._flat.values[number]
        return self._plan.layout(self._tensors[value.name]) if value.varies else (REPLICATED,) * len(self._sizes)

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
                held[number, self.layout(number)] = self.part(given, self.layout(number))
        if self._random:
            self._share_generator()
        self._run(held, range(self._boundary))
        loss = self._taken(held, self._outputs[0], (REPLICATED,) * len(self._sizes))
        replaced = {
            number: self._taken(held, self._outputs[argument.after], self.layout(number))
            for number, argument in enumerate(self._program.arguments)
            if argument.after is not None
        }
        kept = {key: value for key, value in held.items() if self._last.get(key, -1) >= self._boundary}
        self._wholes.known = {}
        return loss, replaced, Saved(held=kept)

    def backward(self, saved: Saved, layouts: Mapping[int, Layout]) -> dict[int, Tensor]:
        """Compute gradients, and return this rank's parts of them in the given layouts, by arguments."""
        held = saved.held
        self._run(held, range(self._boundary, len(self._order)))
        found = {
            number: self._taken(held, self._outputs[after], layout)
            for number, layout in layouts.items()
            if (after := self._program.arguments[number].gradient) is not None
        }
        held.clear()
        self._wholes.known = {}
        return found

    def part(self, given: Tensor, layout: Layout) -> Tensor:
        """Return this rank's part of a DTensor, or of a tensor that every rank has."""
        if not isinstance(given, DTensor):
            return self._cut(given.to(self._device), layout)
        return _waited(given.redistribute(placements=placements_of(layout)).to_local())

    def _localised(self, kernel: Kernel) -> _Local:
        """Return an operator with the layouts of its tensors.

        Raises:
            ConfigError: it can't run on such parts.
        """
        row = self._rows[kernel.step.name]
        values = (*kernel.step.operands, *kernel.unread)
        wanted = [wanted_layout(kernel.rule, slot, row) for slot in range(len(values))]
        written = [self._written(kernel, slot, row) for slot in range(len(kernel.step.results))]
        via = [*kernel.reads_via, *((),) * len(kernel.unread)]
        layouts = [
            (layout, *(wanted_layout(kernel.rule, at, row) for at in own))
            for layout, own in zip(wanted, via, strict=True)
        ]
        result_layouts = [
            (*(_with_sums(wanted_layout(kernel.rule, at, row), layout) for at in via), layout)
            for layout, via in zip(written, kernel.writes_via, strict=True)
        ]
        op = kernel.node.target
        is_cut = any(factor != NONE for factor in row)
        if is_cut and not can_run(op, kernel.step.params):
            raise ConfigError(
                f"is cut by the plan, and {op} is no operator that can run on parts",
                key="parallelize",
                value=kernel.step.name,
                nearest="pin its dims, or plan without the axis that cuts it",
            )
        if any(PARTIAL in layout for layout in written) and not can_add_up(op):
            raise ConfigError(
                f"is computed in parts by the plan, and results of {op} can't be combined",
                key="parallelize",
                value=kernel.step.name,
                nearest="pin its dims, or plan without the axis that cuts it",
            )
        if "for_cpu" in str(op) and self._device.type != "cpu":
            raise ConfigError(
                "is the fused attention of CPUs, which the trace has",
                key="parallelize",
                value=kernel.step.name,
                nearest="plan the module under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
            )
        places = kernel.rule.operands
        return _Local(
            kernel=kernel,
            reads=tuple(zip(values, wanted, strict=True)),
            layouts=tuple(layouts),
            result_layouts=tuple(result_layouts),
            held=tuple(self._runs(kernel, places[own[-1] if own else slot], row) for slot, own in enumerate(via)),
            result_held=tuple(
                self._runs(kernel, places[own[0]] if own else kernel.rule.results[slot], row)
                for slot, own in enumerate(kernel.writes_via)
            ),
        )

    def _runs(self, kernel: Kernel, place: Place, row: Sequence[int]) -> tuple[Runs, ...]:
        return runs_of(kernel.rule, place, row, self._sizes, self._place)

    def _written(self, kernel: Kernel, slot: int, row: Sequence[int]) -> Layout:
        """Return the layout in which a kernel leaves a result.

        A single result without a factor that is a map does not depend on it: each rank has the whole.
        """
        layout = written_layout(kernel.rule, slot, row)
        is_single = len(kernel.step.results) == 1
        return tuple(
            REPLICATED if dim == PARTIAL and is_single and kernel.rule.factors[factor].kind == FactorKind.MAP else dim
            for dim, factor in zip(layout, row, strict=True)
        )

    def _schedule(self, kernels: Sequence[_Local]) -> None:
        """Put operators and values that depend on no argument in order, and find the last reader of everything."""
        position = {node: number for number, node in enumerate(self._program.trace.graph.nodes)}
        read = {value for one in kernels for value, _ in one.reads}
        read |= {output for output in self._outputs if output is not None}
        needed, self._random = self._wholes.needed(read)

        def place(one: _Local | Node) -> tuple[bool, int]:
            # A kernel stands where its own call does, though it may write what a view of its result was. What depends
            # on no argument is computed in the forward pass.
            is_late = not isinstance(one, Node) and one.kernel.is_backward
            return is_late, position[one if isinstance(one, Node) else one.kernel.node]

        order: list[_Local | Node] = sorted([*kernels, *needed], key=place)
        self._order = order
        self._boundary = sum(not place(one)[0] for one in order)
        for one in order:
            node = one if isinstance(one, Node) else one.kernel.node
            params = {} if isinstance(one, Node) else one.kernel.step.params
            is_late = node.meta.get("custom", {}).get(BACKWARD)
            if is_late and isinstance(node.target, OpOverload) and is_random(node.target, params):
                raise ConfigError(
                    "draws other random numbers in the backward pass than in the forward pass",
                    key="parallelize",
                    value=str(node.target),
                    nearest="keep dropout out of recomputed parts (torch.utils.checkpoint)",
                )
        self._forgotten: dict[int, list[int]] = {}
        for value, number in self._wholes.last_reads(order).items():
            self._forgotten.setdefault(number, []).append(value)
        self._layouts: dict[int, set[Layout]] = {}
        self._last: dict[Held, int] = {}
        states = {
            number for number, argument in enumerate(self._program.arguments) if argument.kind == TensorKind.PARAMETER
        }
        ends = [output for output in self._outputs if output is not None]
        for number, one in enumerate(order):
            for slot, (value, layout) in enumerate(one.reads if isinstance(one, _Local) else ()):
                if self._is_shape_read(one, slot):
                    continue
                if not self._flat.values[value].varies:
                    self._layouts.setdefault(value, set()).add(layout)
                    self._last[value, layout] = number
                    continue
                own = self.layout(value)
                is_first = (value, layout) not in self._last or (
                    value in states and self._last[value, layout] < self._boundary <= number
                )
                if is_first and layout != own:
                    self._last[value, own] = max(number, self._last.get((value, own), -1))
                self._last[value, layout] = number
        for value in ends:
            layout = self.layout(value)
            self._layouts.setdefault(value, set()).add(layout)
            self._last[value, layout] = len(order)
        self._states = states
        self._ends: dict[int, list[Held]] = {}
        for key, number in self._last.items():
            self._ends.setdefault(number, []).append(key)

    def _run(self, held: dict[Held, Tensor], numbers: Iterable[int]) -> None:
        """Run a part of the step."""
        for number in numbers:
            one = self._order[number]
            if isinstance(one, Node):
                for value in self._wholes.compute(one, self._device):
                    self._keep_parts(held, value)
                for value in self._forgotten.get(number, ()):
                    self._wholes.known.pop(value, None)
            else:
                self._run_kernel(held, one)
            for key in self._ends.get(number, ()):
                held.pop(key, None)
            if number == self._boundary - 1:
                # copies of parameters are made again in the backward pass
                for key in [key for key in held if key[0] in self._states and key[1] != self.layout(key[0])]:
                    del held[key]

    def _is_shape_read(self, one: _Local | Node, slot: int) -> bool:
        """Return whether only the shape of a value is read, which each rank can make for itself."""
        if isinstance(one, Node):
            return False
        return slot >= len(one.kernel.step.operands) and self._flat.values[one.reads[slot][0]].varies

    def _run_kernel(self, held: dict[Held, Tensor], one: _Local) -> None:
        """Compute this rank's parts of an operator's results, and add up partial sums."""
        kernel, own = one.kernel, one.kernel.own_rule
        assert own is not None, "operators of a trace have rules of their own"
        operands, count = [], len(kernel.step.operands)
        for slot, (value, layout) in enumerate(one.reads):
            if self._is_shape_read(one, slot):
                meta = local_shape(own.operand_shape(slot), layout, self._sizes)
                operands.append(torch.empty(meta, dtype=_dtype(self._flat.values[value].dtype), device=self._device))
                continue
            part = self._taken(held, value, layout)
            if slot < count:
                for view, before, after in zip(
                    kernel.reads[slot], one.layouts[slot][:-1], one.layouts[slot][1:], strict=True
                ):
                    part = self._viewed(view, part, before, after)
            operands.append(part)
        slots = sorted(range(len(operands)), key=lambda at: kernel.slots[at])
        call = LocalCall(
            op=kernel.node.target,
            params=kernel.step.params,
            operands=[operands[at] for at in slots],
            layouts=[one.layouts[at][-1] for at in slots],
            shapes=[own.operand_shape(at) for at in slots],
            result_layouts=[layouts[0] for layouts in one.result_layouts],
            result_shapes=[
                local_shape(own.result_shape(slot), layouts[0], self._sizes)
                for slot, layouts in enumerate(one.result_layouts)
            ],
            held=[one.held[at] for at in slots],
            result_held=one.result_held,
            sizes=self._sizes,
            place=self._place,
            device=self._device,
        )
        reduced_by = REDUCED_BY.get(kernel.step.primitive, "sum")
        for slot, (part, value) in enumerate(zip(run_local(call), kernel.step.results, strict=True)):
            layouts = one.result_layouts[slot]
            for view, before, after in zip(kernel.writes[slot], layouts[:-1], layouts[1:], strict=True):
                part = self._viewed(view, part, before, after)  # noqa: PLW2901  # one view after another
            key = (value, self.layout(value))
            if key in self._last:
                held[key] = self.move(part, self._flat.values[value].shape, layouts[-1], key[1], reduced_by=reduced_by)

    def _viewed(self, view: Kernel, part: Tensor, layout: Layout, after: Layout) -> Tensor:
        """Return a view of a part, in a layout."""
        own = view.own_rule
        assert own is not None, "views have rules of their own"
        call = LocalCall(
            op=view.node.target,
            params=view.step.params,
            operands=[part],
            layouts=[layout],
            shapes=[own.operand_shape(0)],
            result_layouts=[after],
            result_shapes=[local_shape(own.result_shape(0), after, self._sizes)],
            held=[],  # no view looks elements up
            result_held=[],
            sizes=self._sizes,
            place=self._place,
            device=self._device,
        )
        return run_local(call)[0]

    def _taken(self, held: dict[Held, Tensor], value: int | None, layout: Layout) -> Tensor:
        """Return this rank's part of a value in a layout; it is kept for later readers."""
        assert value is not None, "an output that is needed is a tensor"
        key = (value, layout)
        if key not in held:
            if not self._flat.values[value].varies:
                whole = held[value, (REPLICATED,) * len(self._sizes)]
                return self._cut(whole, layout)
            lies = self.layout(value)
            held[key] = self.move(held[value, lies], self._flat.values[value].shape, lies, layout)
        return held[key]

    def move(
        self, part: Tensor, shape: Sequence[int], before: Layout, after: Layout, *, reduced_by: str = "sum"
    ) -> Tensor:
        """Return this rank's part in another layout, by DTensor's collectives."""
        if before == after:
            return part
        is_bool = part.dtype == torch.bool  # processes exchange no booleans
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        given = DTensor.from_local(
            (part.to(torch.uint8) if is_bool else part).contiguous(),
            self._mesh,
            placements_of(before, reduced_by),
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
        found = _waited(given.redistribute(placements=placements_of(after)).to_local())
        return found.to(torch.bool) if is_bool else found

    def _cut(self, whole: Tensor, layout: Layout) -> Tensor:
        """Return this rank's part of a tensor that every rank has."""
        shape = local_shape(tuple(whole.shape), layout, self._sizes)
        for dim, size in enumerate(shape):
            if size != whole.shape[dim]:
                whole = whole.narrow(dim, part_of(layout, dim, self._sizes, self._place) * size, size)
        return whole

    def _keep_parts(self, held: dict[Held, Tensor], value: int) -> None:
        """Keep the parts of a whole value that operators read."""
        for layout in self._layouts.get(value, ()):
            part = self._cut(self._wholes.known[value], layout)
            # a part alone needs less memory than a view of the whole
            held[value, layout] = part if part.numel() == self._wholes.known[value].numel() else part.clone()

    def _share_generator(self) -> None:
        """Give all ranks the state of the first rank's random generator."""
        state = torch.get_rng_state() if self._device.type == "cpu" else _device_state(self._device)
        given = state.to(self._device)
        for group in self._mesh.get_all_groups():
            distributed.broadcast(given, group_src=0, group=group)
        if self._device.type == "cpu":
            torch.set_rng_state(given)
        else:
            torch.get_device_module(self._device.type).set_rng_state(given.cpu(), self._device)


def _device_state(device: torch.device) -> Tensor:
    state: Tensor = torch.get_device_module(device.type).get_rng_state(device)
    return state


class _Wholes:
    """Values of a trace that depend on no argument; every rank computes them whole.

    Attributes:
        known: Values so far, by number; those of constant arguments are given.
    """

    def __init__(self, program: Program, numbers: Mapping[Node, Any], varies: Sequence[bool]) -> None:
        self.known: dict[int, Tensor] = {}
        self._numbers, self._trace, self._varies = numbers, program.trace, varies
        self._maker: dict[int, Node] = {}
        taken = set(range(len(program.arguments)))
        for node in program.trace.graph.nodes:
            if node.op == "get_attr" or isinstance(node.target, OpOverload):
                made = [one for one in _listed(numbers.get(node)) if one is not None and one not in taken]
                taken.update(made)
                self._maker |= {one: node for one in made if not varies[one]}

    def needed(self, read: Iterable[int]) -> tuple[list[Node], list[Node]]:
        """Return the calls whose values are read, with those that they need, and the ones that draw random numbers.

        Raises:
            ConfigError: probabilities of a draw depend on an argument.
        """
        random = [
            node
            for node in dict.fromkeys(self._maker.values())
            if isinstance(node.target, OpOverload) and is_random(node.target, {})
        ]
        for node in random:
            if node.target is torch.ops.aten.bernoulli.default and self._is_varying(node):
                raise ConfigError(
                    "draws with probabilities that depend on an argument",
                    key="parallelize",
                    value=str(node.target),
                    nearest="compare torch.rand_like(x) with them",
                )
        waiting = [self._maker[value] for value in read if value in self._maker] + random
        found: dict[Node, None] = {}
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found[node] = None
            if not self._is_shape_only(node):
                waiting += [
                    self._maker[one]
                    for before in node.all_input_nodes
                    for one in _listed(self._numbers[before])
                    if one in self._maker
                ]
        return list(found), random

    def last_reads(self, order: Sequence[Any]) -> dict[int, int]:
        """Return the position at which each value that a call computes is read last, or computed if nobody reads it."""
        found: dict[int, int] = {}
        for number, node in enumerate(order):
            if isinstance(node, Node):
                read = [node, *(node.all_input_nodes if node.op == "call_function" else ())]
                found.update(
                    (value, number) for each in read for value in _listed(self._numbers[each]) if value in self._maker
                )
        return found

    def compute(self, node: Node, device: torch.device) -> list[int]:
        """Compute the whole values of a call, and return their numbers."""
        if node.op == "get_attr":
            given_value = getattr(self._trace, str(node.target))
            if isinstance(given_value, FakeTensor) or given_value.is_meta:
                raise ConfigError(
                    "has no values, and is neither a parameter nor a buffer",
                    key="module",
                    value=f"tensor of shape {tuple(given_value.shape)}",
                    nearest="register it as a buffer, or plan the module with values",
                )
            made: Any = given_value.to(device)
        else:
            given, is_shape = dict(node.kwargs), self._is_shape_only(node)
            if "device" in given:
                given["device"] = device
            args, kwargs = map_arg((node.args, given), lambda one: self._value(one, device, is_shape=is_shape))
            assert isinstance(node.target, OpOverload), "a call of a trace is one of an operator"
            made = node.target(*args, **kwargs)
        numbers = _listed(self._numbers[node])
        several = list(made) if isinstance(made, (tuple, list)) else [made]
        self.known.update((number, value) for number, value in zip(numbers, several, strict=True) if number is not None)
        return [number for number in numbers if number is not None]

    def _value(self, node: Node, device: torch.device, *, is_shape: bool) -> Any:
        """Return the value of a node, or something of its shape."""
        number = self._numbers[node]
        if number in self.known:
            return self.known[number]
        assert is_shape, f"{node} is read before it is computed"
        meta = node.meta["val"]
        return torch.empty((), dtype=meta.dtype, device=device).expand(meta.shape)

    def _is_shape_only(self, node: Node) -> bool:
        """Return whether a call reads no element of its operands; what has no elements depends on none."""
        is_of_shape = name_of(node.target) in OF_A_SHAPE if isinstance(node.target, OpOverload) else False
        return (is_of_shape and node.target is not torch.ops.aten.bernoulli.default) or self._is_varying(node)

    def _is_varying(self, node: Node) -> bool:
        return any(
            self._varies[one]
            for before in node.all_input_nodes
            for one in _listed(self._numbers[before])
            if one is not None
        )


def _listed(numbers: Any) -> list[int | None]:
    """Return the numbers of a node's values as a list; a handed-on value may be missing."""
    return list(numbers) if isinstance(numbers, (tuple, list)) else [numbers]


def _waited(part: Tensor) -> Tensor:
    """Return a part after the collective that makes it."""
    wait = getattr(part, "wait", None)
    return wait() if wait is not None else part


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _with_sums(layout: Layout, written: Layout) -> Layout:
    """Return a layout with the partial sums that another one has."""
    return tuple(PARTIAL if other == PARTIAL else dim for dim, other in zip(layout, written, strict=True))
