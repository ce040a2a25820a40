"""Evaluation of a planned JAX function, equation by equation, with the layouts of the plan pinned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from costmodels.sharding.exports.jax_control import run_cond, run_scan, run_while
from costmodels.sharding.exports.jax_placing import Array, Placing
from costmodels.sharding.frontends.flat_program import Step
from costmodels.sharding.frontends.jax.flat import INLINED, called_by, shape_of
from costmodels.sharding.frontends.jax.matrix_rules import COMPUTED_WHOLE_BY_XLA
from costmodels.sharding.frontends.jax.program import Program

UNCUT_BY_XLA = frozenset({"top_k", *COMPUTED_WHOLE_BY_XLA})
"""Primitives that XLA's partitioner computes whole on every device, although some of their dims can be partitioned."""

WITH_OWN_DERIVATIVE = frozenset({"custom_jvp_call", "custom_linear_solve", "custom_vjp_call", "custom_vjp_call_jaxpr"})
"""Primitives of calls whose derivative is another than that of what they compute."""


def evaluated(placing: Placing, program: Program, leaves: Sequence[Any]) -> list[Any]:
    """Evaluate a planned program on the leaves of its arguments, and return its outputs."""
    given = [
        placing.place_value(leaf, number if placing.flat.values[number].varies else None)
        for leaf, number in zip(leaves, placing.arguments, strict=True)
    ]
    jaxpr = program.jaxpr
    found = _run_jaxpr(placing, jaxpr.jaxpr, [Array(value=const, number=None) for const in jaxpr.consts], given)
    return [
        placing.layouts.move(each.value, placing.lying(number), placing.returned(number))
        for each, number in zip(found, placing.results, strict=True)
    ]


def _run_operator(placing: Placing, step: Step, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Return the results of an operator.

    An operator that XLA would not partition runs under `shard_map`, on each device's part.
    """
    number = placing.ops.get(step.name)
    if number is None or step.primitive not in UNCUT_BY_XLA:
        return _bind_primitive(equation, operands)
    reads = [placing.layouts.spec(placing.orders.read(number, slot)) for slot in range(len(operands))]
    writes = [placing.layouts.spec(placing.orders.written(number, slot)) for slot in range(len(step.results))]
    # Only map factors of these primitives can be partitioned, so each device can compute its part alone.
    local = jax.shard_map(
        lambda *parts: tuple(_bind_primitive(equation, parts)),
        mesh=placing.layouts.mesh,
        in_specs=tuple(reads),
        out_specs=tuple(writes),
        check_vma=False,
    )
    return list(local(*operands))  # type: ignore[no-untyped-call] # JAX has no types there


def _run_jaxpr(placing: Placing, jaxpr: Jaxpr, consts: Sequence[Array], arguments: Sequence[Array]) -> list[Array]:
    """Evaluate a jaxpr in step with the flat program, and return its outputs."""
    known: dict[Var, Array] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
    evaluate = functools.partial(_run_jaxpr, placing)

    def read(atom: Any) -> Array:
        return Array(value=atom.val, number=None) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        is_empty = all(0 in shape_of(var.aval) for var in equation.outvars)
        if is_empty or all(operand.number is None for operand in operands):
            # Nothing here depends on an argument, so the flat program has no step for it.
            values = _bind_primitive(equation, [operand.value for operand in operands])
            results = [Array(value=value, number=None) for value in values]
        elif equation.primitive.name in INLINED:
            results = _run_call(placing, equation, operands)
        elif equation.primitive.name == "scan":
            results = run_scan(placing, equation, operands, evaluate)
        elif equation.primitive.name == "while":
            results = run_while(placing, equation, operands, evaluate)
        elif equation.primitive.name == "cond":
            results = run_cond(placing, equation, operands, evaluate)
        else:
            step = placing.take_step(equation.primitive.name)
            values = _run_operator(placing, step, equation, placing.place_operands(step, operands))
            results = placing.place_results(step, values)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run_call(placing: Placing, equation: JaxprEqn, operands: list[Array]) -> list[Array]:
    whole_operands = operands
    inner, operands = called_by(equation, operands)
    if equation.params.get("differentiated") and equation.params.get("prevent_cse"):
        # JAX lowers a checkpoint in the same way. Without the barrier, XLA would merge the recomputation with the
        # first computation and keep its results in memory.
        values = lax.optimization_barrier(tuple(operand.value for operand in operands))
        operands = [Array(value=value, number=operand.number) for value, operand in zip(values, operands, strict=True)]
    body, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
    own = [Array(value=const, number=None) for const in consts]
    if equation.primitive.name not in WITH_OWN_DERIVATIVE:
        return _run_jaxpr(placing, body, own, operands)
    first, last, numbers = placing.position, placing.position, list[int | None]()

    def inside(*values: Any) -> list[Any]:
        # JAX traces it at any time: now, and when it differentiates what is around it. Each trace has its own steps
        # and copies, and leaves those of the moment as they are.
        nonlocal last
        moment, placing.position, placing.copies = (placing.position, placing.copies), first, {}
        arrays = [Array(value=value, number=each.number) for value, each in zip(values, whole_operands, strict=True)]
        found = _run_jaxpr(placing, body, own, called_by(equation, arrays)[1])
        last, (placing.position, placing.copies) = placing.position, moment
        numbers[:] = [each.number for each in found]
        return [each.value for each in found]

    values = _with_derivative_of(equation, inside)(*(operand.value for operand in whole_operands))
    placing.position = last
    return [Array(value=value, number=number) for value, number in zip(values, numbers, strict=True)]


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
