"""Values of a planned JAX function in the layouts of the plan, in step with its flat program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from costmodels.sharding.exports.axis_order import AxisOrders
from costmodels.sharding.exports.jax_layouts import JaxLayouts, abstract_mesh
from costmodels.sharding.exports.jax_specs import find_result_axes
from costmodels.sharding.exports.reorders import Orders
from costmodels.sharding.frontends.flat_program import Step, operand_slots, result_slots
from costmodels.sharding.frontends.jax.flat import Flat
from costmodels.sharding.frontends.jax.graph import flatten_trace
from costmodels.sharding.frontends.jax.program import Program
from costmodels.sharding.frontends.jax.shard_maps import SHARD_MAP, free_slots
from costmodels.sharding.graph import CONSTANT
from costmodels.sharding.layouts import PARTIAL
from hardware.io.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """A value of the run and its number in the flat program; None if it depends on no argument."""

    value: Any
    number: int | None


@dataclass(slots=True)
class Placing:
    """Where the evaluation of a jaxpr stands in its flat program, and the layouts of its values.

    Attributes:
        flat: Flat form of the program.
        arguments: Numbers of the program's arguments.
        results: Numbers of the program's outputs.
        orders: Axis orders of the plan.
        layouts: Constraints on the plan's mesh, without devices.
        ops: Number of each operator in the graph, by its name.
        tensors: Number of each tensor in the graph, by its name.
        position: Index of the next step of the flat program.
        copies: Values in layouts other than their own, by number and layout.
    """

    flat: Flat
    arguments: list[int]
    results: list[int]
    orders: AxisOrders
    layouts: JaxLayouts
    ops: dict[str, int]
    tensors: dict[str, int]
    position: int = 0
    copies: dict[tuple[int, Orders], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, orders: AxisOrders) -> Placing:
        """Return a run at the start of a program.

        Raises:
            ConfigError: The plan belongs to another program.
        """
        flat, arguments, results = flatten_trace(program)
        graph = orders.plan.graph
        # The plan fits if every tensor of its graph has its name and shape in this program; constants have other names.
        shapes = {value.name: value.shape for value in flat.values if value.varies}
        arrays = [graph.tensors[tensor] for op in graph.ops for tensor in op.results if op.primitive != CONSTANT]
        wrong = [array.name for array in arrays if shapes.get(array.name) != array.shape]
        if wrong:
            raise ConfigError(
                f"belongs to another function or other shapes than {program.name}, which has no such {wrong[0]!r}",
                key="plan",
                value=graph.name,
                nearest="plan what `graph_of_jax` makes of the same function and arguments",
            )
        return cls(
            flat=flat,
            arguments=arguments,
            results=results,
            orders=orders,
            layouts=JaxLayouts(orders, abstract_mesh(orders.plan)),
            ops={op.name: number for number, op in enumerate(graph.ops)},
            tensors={tensor.name: number for number, tensor in enumerate(graph.tensors)},
        )

    def lying(self, value: int) -> Orders:
        """Return the axes on each dim of a value of the flat program; empty if the graph lacks the value."""
        number = self.tensors.get(self.flat.values[value].name)
        return () if number is None else self.orders.lying(number)

    def returned(self, value: int) -> Orders:
        """Return the axes on each dim of a returned value; empty if the graph lacks the value."""
        number = self.tensors.get(self.flat.values[value].name)
        return () if number is None else find_result_axes(self.orders, number)

    def place_value(self, value: Any, number: int | None, before: Orders | None = None) -> Array:
        """Return a value in its own layout, if the graph has it; an operator left it in the layout `before`."""
        if number is None or self.flat.values[number].name not in self.tensors:
            return Array(value=value, number=number)
        lies = self.lying(number)
        if before is None:
            return Array(value=self.layouts.pin(value, lies), number=number)
        return Array(value=self.layouts.settle(value, before, lies), number=number)

    def place_results(self, step: Step, values: Sequence[Any]) -> list[Array]:
        """Return the results of a step in their own layouts."""
        op, kept = self.ops.get(step.name), result_slots(self.flat.values, step)
        free = free_slots(step.params, "out_specs") if step.primitive == SHARD_MAP else ()
        return [
            Array(value=value, number=number)
            if slot in free or self._is_only_turned(number)
            else self.place_value(
                value, number, None if op is None or slot not in kept else self.orders.written(op, kept.index(slot))
            )
            for slot, (value, number) in enumerate(zip(values, step.results, strict=True))
        ]

    def _is_only_turned(self, value: int) -> bool:
        """Return whether a value is added up, left whole, and then only transposed: the transposed value is pinned.

        A constraint between a product and the transposition of its result would keep XLA from making the transposed
        product at once. Gradients of weights are such products.
        """
        plan, tensor = self.orders.plan, self.tensors.get(self.flat.values[value].name)
        if tensor is None or len(plan.graph.uses[tensor]) != 1 or value in self.results:
            return False
        use = plan.graph.uses[tensor][0]
        is_turned = plan.graph.ops[use.op].primitive == "transpose"
        is_summed = PARTIAL in plan.written(*plan.graph.maker[tensor]) and not any(self.orders.lying(tensor))
        return is_summed and is_turned and self.orders.read(use.op, use.operand) == self.orders.lying(tensor)

    def place_operands(self, step: Step, operands: Sequence[Array]) -> list[Any]:
        """Return the operands of a step, or the first of them, in the layouts in which its operator reads them."""
        return [self.place_operand(step, slot, operand) for slot, operand in enumerate(operands)]

    def place_operand(self, step: Step, slot: int, array: Array) -> Any:
        """Return an operand in the layout in which the operator of a step reads it.

        The graph lacks operators that no output needs; their operands stay as they are.
        """
        op = self.ops.get(step.name)
        kept = operand_slots(self.flat.values, step)
        if op is None or slot not in kept:
            return array.value
        if step.primitive == SHARD_MAP and slot in free_slots(step.params, "in_specs"):
            return array.value
        # Constants have no layout yet and are made directly in the wanted one.
        wanted = self.orders.read(op, kept.index(slot))
        if array.number is None:
            return self.layouts.pin(array.value, wanted)
        if wanted == self.lying(array.number):
            return array.value
        # Several operators that want one layout share the copy, as the plan counts it.
        key = (array.number, wanted)
        if key not in self.copies:
            self.copies[key] = self.layouts.move(array.value, self.lying(array.number), wanted)
        return self.copies[key]

    def take_step(self, primitive: str) -> Step:
        """Return the next step of the flat program, which must have this primitive."""
        step = self.flat.steps[self.position]
        assert step.primitive == primitive, f"the flat program has {step.name!r} where the jaxpr has {primitive}"
        self.position += 1
        return step

    def pass_into_loop(self, primitive: str, array: Array) -> Array:
        """Return a value that enters a loop, in the layout that the loop wants."""
        step = self.take_step(primitive)
        return Array(value=self.place_operands(step, [array])[0], number=step.results[0])
