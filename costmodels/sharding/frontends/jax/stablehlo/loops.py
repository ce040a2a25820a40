"""Counted loops of StableHLO: what they read and write at the place of their counter.

A scan is lowered to a `while` that carries whole stacks, reads one part of a stack at the counter in each iteration,
and writes one. While a loop's body is read, its counter and its stacks are objects of this module. An operator that
does anything else with a stack raises `Unstackable`, and the loop carries that stack whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jaxlib.mlir import ir

from costmodels.sharding.frontends.jax.stablehlo.files import attribute


class Unstackable(Exception):  # noqa: N818 # it is a statement about a stack, which the loop acts upon
    """Statement that a carried value is no stack: `number` is its place among the carried values."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Counter:
    """Counter of a loop, or a sum or difference of it and a constant.

    Attributes:
        value: Value of the iteration.
        sign: 1 if it grows from iteration to iteration, -1 if it falls.
        first: Value in the first iteration.
    """

    value: Any
    sign: int
    first: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stack:
    """Carried value of which an iteration reads, or writes, one part.

    Attributes:
        number: Place among the carried values.
        part: Part that this iteration reads; None if it writes one.
        shape: Shape of the whole stack, whose first dim has as many parts as the loop has iterations.
        signs: Direction in which the counter goes through each stack, by the number of the stack; found as it is read.
    """

    number: int
    part: Any
    shape: tuple[int, ...]
    signs: dict[int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Written:
    """Stack in which an iteration has written a part.

    Attributes:
        number: Place among the carried values.
        part: Part that was written.
    """

    number: int
    part: Any


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """One part of a stack with a leading dim of one element, which most programs take off or put on.

    Attributes:
        value: The part without this dim.
    """

    value: Any

    @property
    def whole(self) -> Any:
        """The part with this dim."""
        return lax.expand_dims(self.value, [0])


def part(op: ir.Operation, operands: Sequence[Any]) -> Any | None:
    """Return the part without its leading dim, or with it where it is to be written; None for any other operator."""
    if op.name not in ("stablehlo.reshape", "stablehlo.broadcast_in_dim"):
        return None
    (operand,), (result,) = operands, op.results
    shape = tuple(result.type.shape)
    if isinstance(operand, Part):
        return operand.value if op.name == "stablehlo.reshape" and shape == operand.value.shape else None
    if isinstance(operand, (Stack, Written, Counter)) or shape != (1, *operand.shape):
        return None
    is_led = op.name == "stablehlo.reshape" or attribute(op, "broadcast_dimensions") == list(range(1, len(shape)))
    is_written = all(use.owner.operation.name == "stablehlo.dynamic_update_slice" for use in result.uses)
    return Part(value=operand) if is_led and is_written else None


def count(name: str, operands: Sequence[Any]) -> Counter | None:
    """Return the sum or difference of a counter and a constant; None for any other operator."""
    if name not in ("stablehlo.add", "stablehlo.subtract") or len(operands) != 2:
        return None
    one, two = operands
    is_sum = name == "stablehlo.add"
    combine = lax.add if is_sum else lax.sub
    if isinstance(one, Counter) and isinstance(two, np.ndarray):
        first = one.first + int(two) if is_sum else one.first - int(two)
        return Counter(value=combine(one.value, two), sign=one.sign, first=first)
    if isinstance(two, Counter) and isinstance(one, np.ndarray):
        first = int(one) + two.first if is_sum else int(one) - two.first
        return Counter(value=combine(one, two.value), sign=two.sign if is_sum else -two.sign, first=first)
    return None


def unstack(op: ir.Operation, operands: Sequence[Any]) -> Any | None:
    """Return the part that a dynamic_slice takes from a stack at the counter; None for any other operator.

    Raises:
        Unstackable: It takes something else.
    """
    stack = operands[0]
    if op.name != "stablehlo.dynamic_slice" or not isinstance(stack, Stack):
        return None
    sizes = attribute(op, "slice_sizes")
    if stack.part is None or sizes != [1, *stack.shape[1:]]:
        raise Unstackable(stack.number)
    _note_place(stack, operands[1:])
    return Part(value=stack.part)


def write(op: ir.Operation, operands: Sequence[Any]) -> Written | None:
    """Return the stack into which a dynamic_update_slice writes a part at the counter; None for any other operator.

    Raises:
        Unstackable: It writes something else.
    """
    stack = operands[0]
    if op.name != "stablehlo.dynamic_update_slice" or not isinstance(stack, Stack):
        return None
    update = operands[1] if isinstance(operands[1], Part) else plain(operands[1])
    found = update.value if isinstance(update, Part) else lax.squeeze(update, [0])
    if stack.part is not None or found.shape != stack.shape[1:]:
        raise Unstackable(stack.number)
    _note_place(stack, operands[2:])
    return Written(number=stack.number, part=found)


def _note_place(stack: Stack, starts: Sequence[Any]) -> None:
    """Note in which direction the counter goes through a stack.

    Raises:
        Unstackable: The place is not the counter's, or the counter does not go through the whole stack.
    """
    at, *others = starts
    is_whole = all(isinstance(other, np.ndarray) and not other.any() for other in others)
    begin = {1: 0, -1: stack.shape[0] - 1}
    if not isinstance(at, Counter) or not is_whole or at.first != begin[at.sign]:
        raise Unstackable(stack.number)
    if stack.signs.setdefault(stack.number, at.sign) != at.sign:
        raise Unstackable(stack.number)


def plain(value: Any) -> Any:
    """Return a value as operators take it.

    Raises:
        Unstackable: It is a stack.
    """
    if isinstance(value, (Stack, Written)):
        raise Unstackable(value.number)
    if isinstance(value, Part):
        return value.whole
    return value.value if isinstance(value, Counter) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Counter of a loop whose number of iterations is known.

    Attributes:
        number: Place of the counter among the carried values.
        first: Its first value.
        length: Number of iterations.
    """

    number: int
    first: int
    length: int


def counted_loop(op: ir.Operation, begins: Sequence[Any], known: Mapping[ir.Value[Any], Any]) -> Counted | None:
    """Return the counter of a `while` that counts by one from a constant to another; None for any other loop.

    Args:
        op: The `while`.
        begins: Carried values before it.
        known: Values around it.
    """
    condition, body = (region.blocks[0] for region in op.regions)
    steps = [each.operation for each in condition.operations]
    compare = next((each for each in steps if each.name == "stablehlo.compare"), None)
    if compare is None or any(each.name not in _OF_CONDITION for each in steps):
        return None
    one, two = compare.operands
    direction = attribute(compare, "comparison_direction")
    if direction == "GT":
        one, two, direction = two, one, "LT"
    number = _number_of(condition, one)
    if direction != "LT" or number is None or not isinstance(begins[number], np.ndarray):
        return None
    ends = list(body.operations[len(body.operations) - 1].operation.operands)
    fixed = {at: begins[at] for at, end in enumerate(ends) if end == body.arguments[at]}

    def constant(block: ir.Block, value: ir.Value[Any]) -> int | None:
        """Return a value that is the same in all iterations."""
        at = _number_of(block, value)
        maker = _maker_of(value)
        if maker is not None and maker.name == "stablehlo.constant":
            return int(np.array(maker.attributes["value"]))
        held = fixed.get(at) if at is not None else known.get(value)
        return int(held) if isinstance(held, np.ndarray) else None

    until, adding = constant(condition, two), _maker_of(ends[number])
    if until is None or adding is None or adding.name != "stablehlo.add":
        return None
    terms = list(adding.operands)
    others = [term for term in terms if term != body.arguments[number]]
    if len(others) != 1 or constant(body, others[0]) != 1:
        return None
    first = int(begins[number])
    return Counted(number=number, first=first, length=max(until - first, 0))


_OF_CONDITION = frozenset({"stablehlo.constant", "stablehlo.compare", "stablehlo.return"})
"""Operators in the condition of a counted loop."""


def _number_of(block: ir.Block, value: ir.Value[Any]) -> int | None:
    """Return the place of a value among the arguments of a block; None if it is none."""
    return next((at for at, argument in enumerate(block.arguments) if argument == value), None)


def _maker_of(value: ir.Value[Any]) -> ir.Operation | None:
    """Return the operator that makes a value; None for an argument of a block."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scanned:
    """A counted loop as a scan.

    Attributes:
        begins: Carried values before the loop.
        counted: Its counter.
        fixed: Places of carried values that the body hands on unchanged.
        stacks: Places of carried values of which an iteration reads, or writes, one part.
        signs: Direction in which the counter goes through each stack, noted as the body is read.
    """

    begins: Sequence[Any]
    counted: Counted
    fixed: Collection[int]
    stacks: Collection[int]
    signs: dict[int, int]

    @property
    def read(self) -> list[int]:
        """Places of the stacks that are read."""
        return [number for number in sorted(self.stacks) if number in self.fixed]

    @property
    def written(self) -> list[int]:
        """Places of the stacks that are written."""
        return [number for number in sorted(self.stacks) if number not in self.fixed]

    @property
    def carried(self) -> list[int]:
        """Places of values that one iteration hands on to the next."""
        others = {self.counted.number, *self.fixed, *self.stacks}
        return [number for number in range(len(self.begins)) if number not in others]

    def iterate(self, body: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
        """Read the body once, on values of the first iteration."""
        parts = [lax.index_in_dim(self.begins[number], 0, keepdims=False) for number in self.read]
        begins = [self.begins[number] for number in self.carried]
        _, carried, written = self._run_once(body, np.asarray(self.counted.first, self._dtype), begins, parts)
        return [*carried, *written]

    def run(self, body: Callable[[Sequence[Any]], Sequence[Any]], *, reverse: bool) -> list[Any]:
        """Return what the loop carries at its end.

        Args:
            body: Function of the carried values.
            reverse: Whether the counter goes through stacks from their end.
        """
        counter, length = self.counted, self.counted.length
        counts = np.arange(counter.first, counter.first + length, dtype=self._dtype)

        def step(begins: list[Any], given: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            _, carried, written = self._run_once(body, given[0], begins, given[1])
            return carried, written

        carried, written = lax.scan(
            step,
            [self.begins[number] for number in self.carried],
            (counts[::-1] if reverse else counts, [self.begins[number] for number in self.read]),
            length=length,
            reverse=reverse,
        )
        found = list(self.begins)
        found[counter.number] = np.asarray(counter.first + length, self._dtype)
        for numbers, values in ((self.carried, carried), (self.written, written)):
            for number, value in zip(numbers, values, strict=True):
                found[number] = value
        return found

    @property
    def _dtype(self) -> Any:
        return self.begins[self.counted.number].dtype

    def _run_once(
        self, body: Callable[[Sequence[Any]], Sequence[Any]], at: Any, carried: Sequence[Any], parts: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Return all that an iteration returns, what it hands on, and the parts that it writes.

        Raises:
            Unstackable: A stack is none.
        """
        given = list(self.begins)
        given[self.counted.number] = Counter(value=at, sign=1, first=self.counted.first)
        for number, value in zip(self.carried, carried, strict=True):
            given[number] = value
        for number, part in (*zip(self.read, parts, strict=True), *((number, None) for number in self.written)):
            given[number] = Stack(number=number, part=part, shape=self.begins[number].shape, signs=self.signs)
        ends = list(body(given))
        written = []
        for number in self.written:
            end = ends[number]
            if not isinstance(end, Written) or end.number != number:
                raise Unstackable(number)
            written.append(end.part)
        return ends, [plain(ends[number]) for number in self.carried], written
