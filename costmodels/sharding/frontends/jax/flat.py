"""Flat form of a jaxpr: all calls inlined into one list of values and one list of steps.

The body of a scan appears once, and its steps run `length` times. Its loop-carried values, and the stacks of all
iterations that it reads and writes, pass through steps that cost nothing (`graph.PASSING`). The condition and the body
of a `while` appear once, and count for one iteration, because nothing says how many there will be. The branches of a
`cond` stand one after the other, and each counts in full; a free step merges their results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from costmodels.sharding.frontends.flat_program import Names, Step, Value
from costmodels.sharding.frontends.jax.rules import flop_of_call, has_rule
from costmodels.sharding.frontends.jax.shard_maps import SHARD_MAP, num_shards
from costmodels.sharding.frontends.jax.unknown_flops import flop_by_xla
from costmodels.sharding.frontends.rule_parts import Call
from costmodels.sharding.graph import CARRY, MERGE, NEXT, STACK, UNSTACK, TensorKind

INLINED: Mapping[str, tuple[str, ...]] = {
    "checkpoint": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "composite": ("jaxpr",),
    "core_call": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_linear_solve": ("jaxprs",),
    "custom_vmap_call": ("call",),
    "custom_vjp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call_jaxpr": ("fun_jaxpr", "call_jaxpr"),
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "remat": ("jaxpr",),
    "remat2": ("jaxpr",),
}
"""Primitives that only call a function, with the parameters that may hold it."""

BRANCHING = ("cond", "scan", "while")
"""Primitives whose inner functions are inlined with free steps at their boundaries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Position of an equation: its scopes, whether it runs in the backward pass, and the number of its executions."""

    scopes: tuple[str, ...] = ()
    is_backward: bool = False
    times: int = 1


@dataclass(slots=True)
class Flat:
    """A program without calls, under construction.

    Attributes:
        values: All arrays of the program.
        steps: All operators of the program.
        next_of: Step number of the `next` that ends the iteration, by the value that a `carry` writes; the carry needs
            it.
    """

    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    next_of: dict[int, int] = field(default_factory=dict)
    _names: Names = field(default_factory=Names)
    _paths: dict[str, tuple[tuple[str, ...], bool]] = field(default_factory=dict)

    def add(
        self, name: str, aval: Any, *, varies: bool = False, kind: TensorKind = TensorKind.ACTIVATION, lead: int = 0
    ) -> int:
        """Add a value, or a stack of `lead` such values, and return its number."""
        shape = shape_of(aval)
        dtype = getattr(aval, "dtype", None)
        self.values.append(
            Value(
                name=name,
                shape=(lead, *shape) if lead else shape,
                element_bytes=float(getattr(dtype, "itemsize", 4)),
                kind=kind,
                varies=varies,
                dtype=str(dtype),
            )
        )
        return len(self.values) - 1

    def inline(self, jaxpr: Jaxpr, consts: Sequence[int], arguments: Sequence[int], place: Place) -> list[int]:
        """Add all steps of a function, and return the numbers of its outputs."""
        known: dict[Var, int] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

        def read(atom: Any) -> int:
            return self.add("", atom.aval) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            # Equations that depend on no argument of the program, or that write nothing, become constants without
            # steps.
            is_empty = all(0 in shape_of(var.aval) for var in equation.outvars)
            if is_empty or not any(self.values[operand].varies for operand in operands):
                results = [self.add("", var.aval) for var in equation.outvars]
            elif equation.primitive.name in INLINED:
                results = self._inline_call(equation, operands, self._find_place(equation, place))
            elif equation.primitive.name in BRANCHING:
                inline = {"cond": self._inline_cond, "scan": self._inline_scan, "while": self._inline_while}
                results = inline[equation.primitive.name](equation, operands, self._find_place(equation, place))
            else:
                results = self._add_operator(equation, operands, self._find_place(equation, place))
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _inline_call(self, equation: JaxprEqn, operands: list[int], place: Place) -> list[int]:
        """Add the steps of a called function, with its name as a further scope."""
        inner, operands = called_by(equation, operands)
        # Name the scope of a `jit` after its function.
        called = equation.params.get("name")
        if called:
            place = Place(scopes=(*place.scopes, called), is_backward=place.is_backward, times=place.times)
        if isinstance(inner, ClosedJaxpr):
            return self.inline(inner.jaxpr, [self.add("", var.aval) for var in inner.jaxpr.constvars], operands, place)
        return self.inline(inner, [], operands, place)

    def _add_operator(self, equation: JaxprEqn, operands: list[int], place: Place) -> list[int]:
        primitive = equation.primitive.name
        kind = TensorKind.GRADIENT if place.is_backward else TensorKind.ACTIVATION
        name = self._names.new(place.scopes, primitive, is_backward=place.is_backward)
        results = [
            self.add(f"{name}:{number}" if number else name, var.aval, varies=True, kind=kind)
            for number, var in enumerate(equation.outvars)
        ]
        self.steps.append(
            Step(
                name=name,
                primitive=primitive,
                operands=tuple(operands),
                results=tuple(results),
                params=equation.params,
                flop=_count_flop(equation),
                times=place.times,
            )
        )
        return results

    def _inline_scan(self, equation: JaxprEqn, operands: list[int], place: Place) -> list[int]:
        """Add the body of a scan once, with free steps at its boundary."""
        params = equation.params
        body, length = params["jaxpr"], params["length"]
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        begins, stacks = operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
        carries = varying_carries(
            body.jaxpr, [self.values[operand].varies for operand in operands], num_consts, num_carry
        )
        # Steps of the body run once per iteration.
        inside = Place(scopes=place.scopes, is_backward=place.is_backward, times=place.times * length)

        avals = [var.aval for var in body.jaxpr.invars[num_consts:]]
        inputs = [
            self._add_free_step(CARRY, [begin], aval, place) if varies else self.add("", aval)
            for begin, aval, varies in zip(begins, avals[:num_carry], carries, strict=True)
        ]
        parts = [
            self._add_free_step(UNSTACK, [stack], aval, place) if self.values[stack].varies else self.add("", aval)
            for stack, aval in zip(stacks, avals[num_carry:], strict=True)
        ]
        consts = [self.add("", var.aval) for var in body.jaxpr.constvars]
        outputs = self.inline(body.jaxpr, consts, [*operands[:num_consts], *inputs, *parts], inside)

        results: list[int] = []
        for begin, before, after, varies in zip(begins, inputs, outputs[:num_carry], carries, strict=True):
            aval = body.jaxpr.outvars[len(results)].aval
            results.append(self._end_carry([after], begin, before, aval, inside) if varies else self.add("", aval))
        for part, var in zip(outputs[num_carry:], body.jaxpr.outvars[num_carry:], strict=True):
            if self.values[part].varies:
                results.append(self._add_free_step(STACK, [part], var.aval, inside, lead=length))
            else:
                results.append(self.add("", var.aval, lead=length))
        return results

    def _inline_while(self, equation: JaxprEqn, operands: list[int], place: Place) -> list[int]:
        """Add the condition and the body of a loop of unknown length, with free steps at its boundary."""
        condition, body, (of_condition, of_body, begins) = parts_of_while(equation, operands)
        carries = varying_in_while(equation, [self.values[operand].varies for operand in operands])
        avals = [var.aval for var in body.jaxpr.outvars]
        inputs = [
            self._add_free_step(CARRY, [begin], aval, place) if varies else self.add("", aval)
            for begin, aval, varies in zip(begins, avals, carries, strict=True)
        ]

        def inline(closed: ClosedJaxpr, consts: Sequence[int]) -> list[int]:
            own = [self.add("", var.aval) for var in closed.jaxpr.constvars]
            return self.inline(closed.jaxpr, own, [*consts, *inputs], place)

        (goes_on,) = inline(condition, of_condition)
        outputs = inline(body, of_body)
        return [
            self._end_carry([after, goes_on], begin, before, aval, place) if varies else self.add("", aval)
            for begin, before, after, aval, varies in zip(begins, inputs, outputs, avals, carries, strict=True)
        ]

    def _end_carry(self, ends: list[int], begin: int, before: int, aval: Any, inside: Place) -> int:
        """Return what a loop leaves of a carried value.

        Args:
            ends: Value at the end of an iteration, and whatever decides whether there is another one.
            begin: Value before the loop.
            before: Value at the start of an iteration.
            aval: Shape and type of the value.
            inside: Place of the loop's body.
        """
        if ends[0] == before:
            return begin  # the body hands it on unchanged, so no `next` is needed
        result = self._add_free_step(NEXT, ends, aval, inside)
        self.next_of[before] = len(self.steps) - 1
        return result

    def _inline_cond(self, equation: JaxprEqn, operands: list[int], place: Place) -> list[int]:
        """Add all branches, and a free step for each result that reads it from each branch."""
        which, *given = operands
        outputs = []
        for branch in equation.params["branches"]:
            own = [self.add("", var.aval) for var in branch.jaxpr.constvars]
            outputs.append(self.inline(branch.jaxpr, own, given, place))
        return [
            self._add_free_step(MERGE, [*ends, which], var.aval, place)
            if any(self.values[end].varies for end in (*ends, which))
            else self.add("", var.aval)
            for var, *ends in zip(equation.outvars, *outputs, strict=True)
        ]

    def _add_free_step(self, primitive: str, operands: list[int], aval: Any, place: Place, *, lead: int = 0) -> int:
        """Add a step that costs nothing, and return its result."""
        name = self._names.new(place.scopes, primitive, is_backward=place.is_backward)
        result = self.add(name, aval, varies=True, kind=self.values[operands[0]].kind, lead=lead)
        self.steps.append(
            Step(
                name=name,
                primitive=primitive,
                operands=tuple(operands),
                results=(result,),
                params={},
                flop=0.0,
                times=place.times,
            )
        )
        return result

    def _find_place(self, equation: JaxprEqn, outer: Place) -> Place:
        """Return the position of an equation, from the scope names in its source information."""
        stack = str(equation.source_info.name_stack)
        if stack not in self._paths:
            # JAX wraps scopes in transformations, as in `transpose(jvp(layer))`; a transpose marks the backward pass.
            words = re.sub(r"\w+\(|\)", "", stack).split("/")
            self._paths[stack] = tuple(word for word in words if word), "transpose(" in stack
        scopes, is_backward = self._paths[stack]
        if not scopes and is_backward == outer.is_backward:
            return outer
        return Place(scopes=(*outer.scopes, *scopes), is_backward=outer.is_backward or is_backward, times=outer.times)


def shape_of(aval: Any) -> tuple[int, ...]:
    """Return the shape of an abstract value; values without a shape, such as tokens, count as scalars."""
    return tuple(map(int, getattr(aval, "shape", ())))


def called_by(equation: JaxprEqn, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the function that an equation only calls (`INLINED`), and the operands that the function takes.

    A linear solve is its solver, which takes neither the product that it inverts nor the transposed solver's constants.
    """
    params = equation.params
    inner = next(params[key] for key in INLINED[equation.primitive.name] if key in params)
    if equation.primitive.name != "custom_linear_solve":
        return inner, list(operands)
    lengths = params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return inner.solve, [*operands[first : first + lengths.solve], *operands[sum(lengths) :]]


def parts_of_while(
    equation: JaxprEqn, operands: Sequence[Any]
) -> tuple[ClosedJaxpr, ClosedJaxpr, tuple[Sequence[Any], Sequence[Any], Sequence[Any]]]:
    """Return condition and body of a `while`, the constants of both among its operands, and the carried ones."""
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    return params["cond_jaxpr"], params["body_jaxpr"], (operands[:first], operands[first:second], operands[second:])


def varying_in_while(equation: JaxprEqn, varies: Sequence[bool]) -> list[bool]:
    """Return for each carried value of a `while` whether it depends on the arguments.

    If the number of iterations depends on them, then so does every value that an iteration changes.
    """
    condition, body, (of_condition, of_body, begins) = parts_of_while(equation, varies)
    given = list(begins)
    changed = [var is not out for var, out in zip(body.jaxpr.invars[len(of_body) :], body.jaxpr.outvars, strict=True)]
    while True:
        (goes_on,) = _depend(condition.jaxpr, [*of_condition, *given])
        outputs = _depend(body.jaxpr, [*of_body, *given])
        after = [
            one or other or (goes_on and is_changed)
            for one, other, is_changed in zip(given, outputs, changed, strict=True)
        ]
        if after == given:
            return after
        given = after


def _depend(jaxpr: Jaxpr, varies: Sequence[bool]) -> list[bool]:
    """Return for each output of a function whether it depends on arguments that vary."""
    known = {var for var, is_varying in zip(jaxpr.invars, varies, strict=True) if is_varying}
    for equation in jaxpr.eqns:
        if any(not isinstance(atom, Literal) and atom in known for atom in equation.invars):
            known.update(equation.outvars)
    return [not isinstance(atom, Literal) and atom in known for atom in jaxpr.outvars]


def varying_carries(body: Jaxpr, varies: Sequence[bool], num_consts: int, num_carry: int) -> list[bool]:
    """Return for each loop-carried value whether it depends on the arguments after some number of iterations."""
    # Repeat the body's dependency analysis until no further carry becomes dependent.
    given = list(varies)
    while True:
        outputs = _depend(body, given)[:num_carry]
        carried = slice(num_consts, num_consts + num_carry)
        after = [one or other for one, other in zip(given[carried], outputs, strict=True)]
        if after == given[carried]:
            return after
        given[carried] = after


def _count_flop(equation: JaxprEqn) -> float:
    """Return the FLOPs of an equation that is not inlined; those of an operator without a rule are XLA's count.

    A `shard_map` counts its body once for each part of its work.
    """
    if equation.primitive.name == SHARD_MAP:
        return num_shards(equation.params) * _flop_of_body(equation.params["jaxpr"])
    call = Call(
        primitive=equation.primitive.name,
        operands=tuple(shape_of(atom.aval) for atom in equation.invars),
        results=tuple(shape_of(var.aval) for var in equation.outvars),
        params=equation.params,
    )
    return flop_of_call(call) if has_rule(call.primitive) else flop_by_xla(equation)


def _flop_of_body(jaxpr: Jaxpr | ClosedJaxpr) -> float:
    """Return the FLOPs of a body that is not planned; the dearest branch counts, and unknown loops count once."""
    return sum(_flop_inside(one) for one in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _flop_inside(equation: JaxprEqn) -> float:
    params, name = equation.params, equation.primitive.name
    if name == "cond":
        return max(map(_flop_of_body, params["branches"]))
    if name == "while":
        return _flop_of_body(params["body_jaxpr"])
    if name == "scan":
        return float(params["length"] * _flop_of_body(params["jaxpr"]))
    key = next((key for key in INLINED.get(name, ()) if key in params), None)
    return _count_flop(equation) if key is None else _flop_of_body(params[key])
