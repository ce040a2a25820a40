"""The graph of a JAX program: its jaxpr with every call inlined, what nobody reads left out, and rules looked up.

What depends on no argument (positions, masks, zeros) is no work of the step: where a real operator reads such a value,
it stands as a source `constant` just before; scalars of that kind aren't operands at all.

The body of a scan stands once, its operators run `length` times. Its loop-carried values, and what it reads from and
writes to stacks of all iterations, pass through operators that cost nothing (`graph.LOOP`):

    carry    begins the loop: the first iteration's value is the next one's too, so both should lie alike
    next     ends an iteration: reads what was carried into it and what it carries on, which must lie alike
    unstack  an iteration's part of a stack; the stack's first dim is blocked
    stack    the stack that the iterations' parts make up; the same
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from costmodels.dims import Rule
from costmodels.frontends.jax_flat import Flat, Place, Step, shape_of
from costmodels.frontends.jax_program import Program, traced
from costmodels.frontends.jax_rules import Call, blocked_rule, rule_of_call
from costmodels.graph import CONSTANT, INPUT, STATE, Graph, GraphBuilder, TensorKind

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp32"}
"""What the catalog of devices calls the types of products; 8-bit floats are `fp8`, all else has no name there."""


def graph_of_jax(fn: Callable[..., Any], *arguments: Any, donated: Sequence[str | int] = ()) -> Graph:
    """The graph of a function of abstract arguments; nothing is computed.

    Args:
        fn: Typically one training step, of which `jax.value_and_grad` and the optimizer are part.
        arguments: Trees of `jax.ShapeDtypeStruct`s or arrays.
        donated: Names or numbers of the arguments whose memory the outputs take over.
    """
    return graph_of(traced(fn, *arguments, donated=donated))


def flattened(program: Program) -> tuple[Flat, list[int], list[int]]:
    """A traced function without calls, and the numbers of its arguments and of its outputs."""
    flat = Flat()
    jaxpr = program.jaxpr
    arguments = [
        flat.add(argument.name, var.aval, varies=0 not in shape_of(var.aval), kind=argument.kind)
        for argument, var in zip(program.arguments, jaxpr.jaxpr.invars, strict=True)
    ]
    outputs = flat.inline(jaxpr.jaxpr, [flat.add("", var.aval) for var in jaxpr.jaxpr.constvars], arguments, Place())
    return flat, arguments, outputs


def operand_slots(flat: Flat, step: Step) -> list[int]:
    """Which operands of a step its operator reads: no scalar constants, and nothing that is empty."""
    arrays = [flat.values[operand] for operand in step.operands]
    return [slot for slot, array in enumerate(arrays) if 0 not in array.shape and (array.varies or array.shape)]


def graph_of(program: Program) -> Graph:
    """The graph of a traced function."""
    flat, arguments, outputs = flattened(program)
    build = _Build(flat=flat, builder=GraphBuilder(name=program.name))
    for argument, value in zip(program.arguments, arguments, strict=True):
        if flat.values[value].varies:
            build.source(INPUT if argument.kept_by is None else STATE, value)
    alive = _alive(flat, outputs)
    for number, step in enumerate(flat.steps):
        if number in alive:
            build.step(step)
    for argument, value in zip(program.arguments, arguments, strict=True):
        if argument.kept_by is not None and value in build.tensors and outputs[argument.kept_by] != value:
            build.builder.keep(build.tensors[value], build.read(outputs[argument.kept_by]))
    return build.builder.done()


def _alive(flat: Flat, outputs: Sequence[int]) -> set[int]:
    """The numbers of the steps that somebody needs."""
    maker = {result: number for number, step in enumerate(flat.steps) for result in step.results}
    found: set[int] = set()
    waiting = list(outputs)
    while waiting:
        value = waiting.pop()
        for number in (maker.get(value), flat.next_of.get(value)):
            if number is not None and number not in found:
                found.add(number)
                waiting += flat.steps[number].operands
    return found


@dataclass(slots=True)
class _Build:
    """A graph under construction from a flat program.

    Attributes:
        flat: The program.
        builder: The graph so far.
        tensors: The number of each value's tensor.
        rules: Each rule once, so that equal operators share it.
    """

    flat: Flat
    builder: GraphBuilder
    tensors: dict[int, int] = field(default_factory=dict)
    rules: dict[Rule, Rule] = field(default_factory=dict)
    num_constants: int = 0

    def source(self, primitive: str, value: int) -> None:
        """Adds an argument."""
        array = self.flat.values[value]
        self.tensors[value] = self.builder.source(primitive, array.name, array.shape, array.element_bytes, array.kind)

    def read(self, value: int) -> int:
        """The tensor of a value; one that depends on no argument is made where it is read first."""
        if value not in self.tensors:
            array = self.flat.values[value]
            assert not array.varies, f"{array.name!r} is written before it is read"
            name = f"constant.{self.num_constants}"
            self.num_constants += 1
            self.tensors[value] = self.builder.source(
                CONSTANT, name, array.shape, array.element_bytes, TensorKind.CONSTANT
            )
        return self.tensors[value]

    def step(self, step: Step) -> None:
        """Adds an operator, without operands that are scalar constants or empty."""
        values = self.flat.values
        rule = self._rule(step)
        kept = operand_slots(self.flat, step)
        if len(kept) < len(step.operands):
            rule = Rule(
                factors=rule.factors, operands=tuple(rule.operands[slot] for slot in kept), results=rule.results
            )
        operands = [self.read(step.operands[slot]) for slot in kept]
        for result in step.results:
            array = values[result]
            self.tensors[result] = self.builder.tensor(array.name, array.shape, array.element_bytes, array.kind)
        self.builder.op(
            step.name,
            step.primitive,
            operands,
            [self.tensors[result] for result in step.results],
            self.rules.setdefault(rule, rule),
            flop=step.flop,
            times=step.times,
            precision=_precision([values[operand].dtype for operand in step.operands]) if step.flop else "",
        )

    def _rule(self, step: Step) -> Rule:
        call = Call(
            primitive=step.primitive,
            operands=tuple(self.flat.values[operand].shape for operand in step.operands),
            results=tuple(self.flat.values[result].shape for result in step.results),
            params=step.params,
        )
        rule = rule_of_call(call)
        if rule is None:
            unknown = self.builder.unknown
            unknown[step.primitive] = unknown.get(step.primitive, 0) + 1
            return blocked_rule(call)
        return rule


def _precision(dtypes: Sequence[str]) -> str:
    """That of the first operand whose type has a name there."""
    names = ["fp8" if dtype.startswith("float8") else PRECISIONS.get(dtype, "") for dtype in dtypes]
    return next(filter(None, names), "")
