"""A jaxpr with every call inlined: one list of values and one of steps, and where each step stands.

The body of a scan stands once, its steps run `length` times. Its loop-carried values, and what it reads from and
writes to stacks of all iterations, pass through steps that cost nothing (`graph.LOOP`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from costmodels.sharding.frontends.flat_program import Names, Step, Value
from costmodels.sharding.frontends.jax.rules import flop_of_call
from costmodels.sharding.frontends.rule_parts import Call
from costmodels.sharding.graph import CARRY, NEXT, STACK, UNSTACK, TensorKind

INLINED: Mapping[str, tuple[str, ...]] = {
    "checkpoint": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr", "fun_jaxpr"),
    "custom_vjp_call_jaxpr": ("fun_jaxpr", "call_jaxpr"),
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "remat": ("jaxpr",),
    "remat2": ("jaxpr",),
}
"""Primitives that only call a function, and the parameters that may hold it, by the versions of JAX."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an equation stands: the scopes around it, whether backward, and how often it runs."""

    scopes: tuple[str, ...] = ()
    is_backward: bool = False
    times: int = 1


@dataclass(slots=True)
class Flat:
    """A program without calls, as it grows.

    Attributes:
        values: Every array.
        steps: Every operator.
        next_of: Of what a `carry` writes the `next` that ends the iteration, without which it would be wrong.
    """

    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    next_of: dict[int, int] = field(default_factory=dict)
    _names: Names = field(default_factory=Names)
    _paths: dict[str, tuple[tuple[str, ...], bool]] = field(default_factory=dict)

    def add(
        self, name: str, aval: Any, *, varies: bool = False, kind: TensorKind = TensorKind.ACTIVATION, lead: int = 0
    ) -> int:
        """Adds a value; a stack of `lead` of them, if that is given."""
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
        """Adds all that a function does; its outputs."""
        known: dict[Var, int] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

        def read(atom: Any) -> int:
            return self.add("", atom.aval) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            is_empty = all(0 in shape_of(var.aval) for var in equation.outvars)
            if is_empty or not any(self.values[operand].varies for operand in operands):
                results = [self.add("", var.aval) for var in equation.outvars]
            elif equation.primitive.name in INLINED:
                results = self._called(equation, operands, self._place_of(equation, place))
            elif equation.primitive.name == "scan":
                results = self._scanned(equation, operands, self._place_of(equation, place))
            else:
                results = self._computed(equation, operands, self._place_of(equation, place))
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _called(self, equation: JaxprEqn, operands: list[int], place: Place) -> list[int]:
        inner = next(equation.params[key] for key in INLINED[equation.primitive.name] if key in equation.params)
        called = equation.params.get("name")
        if called:
            place = Place(scopes=(*place.scopes, called), is_backward=place.is_backward, times=place.times)
        if isinstance(inner, ClosedJaxpr):
            return self.inline(inner.jaxpr, [self.add("", var.aval) for var in inner.jaxpr.constvars], operands, place)
        return self.inline(inner, [], operands, place)

    def _computed(self, equation: JaxprEqn, operands: list[int], place: Place) -> list[int]:
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
                flop=_flop_of(equation),
                times=place.times,
            )
        )
        return results

    def _scanned(self, equation: JaxprEqn, operands: list[int], place: Place) -> list[int]:
        params = equation.params
        body, length = params["jaxpr"], params["length"]
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        begins, stacks = operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
        carries = varying_carries(
            body.jaxpr, [self.values[operand].varies for operand in operands], num_consts, num_carry
        )
        inside = Place(scopes=place.scopes, is_backward=place.is_backward, times=place.times * length)

        avals = [var.aval for var in body.jaxpr.invars[num_consts:]]
        inputs = [
            self._through(CARRY, [begin], aval, place) if varies else self.add("", aval)
            for begin, aval, varies in zip(begins, avals[:num_carry], carries, strict=True)
        ]
        parts = [
            self._through(UNSTACK, [stack], aval, place) if self.values[stack].varies else self.add("", aval)
            for stack, aval in zip(stacks, avals[num_carry:], strict=True)
        ]
        consts = [self.add("", var.aval) for var in body.jaxpr.constvars]
        outputs = self.inline(body.jaxpr, consts, [*operands[:num_consts], *inputs, *parts], inside)

        results: list[int] = []
        for begin, before, after, varies in zip(begins, inputs, outputs[:num_carry], carries, strict=True):
            aval = body.jaxpr.outvars[len(results)].aval
            if not varies:
                results.append(self.add("", aval))
            elif after == before:
                results.append(begin)
            else:
                results.append(self._through(NEXT, [after], aval, inside))
                self.next_of[before] = len(self.steps) - 1
        for part, var in zip(outputs[num_carry:], body.jaxpr.outvars[num_carry:], strict=True):
            if self.values[part].varies:
                results.append(self._through(STACK, [part], var.aval, inside, lead=length))
            else:
                results.append(self.add("", var.aval, lead=length))
        return results

    def _through(self, primitive: str, operands: list[int], aval: Any, place: Place, *, lead: int = 0) -> int:
        """Adds an operator that costs nothing."""
        name = self._names.new(place.scopes, primitive, is_backward=place.is_backward)
        result = self.add(name, aval, varies=True, kind=self.values[operands[-1]].kind, lead=lead)
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

    def _place_of(self, equation: JaxprEqn, outer: Place) -> Place:
        """Where an equation stands, by the names that its author gave to scopes."""
        stack = str(equation.source_info.name_stack)
        if stack not in self._paths:
            words = re.sub(r"\w+\(|\)", "", stack).split("/")
            self._paths[stack] = tuple(word for word in words if word), "transpose(" in stack
        scopes, is_backward = self._paths[stack]
        if not scopes and is_backward == outer.is_backward:
            return outer
        return Place(scopes=(*outer.scopes, *scopes), is_backward=outer.is_backward or is_backward, times=outer.times)


def shape_of(aval: Any) -> tuple[int, ...]:
    """The shape of an abstract value; what has none, as a token, counts as a scalar."""
    return tuple(map(int, getattr(aval, "shape", ())))


def varying_carries(body: Jaxpr, varies: Sequence[bool], num_consts: int, num_carry: int) -> list[bool]:
    """Which values that a loop carries depend on its arguments, at the latest after some iterations."""
    given = list(varies)
    while True:
        known = {var for var, is_varying in zip(body.invars, given, strict=True) if is_varying}
        for equation in body.eqns:
            if any(not isinstance(atom, Literal) and atom in known for atom in equation.invars):
                known.update(equation.outvars)
        outputs = [not isinstance(atom, Literal) and atom in known for atom in body.outvars[:num_carry]]
        carried = slice(num_consts, num_consts + num_carry)
        after = [one or other for one, other in zip(given[carried], outputs, strict=True)]
        if after == given[carried]:
            return after
        given[carried] = after


def _flop_of(equation: JaxprEqn) -> float:
    """Of a call, of the dearest branch, or of one iteration of a loop whose length nobody knows."""
    inner = [_inner(value) for key in ("branches", "body_jaxpr") for value in _several(equation.params.get(key))]
    if inner:
        return max(sum(_flop_of(one) for one in jaxpr.eqns) for jaxpr in inner)
    name = equation.primitive.name
    if name in INLINED or name == "scan":
        key = next(key for key in INLINED.get(name, ("jaxpr",)) if key in equation.params)
        return float(equation.params.get("length", 1) * sum(map(_flop_of, _inner(equation.params[key]).eqns)))
    if name not in ("dot_general", "conv_general_dilated"):
        return 0.0
    return flop_of_call(
        Call(
            primitive=name,
            operands=tuple(shape_of(atom.aval) for atom in equation.invars),
            results=tuple(shape_of(var.aval) for var in equation.outvars),
            params=equation.params,
        )
    )


def _several(value: Any) -> Sequence[Any]:
    return () if value is None else value if isinstance(value, tuple) else (value,)


def _inner(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
