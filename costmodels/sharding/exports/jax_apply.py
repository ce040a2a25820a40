"""A JAX function with a plan's layouts pinned, so that XLA sends what the plan says.

The function's jaxpr is computed again, equation by equation as the frontend reads it (`jax_flat`), with a sharding
constraint on what every operator writes and on what it reads otherwise than that lies. A tensor that several operators
read in one layout is constrained once. Nothing is computed that the function doesn't; an argument that is not what the
function was planned with (other shapes, another function) is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from costmodels.sharding.exports.axis_order import AxisOrders, axis_orders
from costmodels.sharding.exports.jax_specs import Spec, named, returned
from costmodels.sharding.exports.reorders import Orders, way
from costmodels.sharding.frontends.flat_program import Step, operand_slots
from costmodels.sharding.frontends.jax.flat import INLINED, Flat, shape_of, varying_carries
from costmodels.sharding.frontends.jax.graph import flattened
from costmodels.sharding.frontends.jax.program import Program, traced
from costmodels.sharding.graph import CARRY, CONSTANT, NEXT, STACK, UNSTACK
from costmodels.sharding.plan import Plan
from hardware.io.errors import ConfigError

UNCUT_BY_XLA = frozenset({"top_k"})
"""Primitives that XLA's partitioner computes whole on every device, though they have dims that can be cut."""


def jax_mesh(plan: Plan, devices: Sequence[Any] | None = None) -> Mesh:
    """The plan's mesh of JAX's devices, the first ones where none are given.

    Raises:
        ConfigError: there are fewer than the mesh has.
    """
    found = list(jax.devices() if devices is None else devices)
    count = plan.mesh.num_devices
    if len(found) < count:
        raise ConfigError(
            f"needs {count} devices", key="mesh", value=plan.mesh.in_words, nearest=f"{len(found)} are here"
        )
    return Mesh(np.array(found[:count]).reshape(plan.mesh.sizes), plan.mesh.names)


def abstract_mesh(plan: Plan) -> AbstractMesh:
    """The plan's mesh without devices."""
    return AbstractMesh(plan.mesh.sizes, plan.mesh.names)


def partition_spec(spec: Spec) -> PartitionSpec:
    """A spec as JAX has it."""
    return PartitionSpec(*(axes or None for axes in spec))  # type: ignore[no-untyped-call] # JAX has no types there


def apply_plan(function: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """A function that computes the same, with every layout of the plan pinned; to be called under `jax.jit`.

    It needs no devices: the constraints name axes, and the shardings of the arguments say where these are.

    Args:
        function: What was planned (`jax_graph.graph_of_jax`).
        plan: How.
    """
    orders = axis_orders(plan)

    @functools.wraps(function)  # so that arguments can be donated by their names
    def planned(*arguments: Any) -> Any:
        program = traced(function, *arguments)
        run = _Run.of(program, orders)
        return jax.tree_util.tree_unflatten(
            program.out_tree, run.outputs(program, jax.tree_util.tree_leaves(arguments))
        )

    return planned


def specs_of(program: Program, plan: Plan) -> tuple[tuple[Any, ...], Any]:
    """PartitionSpecs of a planned program: a tree like its arguments, and one like what it returns."""
    run = _Run.of(program, axis_orders(plan))
    inputs = [run.spec(run.lying(value)) for value in run.arguments]
    outputs = [run.spec(run.returned(value)) for value in run.results]
    trees: tuple[Any, ...] = jax.tree_util.tree_unflatten(program.in_tree, inputs)
    return trees, jax.tree_util.tree_unflatten(program.out_tree, outputs)


def on_mesh(mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """A tree of PartitionSpecs as shardings on a mesh."""
    return jax.tree_util.tree_map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )


def shardings(
    function: Callable[..., Any], plan: Plan, *arguments: Any, mesh: Mesh | None = None
) -> tuple[tuple[Any, ...], Any]:
    """How the arguments and the outputs of a planned function lie: `in_shardings` and `out_shardings` of `jax.jit`."""
    inputs, outputs = specs_of(traced(function, *arguments), plan)
    own_mesh = jax_mesh(plan) if mesh is None else mesh
    return on_mesh(own_mesh, inputs), on_mesh(own_mesh, outputs)


def outputs_of(program: Program) -> tuple[tuple[str, str | None], ...]:
    """The paths of what a function returns, and the tensors of its graph that these are."""
    flat, _, outputs = flattened(program)
    return tuple(
        (path, flat.values[value].name if flat.values[value].varies else None)
        for path, value in zip(program.outputs, outputs, strict=True)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Array:
    """A value of the run, and its number in the flat program; None for what depends on no argument."""

    value: Any
    number: int | None


@dataclass(slots=True)
class _Run:
    """A jaxpr under evaluation, beside its flat program.

    Attributes:
        flat: The program.
        arguments: Numbers of its arguments.
        results: Numbers of its outputs.
        orders: The plan's.
        mesh: The plan's.
        ops: The number of each operator by its name.
        tensors: The number of each tensor by its name.
        position: The next step of the flat program.
        copies: Values in other layouts than they lie in.
    """

    flat: Flat
    arguments: list[int]
    results: list[int]
    orders: AxisOrders
    mesh: AbstractMesh
    ops: dict[str, int]
    tensors: dict[str, int]
    position: int = 0
    copies: dict[tuple[int, Orders], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, orders: AxisOrders) -> _Run:
        """At the begin of a program.

        Raises:
            ConfigError: it isn't the one that the plan is of.
        """
        flat, arguments, results = flattened(program)
        graph = orders.plan.graph
        shapes = {value.name: value.shape for value in flat.values if value.varies}
        arrays = [graph.tensors[tensor] for op in graph.ops for tensor in op.results if op.primitive != CONSTANT]
        wrong = [array.name for array in arrays if shapes.get(array.name) != array.shape]
        if wrong:
            raise ConfigError(
                f"is a plan of another function, or other shapes, than {program.name}: that has no such {wrong[0]!r}",
                key="plan",
                value=graph.name,
                nearest="plan what `graph_of_jax` makes of the same function and arguments",
            )
        return cls(
            flat=flat,
            arguments=arguments,
            results=results,
            orders=orders,
            mesh=abstract_mesh(orders.plan),
            ops={op.name: number for number, op in enumerate(graph.ops)},
            tensors={tensor.name: number for number, tensor in enumerate(graph.tensors)},
        )

    def outputs(self, program: Program, leaves: Sequence[Any]) -> list[Any]:
        """What the function returns."""
        given = [
            self._written(leaf, number if self.flat.values[number].varies else None)
            for leaf, number in zip(leaves, self.arguments, strict=True)
        ]
        jaxpr = program.jaxpr
        found = self._inline(jaxpr.jaxpr, [_Array(value=const, number=None) for const in jaxpr.consts], given)
        return [
            self._moved(each.value, self.lying(number), self.returned(number))
            for each, number in zip(found, self.results, strict=True)
        ]

    def lying(self, value: int) -> Orders:
        """The axes on each dim of a value of the flat program; none, where no graph has it."""
        number = self.tensors.get(self.flat.values[value].name)
        return () if number is None else self.orders.lying(number)

    def returned(self, value: int) -> Orders:
        """The same of one that is returned."""
        number = self.tensors.get(self.flat.values[value].name)
        return () if number is None else returned(self.orders, number)

    def sharding(self, axes: Orders) -> NamedSharding:
        """The axes on each dim, on the mesh."""
        return NamedSharding(self.mesh, self.spec(axes))

    def spec(self, axes: Orders) -> PartitionSpec:
        """The same without the mesh."""
        return partition_spec(named(self.orders.plan, axes))

    def _pinned(self, value: Any, axes: Orders) -> Any:
        return lax.with_sharding_constraint(value, self.sharding(axes))  # type: ignore[no-untyped-call] # JAX has no types there

    def _moved(self, value: Any, before: Orders, after: Orders) -> Any:
        """A value as it shall lie, on the way that a partitioner finds cheap."""
        if before == after:
            return self._pinned(value, after)
        for axes in way(before, after, float(np.size(value)), self.orders.plan.mesh.sizes).layouts:
            value = self._pinned(value, axes)
        return value

    def _written(self, value: Any, number: int | None, before: Orders | None = None) -> _Array:
        """A value as it shall lie, if the graph has it; an operator may have left it otherwise."""
        if number is None or self.flat.values[number].name not in self.tensors:
            return _Array(value=value, number=number)
        lies = self.lying(number)
        if before is None:
            return _Array(value=self._pinned(value, lies), number=number)
        if any(one and len(other) > len(one) for one, other in zip(before, lies, strict=True)):
            # sums that are scattered along a dim that others cut: added up first, for XLA gathers that dim else
            value = self._pinned(value, before)
        return _Array(value=self._moved(value, before, lies), number=number)

    def _left(self, step: Step, values: Sequence[Any]) -> list[_Array]:
        """What an operator leaves, as it shall lie."""
        op = self.ops.get(step.name)
        return [
            self._written(value, number, None if op is None else self.orders.written(op, slot))
            for slot, (value, number) in enumerate(zip(values, step.results, strict=True))
        ]

    def _read(self, step: Step, operands: Sequence[_Array]) -> list[Any]:
        """Operands as the operator of a step reads them; one that nobody needs has none in the graph."""
        found = [operand.value for operand in operands]
        op = self.ops.get(step.name)
        if op is None:
            return found
        for operand, slot in enumerate(operand_slots(self.flat.values, step)):
            array = operands[slot]
            wanted = self.orders.read(op, operand)
            if array.number is None:
                found[slot] = self._pinned(array.value, wanted)
            elif wanted != self.lying(array.number):
                key = (array.number, wanted)
                if key not in self.copies:
                    self.copies[key] = self._moved(array.value, self.lying(array.number), wanted)
                found[slot] = self.copies[key]
        return found

    def _performed(self, step: Step, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        """The results of an operator; of one that XLA would not cut, of each device's part for itself."""
        number = self.ops.get(step.name)
        if number is None or step.primitive not in UNCUT_BY_XLA:
            return _computed(equation, operands)
        reads = [self.spec(self.orders.read(number, slot)) for slot in range(len(operands))]
        writes = [self.spec(self.orders.written(number, slot)) for slot in range(len(step.results))]
        local = jax.shard_map(
            lambda *parts: tuple(_computed(equation, parts)),
            mesh=self.mesh,
            in_specs=tuple(reads),
            out_specs=tuple(writes),
            check_vma=False,
        )
        return list(local(*operands))  # type: ignore[no-untyped-call] # JAX has no types there

    def _next(self, primitive: str) -> Step:
        step = self.flat.steps[self.position]
        assert step.primitive == primitive, f"{step.name!r} stands where the jaxpr has {primitive}"
        self.position += 1
        return step

    def _inline(self, jaxpr: Jaxpr, consts: Sequence[_Array], arguments: Sequence[_Array]) -> list[_Array]:
        known: dict[Var, _Array] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

        def read(atom: Any) -> _Array:
            return _Array(value=atom.val, number=None) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            is_empty = all(0 in shape_of(var.aval) for var in equation.outvars)
            if is_empty or all(operand.number is None for operand in operands):
                values = _computed(equation, [operand.value for operand in operands])
                results = [_Array(value=value, number=None) for value in values]
            elif equation.primitive.name in INLINED:
                results = self._called(equation, operands)
            elif equation.primitive.name == "scan":
                results = self._scanned(equation, operands)
            else:
                step = self._next(equation.primitive.name)
                values = self._performed(step, equation, self._read(step, operands))
                results = self._left(step, values)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _called(self, equation: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        inner = next(equation.params[key] for key in INLINED[equation.primitive.name] if key in equation.params)
        if equation.params.get("differentiated") and equation.params.get("prevent_cse"):
            # as JAX lowers a checkpoint: without it, XLA keeps what is computed a second time to save memory
            values = lax.optimization_barrier(tuple(operand.value for operand in operands))  # type: ignore[no-untyped-call] # JAX has no types there
            operands = [
                _Array(value=value, number=operand.number) for value, operand in zip(values, operands, strict=True)
            ]
        if isinstance(inner, ClosedJaxpr):
            return self._inline(inner.jaxpr, [_Array(value=const, number=None) for const in inner.consts], operands)
        return self._inline(inner, [], operands)

    def _scanned(self, equation: JaxprEqn, operands: list[_Array]) -> list[_Array]:
        params = equation.params
        body, num_consts, num_carry = params["jaxpr"], params["num_consts"], params["num_carry"]
        begins, stacks = operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
        varies = [operand.number is not None for operand in operands]
        carries = varying_carries(body.jaxpr, varies, num_consts, num_carry)
        begun = [
            self._through(CARRY, begin) if is_carried else begin
            for begin, is_carried in zip(begins, carries, strict=True)
        ]
        cut = [self._through(UNSTACK, stack) if stack.number is not None else stack for stack in stacks]
        consts = [_Array(value=const, number=None) for const in body.consts]
        first, numbers = self.position, list[int | None]()

        def iteration(carried: Sequence[Any], parts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            self.position = first
            outer, self.copies = self.copies, dict(self.copies)
            inputs = [self._written(value, each.number) for value, each in zip(carried, begun, strict=True)]
            inputs += [self._written(value, each.number) for value, each in zip(parts, cut, strict=True)]
            found = self._inline(body.jaxpr, consts, [*operands[:num_consts], *inputs])
            numbers[:] = []
            after = []
            for before, end, is_carried in zip(inputs, found[:num_carry], carries, strict=False):
                if is_carried and end.number != before.number:
                    step = self._next(NEXT)
                    numbers.append(step.results[0])
                    after.append(self._written(self._read(step, [end])[0], step.results[0]).value)
                else:
                    numbers.append(None)
                    after.append(end.value)
            done = []
            for part in found[num_carry:]:
                if part.number is None:
                    numbers.append(None)
                    done.append(part.value)
                else:
                    step = self._next(STACK)
                    numbers.append(step.results[0])
                    done.append(self._read(step, [part])[0])
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
            *(self._written(each.value, each.number) for each in ends),
            *(self._written(value, number) for value, number in zip(stacked, numbers[num_carry:], strict=True)),
        ]

    def _through(self, primitive: str, array: _Array) -> _Array:
        """What passes into a loop; it lies as it is wanted there."""
        step = self._next(primitive)
        return _Array(value=self._read(step, [array])[0], number=step.results[0])


def _computed(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    given = equation.primitive.get_bind_params(equation.params)  # type: ignore[no-untyped-call] # JAX has no types there
    functions, params = given if isinstance(given, tuple) else ((), given)  # older versions of JAX tell both
    found = equation.primitive.bind(*functions, *operands, **params)  # type: ignore[no-untyped-call] # JAX has no types there
    return list(found) if equation.primitive.multiple_results else [found]
