"""Application of a plan to a JAX function: all layouts are pinned, so that XLA communicates as the plan says.

The function's jaxpr is evaluated again, equation by equation in the order of the frontend (`frontends/jax/flat.py`).
Sharding constraints are added to the results of every operator, and to operands that it reads in another layout. A
tensor that several operators read in one layout is constrained once. The new function computes nothing beyond the
original. Arguments that differ from those of planning (other shapes, another function) are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from costmodels.sharding.exports.axis_order import AxisOrders, axis_orders
from costmodels.sharding.exports.jax_layouts import JaxLayouts, abstract_mesh, jax_mesh
from costmodels.sharding.exports.jax_specs import find_result_axes
from costmodels.sharding.exports.reorders import Orders
from costmodels.sharding.frontends.flat_program import Step, operand_slots, result_slots
from costmodels.sharding.frontends.jax.flat import (
    INLINED,
    Flat,
    called_by,
    parts_of_while,
    shape_of,
    varying_carries,
    varying_in_while,
)
from costmodels.sharding.frontends.jax.graph import flatten_trace
from costmodels.sharding.frontends.jax.matrix_rules import COMPUTED_WHOLE_BY_XLA
from costmodels.sharding.frontends.jax.program import Program, trace_function
from costmodels.sharding.frontends.jax.shard_maps import SHARD_MAP, free_slots
from costmodels.sharding.graph import CARRY, CONSTANT, MERGE, NEXT, STACK, UNSTACK
from costmodels.sharding.plan import Plan
from hardware.io.errors import ConfigError

UNCUT_BY_XLA = frozenset({"top_k", *COMPUTED_WHOLE_BY_XLA})
"""Primitives that XLA's partitioner computes whole on every device, although some of their dims can be partitioned."""

WITH_OWN_DERIVATIVE = frozenset({"custom_jvp_call", "custom_linear_solve", "custom_vjp_call", "custom_vjp_call_jaxpr"})
"""Primitives of calls whose derivative is another than that of what they compute."""


def apply_plan(function: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """Return a function that computes the same with every layout of the plan pinned, for use under `jax.jit`.

    It needs no devices: the constraints name axes, and the shardings of the arguments determine the devices.

    Args:
        function: Function that was planned (`frontends.jax.graph.graph_of_jax`).
        plan: Sharding plan of the function.
    """
    orders = axis_orders(plan)

    @functools.wraps(function)  # lets callers donate arguments by name
    def planned(*arguments: Any) -> Any:
        program = trace_function(function, *arguments)
        run = _Run.of(program, orders)
        return jax.tree_util.tree_unflatten(
            program.out_tree, run.outputs(program, jax.tree_util.tree_leaves(arguments))
        )

    return planned


def specs_of(program: Program, plan: Plan) -> tuple[tuple[Any, ...], Any]:
    """Return the PartitionSpecs of a planned program: a tree like its arguments, and one like its outputs."""
    run = _Run.of(program, axis_orders(plan))
    inputs = [run.layouts.spec(run.lying(value)) for value in run.arguments]
    outputs = [run.layouts.spec(run.returned(value)) for value in run.results]
    trees: tuple[Any, ...] = jax.tree_util.tree_unflatten(program.in_tree, inputs)
    return trees, jax.tree_util.tree_unflatten(program.out_tree, outputs)


def on_mesh(mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """Return a tree of PartitionSpecs as shardings on a mesh."""
    return jax.tree_util.tree_map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )


def shardings(
    function: Callable[..., Any], plan: Plan, *arguments: Any, mesh: Mesh | None = None
) -> tuple[tuple[Any, ...], Any]:
    """Return `in_shardings` and `out_shardings` of a planned function for `jax.jit`."""
    inputs, outputs = specs_of(trace_function(function, *arguments), plan)
    own_mesh = jax_mesh(plan) if mesh is None else mesh
    return on_mesh(own_mesh, inputs), on_mesh(own_mesh, outputs)


def outputs_of(program: Program) -> tuple[tuple[str, str | None], ...]:
    """Return the path of each output of a function, and the name of its tensor in the graph."""
    flat, _, outputs = flatten_trace(program)
    return tuple(
        (path, flat.values[value].name if flat.values[value].varies else None)
        for path, value in zip(program.outputs, outputs, strict=True)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Array:
    """A value of the run and its number in the flat program; None if it depends on no argument."""

    value: Any
    number: int | None


@dataclass(slots=True)
class _Run:
    """A jaxpr under evaluation, next to its flat program.

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
    def of(cls, program: Program, orders: AxisOrders) -> _Run:
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

    def outputs(self, program: Program, leaves: Sequence[Any]) -> list[Any]:
        """Evaluate the function and return its outputs."""
        given = [
            self._place_value(leaf, number if self.flat.values[number].varies else None)
            for leaf, number in zip(leaves, self.arguments, strict=True)
        ]
        jaxpr = program.jaxpr
        found = self._run_jaxpr(jaxpr.jaxpr, [_Array(value=const, number=None) for const in jaxpr.consts], given)
        return [
            self.layouts.move(each.value, self.lying(number), self.returned(number))
            for each, number in zip(found, self.results, strict=True)
        ]

    def lying(self, value: int) -> Orders:
        """Return the axes on each dim of a value of the flat program; empty if the graph lacks the value."""
        number = self.tensors.get(self.flat.values[value].name)
        return () if number is None else self.orders.lying(number)

    def returned(self, value: int) -> Orders:
        """Return the axes on each dim of a returned value; empty if the graph lacks the value."""
        number = self.tensors.get(self.flat.values[value].name)
        return () if number is None else find_result_axes(self.orders, number)

    def _place_value(self, value: Any, number: int | None, before: Orders | None = None) -> _Array:
        """Return a value in its own layout, if the graph has it; `before` is the layout that an operator left it in."""
        if number is None or self.flat.values[number].name not in self.tensors:
            return _Array(value=value, number=number)
        lies = self.lying(number)
        if before is None:
            return _Array(value=self.layouts.pin(value, lies), number=number)
        return _Array(value=self.layouts.settle(value, before, lies), number=number)

    def _place_results(self, step: Step, values: Sequence[Any]) -> list[_Array]:
        op, kept = self.ops.get(step.name), result_slots(self.flat.values, step)
        free = free_slots(step.params, "out_specs") if step.primitive == SHARD_MAP else ()
        return [
            _Array(value=value, number=number)
            if slot in free
            else self._place_value(
                value, number, None if op is None or slot not in kept else self.orders.written(op, kept.index(slot))
            )
            for slot, (value, number) in enumerate(zip(values, step.results, strict=True))
        ]

    def _place_operands(self, step: Step, operands: Sequence[_Array]) -> list[Any]:
        """Return the operands of a step, or the first of them, in the layouts in which its operator reads them."""
        return [self._place_operand(step, slot, operand) for slot, operand in enumerate(operands)]

    def _place_operand(self, step: Step, slot: int, array: _Array) -> Any:
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

    def _run_operator(self, step: Step, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Return the results of an operator.

        An operator that XLA would not partition runs under `shard_map`, on each device's part.
        """
        number = self.ops.get(step.name)
        if number is None or step.primitive not in UNCUT_BY_XLA:
            return _bind_primitive(equation, operands)
        reads = [self.layouts.spec(self.orders.read(number, slot)) for slot in range(len(operands))]
        writes = [self.layouts.spec(self.orders.written(number, slot)) for slot in range(len(step.results))]
        # Only map factors of these primitives can be partitioned, so each device can compute its part alone.
        local = jax.shard_map(
            lambda *parts: tuple(_bind_primitive(equation, parts)),
            mesh=self.layouts.mesh,
            in_specs=tuple(reads),
            out_specs=tuple(writes),
            check_vma=False,
        )
        return list(local(*operands))  # type: ignore[no-untyped-call] # JAX has no types there

    def _take_step(self, primitive: str) -> Step:
        """Return the next step of the flat program, which must have this primitive."""
        step = self.flat.steps[self.position]
        assert step.primitive == primitive, f"the flat program has {step.name!r} where the jaxpr has {primitive}"
        self.position += 1
        return step

    def _run_jaxpr(self, jaxpr: Jaxpr, consts: Sequence[_Array], arguments: Sequence[_Array]) -> list[_Array]:
        """Evaluate a jaxpr in step with the flat program, and return its outputs."""
        known: dict[Var, _Array] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

        def read(atom: Any) -> _Array:
            return _Array(value=atom.val, number=None) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            is_empty = all(0 in shape_of(var.aval) for var in equation.outvars)
            if is_empty or all(operand.number is None for operand in operands):
                # Nothing here depends on an argument, so the flat program has no step for it.
                values = _bind_primitive(equation, [operand.value for operand in operands])
                results = [_Array(value=value, number=None) for value in values]
            elif equation.primitive.name in INLINED:
                results = self._run_call(equation, operands)
            elif equation.primitive.name == "scan":
                results = self._run_scan(equation, operands)
            elif equation.primitive.name == "while":
                results = self._run_while(equation, operands)
            elif equation.primitive.name == "cond":
                results = self._run_cond(equation, operands)
            else:
                step = self._take_step(equation.primitive.name)
                values = self._run_operator(step, equation, self._place_operands(step, operands))
                results = self._place_results(step, values)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _run_call(self, equation: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        whole_operands = operands
        inner, operands = called_by(equation, operands)
        if equation.params.get("differentiated") and equation.params.get("prevent_cse"):
            # JAX lowers a checkpoint in the same way. Without the barrier, XLA would merge the recomputation with the
            # first computation and keep its results in memory.
            values = lax.optimization_barrier(tuple(operand.value for operand in operands))
            operands = [
                _Array(value=value, number=operand.number) for value, operand in zip(values, operands, strict=True)
            ]
        body, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
        own = [_Array(value=const, number=None) for const in consts]
        if equation.primitive.name not in WITH_OWN_DERIVATIVE:
            return self._run_jaxpr(body, own, operands)
        first, last, numbers = self.position, self.position, list[int | None]()

        def inside(*values: Any) -> list[Any]:
            # JAX traces it at any time: now, and when it differentiates what is around it. Each trace has its own steps
            # and copies, and leaves those of the moment as they are.
            nonlocal last
            moment, self.position, self.copies = (self.position, self.copies), first, {}
            arrays = [
                _Array(value=value, number=each.number) for value, each in zip(values, whole_operands, strict=True)
            ]
            found = self._run_jaxpr(body, own, called_by(equation, arrays)[1])
            last, (self.position, self.copies) = self.position, moment
            numbers[:] = [each.number for each in found]
            return [each.value for each in found]

        values = _with_derivative_of(equation, inside)(*(operand.value for operand in whole_operands))
        self.position = last
        return [_Array(value=value, number=number) for value, number in zip(values, numbers, strict=True)]

    def _run_scan(self, equation: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        """Evaluate a scan with constraints on its loop-carried values and stacks."""
        params = equation.params
        body, num_consts, num_carry = params["jaxpr"], params["num_consts"], params["num_carry"]
        begins, stacks = operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
        varies = [operand.number is not None for operand in operands]
        carries = varying_carries(body.jaxpr, varies, num_consts, num_carry)
        begun = [
            self._pass_into_loop(CARRY, begin) if is_carried else begin
            for begin, is_carried in zip(begins, carries, strict=True)
        ]
        cut = [self._pass_into_loop(UNSTACK, stack) if stack.number is not None else stack for stack in stacks]
        consts = [_Array(value=const, number=None) for const in body.consts]
        first, numbers = self.position, list[int | None]()

        def iteration(carried: Sequence[Any], parts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            # JAX traces the body several times, but the flat program has its steps once, so each trace starts at the
            # same step.
            self.position = first
            # Copies made inside the body do not exist outside of it.
            outer, self.copies = self.copies, dict(self.copies)
            inputs = [self._place_value(value, each.number) for value, each in zip(carried, begun, strict=True)]
            inputs += [self._place_value(value, each.number) for value, each in zip(parts, cut, strict=True)]
            found = self._run_jaxpr(body.jaxpr, consts, [*operands[:num_consts], *inputs])
            numbers[:] = []
            after = []
            for before, end, is_carried in zip(inputs, found[:num_carry], carries, strict=False):
                if is_carried and end.number != before.number:
                    step = self._take_step(NEXT)
                    numbers.append(step.results[0])
                    after.append(self._place_value(self._place_operands(step, [end])[0], step.results[0]).value)
                else:
                    numbers.append(None)
                    after.append(end.value)
            done = []
            for part in found[num_carry:]:
                if part.number is None:
                    numbers.append(None)
                    done.append(part.value)
                else:
                    step = self._take_step(STACK)
                    numbers.append(step.results[0])
                    done.append(self._place_operands(step, [part])[0])
            self.copies = outer
            return after, done

        carried, stacked = lax.scan(
            iteration,
            [each.value for each in begun],
            [each.value for each in cut],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        ends = [
            begin if is_carried and number is None else _Array(value=value, number=number)
            for begin, is_carried, number, value in zip(begins, carries, numbers, carried, strict=False)
        ]
        return [
            *(self._place_value(each.value, each.number) for each in ends),
            *(self._place_value(value, number) for value, number in zip(stacked, numbers[num_carry:], strict=True)),
        ]

    def _run_while(self, equation: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        """Evaluate a loop of unknown length with constraints on its carried values."""
        condition, body, (of_condition, of_body, begins) = parts_of_while(equation, operands)
        carries = varying_in_while(equation, [operand.number is not None for operand in operands])
        begun = [
            self._pass_into_loop(CARRY, begin) if is_carried else begin
            for begin, is_carried in zip(begins, carries, strict=True)
        ]
        first, outer, numbers = self.position, self.copies, list[int | None]()

        def run(part: ClosedJaxpr, consts: Sequence[_Array], values: Sequence[Any]) -> list[_Array]:
            self.copies = dict(outer)  # copies made inside do not exist outside
            inputs = [self._place_value(value, each.number) for value, each in zip(values, begun, strict=True)]
            own = [_Array(value=const, number=None) for const in part.consts]
            return self._run_jaxpr(part.jaxpr, own, [*consts, *inputs])

        def goes_on(values: Sequence[Any]) -> Any:
            self.position = first
            (found,) = run(condition, of_condition, values)
            return found.value

        def iteration(values: Sequence[Any]) -> list[Any]:
            # JAX traces both in any order; the steps of the condition stand in front.
            jax.eval_shape(goes_on, values)
            found = run(body, of_body, values)
            numbers[:] = []
            after = []
            for begin, end, is_carried in zip(begun, found, carries, strict=True):
                if is_carried and end.number != begin.number:
                    step = self._take_step(NEXT)
                    numbers.append(step.results[0])
                    (value, *_) = self._place_operands(step, [end])
                    after.append(self._place_value(value, step.results[0]).value)
                else:
                    numbers.append(None)
                    after.append(end.value)
            return after

        values = [each.value for each in begun]
        jax.eval_shape(iteration, values)
        last = self.position
        ends = lax.while_loop(goes_on, iteration, values)
        self.position, self.copies = last, outer
        return [
            begin if is_carried and number is None else self._place_value(value, number)
            for begin, is_carried, number, value in zip(begins, carries, numbers, ends, strict=True)
        ]

    def _run_cond(self, equation: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        """Evaluate a conditional, whose branches leave each result in the layout in which it is merged."""
        which, *given = operands
        branches = equation.params["branches"]
        # The flat program has all branches, and then a step for each result; a first trace finds where they begin.
        outer, starts, found = self.copies, list[int](), list[list[_Array]]()

        def run(branch: ClosedJaxpr, values: Sequence[Any]) -> list[_Array]:
            self.copies = dict(outer)
            own = [_Array(value=const, number=None) for const in branch.consts]
            arrays = [_Array(value=value, number=each.number) for value, each in zip(values, given, strict=True)]
            return self._run_jaxpr(branch.jaxpr, own, arrays)

        values = [each.value for each in given]
        for branch in branches:
            starts.append(self.position)
            ends: list[_Array] = []
            jax.eval_shape(lambda values, branch=branch, ends=ends: ends.extend(run(branch, values)), values)
            found.append(ends)
        merges = [
            self._take_step(MERGE) if which.number is not None or any(end.number is not None for end in ends) else None
            for ends in zip(*found, strict=True)
        ]
        last = self.position

        def branch_at(slot: int) -> Callable[..., list[Any]]:
            def inside(*values: Any) -> list[Any]:
                self.position = starts[slot]
                ends = run(branches[slot], values)
                return [
                    end.value if step is None else self._place_operand(step, slot, end)
                    for step, end in zip(merges, ends, strict=True)
                ]

            return inside

        index = lax.convert_element_type(which.value, "int32")
        results = lax.switch(index, [branch_at(slot) for slot in range(len(branches))], *values)
        self.position, self.copies = last, outer
        return [
            self._place_value(value, None if step is None else step.results[0])
            for value, step in zip(results, merges, strict=True)
        ]

    def _pass_into_loop(self, primitive: str, array: _Array) -> _Array:
        """Return a value that enters a loop, in the layout that the loop wants."""
        step = self._take_step(primitive)
        return _Array(value=self._place_operands(step, [array])[0], number=step.results[0])


def _with_derivative_of(equation: JaxprEqn, inside: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return `inside` with the derivative that the user has given to the call of an equation."""
    whole = jax.custom_jvp(inside)

    @whole.defjvp
    def derive(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        _, found = jax.jvp(lambda *values: _bind_primitive(equation, values), primals, tangents)
        return inside(*primals), found

    return whole


def _bind_primitive(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Apply the primitive of an equation to operands, and return its results as a list."""
    given = equation.primitive.get_bind_params(equation.params)
    functions, params = given if isinstance(given, tuple) else ((), given)  # older versions of JAX return both
    found = equation.primitive.bind(*functions, *operands, **params)
    return list(found) if equation.primitive.multiple_results else [found]
