"""Graph of a JAX program: its jaxpr with all calls inlined, unused steps removed, and rules looked up.

The body of a scan appears once, and its operators run `length` times. Its loop-carried values, and the stacks of all
iterations that it reads and writes, pass through operators that cost nothing (`graph.PASSING`):

    carry         starts the loop: reads the first iteration's value, and the result of `next` once per iteration
    next          ends an iteration: reads the value that it hands on, and in a `while` whether it goes on
    loop_unstack  takes one iteration's part of a stack; the stack's first dim is blocked
    loop_stack    combines the iterations' parts into a stack; the stack's first dim is blocked
    merge         takes a result of a `cond`: reads it from each branch, and the number of the branch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from costmodels.sharding.frontends.flat_program import FlatBuilder, Step, alive
from costmodels.sharding.frontends.jax.flat import Flat, Place, shape_of
from costmodels.sharding.frontends.jax.fusion_kinds import KINDS
from costmodels.sharding.frontends.jax.program import Program, trace_function
from costmodels.sharding.frontends.jax.rules import rule_of_call
from costmodels.sharding.frontends.rule_parts import Call, blocked_rule
from costmodels.sharding.graph import CARRY, INPUT, STATE, FusionKind, Graph, GraphBuilder
from hardware.collector import without_collector


def graph_of_jax(fn: Callable[..., Any], *arguments: Any, donated: Sequence[str | int] = ()) -> Graph:
    """Return the graph of a function of abstract arguments; nothing is computed.

    Args:
        fn: Function to plan, typically a training step with `jax.value_and_grad` and the optimizer's update.
        arguments: Trees of `jax.ShapeDtypeStruct`s or arrays.
        donated: Names or numbers of the arguments whose memory is donated to the outputs.
    """
    return graph_of(trace_function(fn, *arguments, donated=donated))


def flatten_trace(program: Program) -> tuple[Flat, list[int], list[int]]:
    """Return a traced function without calls, and the numbers of its arguments and outputs."""
    flat = Flat()
    jaxpr = program.jaxpr
    arguments = [
        flat.add(argument.name, var.aval, varies=0 not in shape_of(var.aval), kind=argument.kind)
        for argument, var in zip(program.arguments, jaxpr.jaxpr.invars, strict=True)
    ]
    outputs = flat.inline(jaxpr.jaxpr, [flat.add("", var.aval) for var in jaxpr.jaxpr.constvars], arguments, Place())
    return flat, arguments, outputs


@without_collector
def graph_of(program: Program) -> Graph:
    """Return the graph of a traced function."""
    flat, arguments, outputs = flatten_trace(program)
    build = FlatBuilder(values=flat.values, builder=GraphBuilder(name=program.name))
    for argument, value in zip(program.arguments, arguments, strict=True):
        if flat.values[value].varies:
            build.source(INPUT if argument.kept_by is None else STATE, value)
    # Remove steps whose results nobody reads.
    needed = alive(flat.steps, outputs, flat.next_of)
    for number, step in enumerate(flat.steps):
        if number in needed:
            call = _make_call(step, flat)
            rule = rule_of_call(call)
            if rule is None:
                build.count_unknown(step.primitive)
                build.step(step, blocked_rule(call))
            else:
                build.step(step, rule, KINDS.get(step.primitive, FusionKind.NONE))
    # The second operand of a carry exists only now, as it is written later in the program than the carry stands.
    for carried, number in flat.next_of.items():
        if number in needed and carried in build.tensors:
            made, shape = flat.steps[number].results[0], flat.values[carried].shape
            rule = rule_of_call(Call(primitive=CARRY, operands=(shape, shape), results=(shape,), params={}))
            assert rule is not None, "a carry has a rule"
            build.builder.carry_on(build.tensors[carried], build.tensors[made], rule)
    for argument, value in zip(program.arguments, arguments, strict=True):
        if argument.kept_by is not None and value in build.tensors and outputs[argument.kept_by] != value:
            build.builder.keep(build.tensors[value], build.read(outputs[argument.kept_by]))
    return build.builder.done()


def _make_call(step: Step, flat: Flat) -> Call:
    return Call(
        primitive=step.primitive,
        operands=tuple(flat.values[operand].shape for operand in step.operands),
        results=tuple(flat.values[result].shape for result in step.results),
        params=step.params,
    )
