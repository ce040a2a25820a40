"""Loops and conditionals of a planned JAX function, with the layouts of the plan inside.

JAX traces bodies and branches at any time and several times, while the flat program has their steps once. So each trace
starts at the step at which its body begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from costmodels.sharding.exports.jax_placing import Array, Placing
from costmodels.sharding.frontends.jax.flat import parts_of_while, varying_carries, varying_in_while
from costmodels.sharding.graph import CARRY, MERGE, NEXT, STACK, UNSTACK

Evaluate = Callable[[Jaxpr, Sequence[Array], Sequence[Array]], list[Array]]
"""Evaluates a jaxpr in step with the flat program: from constants and arguments to outputs."""


def run_scan(placing: Placing, equation: JaxprEqn, operands: list[Array], evaluate: Evaluate) -> list[Array]:
    """Evaluate a scan with constraints on its loop-carried values and stacks."""
    params = equation.params
    body, num_consts, num_carry = params["jaxpr"], params["num_consts"], params["num_carry"]
    begins, stacks = operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
    varies = [operand.number is not None for operand in operands]
    carries = varying_carries(body.jaxpr, varies, num_consts, num_carry)
    begun = [
        placing.pass_into_loop(CARRY, begin) if is_carried else begin
        for begin, is_carried in zip(begins, carries, strict=True)
    ]
    cut = [placing.pass_into_loop(UNSTACK, stack) if stack.number is not None else stack for stack in stacks]
    consts = [Array(value=const, number=None) for const in body.consts]
    first, numbers = placing.position, list[int | None]()

    def iteration(carried: Sequence[Any], parts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        # JAX traces the body several times, but the flat program has its steps once, so each trace starts at the
        # same step.
        placing.position = first
        # Copies made inside the body do not exist outside of it.
        outer, placing.copies = placing.copies, dict(placing.copies)
        inputs = [placing.place_value(value, each.number) for value, each in zip(carried, begun, strict=True)]
        inputs += [placing.place_value(value, each.number) for value, each in zip(parts, cut, strict=True)]
        found = evaluate(body.jaxpr, consts, [*operands[:num_consts], *inputs])
        numbers[:] = []
        after = []
        for before, end, is_carried in zip(inputs, found[:num_carry], carries, strict=False):
            if is_carried and end.number != before.number:
                step = placing.take_step(NEXT)
                numbers.append(step.results[0])
                after.append(placing.place_value(placing.place_operands(step, [end])[0], step.results[0]).value)
            else:
                numbers.append(None)
                after.append(end.value)
        done = []
        for part in found[num_carry:]:
            if part.number is None:
                numbers.append(None)
                done.append(part.value)
            else:
                step = placing.take_step(STACK)
                numbers.append(step.results[0])
                done.append(placing.place_operands(step, [part])[0])
        placing.copies = outer
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
        begin if is_carried and number is None else Array(value=value, number=number)
        for begin, is_carried, number, value in zip(begins, carries, numbers, carried, strict=False)
    ]
    return [
        *(placing.place_value(each.value, each.number) for each in ends),
        *(placing.place_value(value, number) for value, number in zip(stacked, numbers[num_carry:], strict=True)),
    ]


def run_while(placing: Placing, equation: JaxprEqn, operands: list[Array], evaluate: Evaluate) -> list[Array]:
    """Evaluate a loop of unknown length with constraints on its carried values."""
    condition, body, (of_condition, of_body, begins) = parts_of_while(equation, operands)
    carries = varying_in_while(equation, [operand.number is not None for operand in operands])
    begun = [
        placing.pass_into_loop(CARRY, begin) if is_carried else begin
        for begin, is_carried in zip(begins, carries, strict=True)
    ]
    first, outer, numbers = placing.position, placing.copies, list[int | None]()

    def run(part: ClosedJaxpr, consts: Sequence[Array], values: Sequence[Any]) -> list[Array]:
        placing.copies = dict(outer)  # copies made inside do not exist outside
        inputs = [placing.place_value(value, each.number) for value, each in zip(values, begun, strict=True)]
        own = [Array(value=const, number=None) for const in part.consts]
        return evaluate(part.jaxpr, own, [*consts, *inputs])

    def goes_on(values: Sequence[Any]) -> Any:
        placing.position = first
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
                step = placing.take_step(NEXT)
                numbers.append(step.results[0])
                (value, *_) = placing.place_operands(step, [end])
                after.append(placing.place_value(value, step.results[0]).value)
            else:
                numbers.append(None)
                after.append(end.value)
        return after

    values = [each.value for each in begun]
    jax.eval_shape(iteration, values)
    last = placing.position
    ends = lax.while_loop(goes_on, iteration, values)
    placing.position, placing.copies = last, outer
    return [
        begin if is_carried and number is None else placing.place_value(value, number)
        for begin, is_carried, number, value in zip(begins, carries, numbers, ends, strict=True)
    ]


def run_cond(placing: Placing, equation: JaxprEqn, operands: list[Array], evaluate: Evaluate) -> list[Array]:
    """Evaluate a conditional, whose branches leave each result in the layout in which it is merged."""
    which, *given = operands
    branches = equation.params["branches"]
    # The flat program has all branches, and then a step for each result; a first trace finds where they begin.
    outer, starts, found = placing.copies, list[int](), list[list[Array]]()

    def run(branch: ClosedJaxpr, values: Sequence[Any]) -> list[Array]:
        placing.copies = dict(outer)
        own = [Array(value=const, number=None) for const in branch.consts]
        arrays = [Array(value=value, number=each.number) for value, each in zip(values, given, strict=True)]
        return evaluate(branch.jaxpr, own, arrays)

    values = [each.value for each in given]
    for branch in branches:
        starts.append(placing.position)
        ends: list[Array] = []
        jax.eval_shape(lambda values, branch=branch, ends=ends: ends.extend(run(branch, values)), values)
        found.append(ends)
    merges = [
        placing.take_step(MERGE) if which.number is not None or any(end.number is not None for end in ends) else None
        for ends in zip(*found, strict=True)
    ]
    last = placing.position

    def branch_at(slot: int) -> Callable[..., list[Any]]:
        def inside(*values: Any) -> list[Any]:
            placing.position = starts[slot]
            ends = run(branches[slot], values)
            return [
                end.value if step is None else placing.place_operand(step, slot, end)
                for step, end in zip(merges, ends, strict=True)
            ]

        return inside

    index = lax.convert_element_type(which.value, "int32")
    results = lax.switch(index, [branch_at(slot) for slot in range(len(branches))], *values)
    placing.position, placing.copies = last, outer
    return [
        placing.place_value(value, None if step is None else step.results[0])
        for value, step in zip(results, merges, strict=True)
    ]
