"""A traced program as one list of values and one of steps, and the graph of it.

What depends on no argument (positions, masks, zeros) is no work of the step: where a real operator reads such a value,
it stands as a source `constant` just before; scalars of that kind aren't operands at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from costmodels.sharding.dims import Rule
from costmodels.sharding.graph import CONSTANT, GraphBuilder, TensorKind

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp32"}
"""What the catalog of devices calls the types of products; 8-bit floats are `fp8`, all else has no name there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """An array of the flat program. Names of constants are empty; they get one where they are read."""

    name: str
    shape: tuple[int, ...]
    element_bytes: float
    kind: TensorKind
    varies: bool
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An operator of the flat program; values are named by their numbers."""

    name: str
    primitive: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    params: Mapping[str, Any]
    flop: float
    times: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """An operator and its rule.

    Attributes:
        step: The operator.
        rule: Its iteration space.
        is_known: Whether somebody wrote the rule; all dims are blocked if not.
        is_backward: Whether the backward pass does it.
    """

    step: Step
    rule: Rule
    is_known: bool
    is_backward: bool


@dataclass(slots=True)
class Names:
    """Gives every operator a name that nobody has yet."""

    counts: dict[str, int] = field(default_factory=dict)

    def new(self, scopes: Sequence[str], primitive: str, *, is_backward: bool) -> str:
        """Of an operator in these scopes; what the backward pass does begins with `grad`."""
        name = ".".join((*(("grad",) if is_backward else ()), *scopes, primitive))
        count = self.counts.get(name, 0)
        self.counts[name] = count + 1
        return f"{name}.{count}" if count else name


def alive(steps: Sequence[Step], outputs: Iterable[int], also: Mapping[int, int] | None = None) -> set[int]:
    """The numbers of the steps that somebody needs.

    Args:
        steps: All of them.
        outputs: The values that the program is for.
        also: Of a value a further step that is needed where the value is.
    """
    maker = {result: number for number, step in enumerate(steps) for result in step.results}
    found: set[int] = set()
    waiting = list(outputs)
    while waiting:
        value = waiting.pop()
        for number in (maker.get(value), (also or {}).get(value)):
            if number is not None and number not in found:
                found.add(number)
                waiting += steps[number].operands
    return found


def operand_slots(values: Sequence[Value], step: Step) -> list[int]:
    """Which operands of a step its operator reads: no scalar constants, and nothing that is empty."""
    arrays = [values[operand] for operand in step.operands]
    return [slot for slot, array in enumerate(arrays) if 0 not in array.shape and (array.varies or array.shape)]


@dataclass(slots=True)
class FlatBuilder:
    """A graph under construction from a flat program.

    Attributes:
        values: Those of the program.
        builder: The graph so far.
        tensors: The number of each value's tensor.
        rules: Each rule once, so that equal operators share it.
    """

    values: Sequence[Value]
    builder: GraphBuilder
    tensors: dict[int, int] = field(default_factory=dict)
    rules: dict[Rule, Rule] = field(default_factory=dict)
    num_constants: int = 0

    def source(self, primitive: str, value: int) -> None:
        """Adds an argument."""
        array = self.values[value]
        self.tensors[value] = self.builder.source(primitive, array.name, array.shape, array.element_bytes, array.kind)

    def read(self, value: int) -> int:
        """The tensor of a value; one that depends on no argument is made where it is read first."""
        if value not in self.tensors:
            array = self.values[value]
            assert not array.varies, f"{array.name!r} is written before it is read"
            name = f"constant.{self.num_constants}"
            self.num_constants += 1
            self.tensors[value] = self.builder.source(
                CONSTANT, name, array.shape, array.element_bytes, TensorKind.CONSTANT
            )
        return self.tensors[value]

    def step(self, step: Step, rule: Rule) -> None:
        """Adds an operator, without operands that are scalar constants or empty."""
        values = self.values
        kept = operand_slots(values, step)
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

    def count_unknown(self, primitive: str) -> None:
        """Counts a primitive that no rule is known for."""
        unknown = self.builder.unknown
        unknown[primitive] = unknown.get(primitive, 0) + 1


def _precision(dtypes: Sequence[str]) -> str:
    """That of the first operand whose type has a name there."""
    names = ["fp8" if dtype.startswith("float8") else PRECISIONS.get(dtype, "") for dtype in dtypes]
    return next(filter(None, names), "")
