"""Flat form of a traced program: one list of values and one list of steps, and the builder that makes a graph of them.

Values that depend on no argument (positions, masks, zeros) are not computed by the step. If an operator reads such a
value, it becomes a source `constant` just before that operator. Scalar constants are not operands at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from costmodels.sharding.dims import Rule
from costmodels.sharding.graph import CARRY, CONSTANT, FusionKind, GraphBuilder, TensorKind

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp32"}
"""Precision names of the device catalog by dtype; 8-bit floats are `fp8`, and other dtypes have no name there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """An array of the flat program. A constant has an empty name until an operator reads it."""

    name: str
    shape: tuple[int, ...]
    element_bytes: float
    kind: TensorKind
    varies: bool
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An operator of the flat program; values are identified by their numbers."""

    name: str
    primitive: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    params: Mapping[str, Any]
    flop: float
    times: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """An operator and its sharding rule.

    Attributes:
        step: Operator of the flat program.
        rule: Sharding rule of the operator.
        is_known: Whether the rule table has a rule for it; otherwise all dims are blocked.
        is_backward: Whether the operator belongs to the backward pass.
        node: Call in the traced program; None if nothing will execute it.
        own_rule: Rule of this call alone, without views that were folded into it. Operands have the order of `slots`.
        unread: Values that the call takes, but whose elements the graph does not show: only their shape is read, or one
            number fills them.
        slots: Index, among the tensors that the call takes, of each operand and then of each unread value.
        reads: Views folded into each operand, from the value that the step reads to the call.
        writes: Views folded into each result, from the call to the value that the step writes.
        reads_via: Place of the tensor behind each of these views of operands, by its index among the rule's operands.
        writes_via: Place of the tensor in front of each of these views of results, in the same way.
    """

    step: Step
    rule: Rule
    is_known: bool
    is_backward: bool
    node: Any = None
    own_rule: Rule | None = None
    unread: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    reads: tuple[tuple[Kernel, ...], ...] = ()
    writes: tuple[tuple[Kernel, ...], ...] = ()
    reads_via: tuple[tuple[int, ...], ...] = ()
    writes_via: tuple[tuple[int, ...], ...] = ()

    @property
    def shown_rule(self) -> Rule:
        """Rule of the step, for the graph.

        Among its operands, `rule` has more: after the step's own, the unread values, and then the tensors between
        folded views and the call.
        """
        operands = self.rule.operands[: len(self.step.operands)]
        return Rule(factors=self.rule.factors, operands=operands, results=self.rule.results)


@dataclass(slots=True)
class Names:
    """Registry of operator names that makes each name unique."""

    counts: dict[str, int] = field(default_factory=dict)

    def new(self, scopes: Sequence[str], primitive: str, *, is_backward: bool) -> str:
        """Return a new name for an operator in these scopes; names of the backward pass begin with `grad`."""
        name = ".".join((*(("grad",) if is_backward else ()), *scopes, primitive))
        count = self.counts.get(name, 0)
        self.counts[name] = count + 1
        return f"{name}.{count}" if count else name


def alive(steps: Sequence[Step], outputs: Iterable[int], also: Mapping[int, int] | None = None) -> set[int]:
    """Return the numbers of the steps that the outputs depend on.

    Args:
        steps: All steps of the program.
        outputs: Values that the program returns.
        also: Further step that is needed whenever a value is needed, by that value.
    """
    maker = {result: number for number, step in enumerate(steps) for result in step.results}
    found: set[int] = set()
    # Depth-first search from the outputs back to the steps that write their operands.
    waiting = list(outputs)
    while waiting:
        value = waiting.pop()
        for number in (maker.get(value), (also or {}).get(value)):
            if number is not None and number not in found:
                found.add(number)
                waiting += steps[number].operands
    return found


def operand_slots(values: Sequence[Value], step: Step) -> list[int]:
    """Return the slots of the operands that the graph keeps: no scalar constants and no empty arrays.

    The value with which a loop starts is kept, because the loop replaces it.
    """
    arrays = [values[operand] for operand in step.operands]
    is_start = step.primitive == CARRY
    return [
        slot for slot, array in enumerate(arrays) if 0 not in array.shape and (array.varies or array.shape or is_start)
    ]


def result_slots(values: Sequence[Value], step: Step) -> list[int]:
    """Return the slots of the results that the graph keeps: no empty arrays, of which nobody reads an element."""
    return [slot for slot, result in enumerate(step.results) if 0 not in values[result].shape]


@dataclass(slots=True)
class FlatBuilder:
    """Builder of a graph from a flat program.

    Attributes:
        values: Values of the program.
        builder: Builder of the graph.
        tensors: Number of the tensor in the graph for each value.
        rules: Rules so far, each mapped to itself, so that equal operators share one object.
    """

    values: Sequence[Value]
    builder: GraphBuilder
    tensors: dict[int, int] = field(default_factory=dict)
    rules: dict[Rule, Rule] = field(default_factory=dict)
    num_constants: int = 0

    def source(self, primitive: str, value: int) -> None:
        """Add an argument of the program."""
        array = self.values[value]
        self.tensors[value] = self.builder.source(primitive, array.name, array.shape, array.element_bytes, array.kind)

    def read(self, value: int) -> int:
        """Return the tensor of a value; a constant becomes a source when it is first read."""
        if value not in self.tensors:
            array = self.values[value]
            assert not array.varies, f"{array.name!r} is written before it is read"
            name = f"constant.{self.num_constants}"
            self.num_constants += 1
            self.tensors[value] = self.builder.source(
                CONSTANT, name, array.shape, array.element_bytes, TensorKind.CONSTANT
            )
        return self.tensors[value]

    def step(self, step: Step, rule: Rule, fusion: FusionKind = FusionKind.NONE) -> None:
        """Add an operator, without operands that are scalar constants or empty, and without empty results."""
        values = self.values
        kept, made = operand_slots(values, step), result_slots(values, step)
        if len(kept) < len(step.operands) or len(made) < len(step.results):
            # Keep the rule's places in step with the tensors that remain.
            rule = Rule(
                factors=rule.factors,
                operands=tuple(rule.operands[slot] for slot in kept),
                results=tuple(rule.results[slot] for slot in made),
            )
        operands = [self.read(step.operands[slot]) for slot in kept]
        results = [step.results[slot] for slot in made]
        for result in results:
            array = values[result]
            self.tensors[result] = self.builder.tensor(array.name, array.shape, array.element_bytes, array.kind)
        self.builder.op(
            step.name,
            step.primitive,
            operands,
            [self.tensors[result] for result in results],
            # Equal rules share one object, and with it its cached properties.
            self.rules.setdefault(rule, rule),
            flop=step.flop,
            times=step.times,
            precision=_find_precision([values[operand].dtype for operand in step.operands]) if step.flop else "",
            fusion=fusion,
        )

    def count_unknown(self, primitive: str) -> None:
        """Count one occurrence of a primitive without a known rule."""
        unknown = self.builder.unknown
        unknown[primitive] = unknown.get(primitive, 0) + 1


def _find_precision(dtypes: Sequence[str]) -> str:
    """Return the precision of the first operand whose dtype the device catalog names; empty if none is named."""
    # Operands such as indices have no precision; the first one with a named dtype decides.
    names = ["fp8" if dtype.startswith("float8") else PRECISIONS.get(dtype, "") for dtype in dtypes]
    return next(filter(None, names), "")
