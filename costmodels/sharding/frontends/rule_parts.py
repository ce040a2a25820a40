"""What rules of primitives are made of, whatever library the primitives are from: calls, and factors one after another.

Dims of size 1 carry no factor. A rule is read from shapes and parameters alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from costmodels.sharding.dims import Factor, FactorKind, Place, Rule

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A primitive as it is called.

    Attributes:
        primitive: Its name.
        operands: Shapes of what it reads.
        results: Shapes of what it writes.
        params: Its parameters, as its library has them.
    """

    primitive: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    params: Mapping[str, Any]


@dataclass(slots=True)
class Loops:
    """The factors of a rule under construction."""

    factors: list[Factor] = field(default_factory=list)

    def dim(self, size: int, kind: FactorKind = FactorKind.MAP) -> tuple[int, ...]:
        """A dim with a factor of its own; with none where there is nothing to loop over."""
        if size <= 1:
            return ()
        self.factors.append(Factor(size=size, kind=kind))
        return (len(self.factors) - 1,)

    def dims(self, shape: Shape, kind: FactorKind = FactorKind.MAP, *, blocked: Collection[int] = ()) -> Place:
        """A tensor whose dims have a factor each."""
        return tuple(self.dim(size, FactorKind.BLOCKED if dim in blocked else kind) for dim, size in enumerate(shape))

    def rule(self, operands: Sequence[Place], results: Sequence[Place]) -> Rule:
        """What has come together."""
        return Rule(factors=tuple(self.factors), operands=tuple(operands), results=tuple(results))


def replaced(place: Place, changes: Mapping[int, tuple[int, ...]]) -> Place:
    """A place with the factors of some dims changed."""
    return tuple(changes.get(dim, factors) for dim, factors in enumerate(place))


def without(place: Place, dims: Collection[int]) -> Place:
    """A place without some dims."""
    return tuple(factors for dim, factors in enumerate(place) if dim not in dims)


def broadcast(place: Place, shape: Shape, operand: Shape) -> Place:
    """Where an operand lies that is broadcast to a shape, whose place is given; dims are counted from the last."""
    lead = len(shape) - len(operand)
    return tuple(place[lead + dim] if size == shape[lead + dim] else () for dim, size in enumerate(operand))


def blocked_rule(call: Call) -> Rule:
    """A rule under which nothing can be cut."""
    loops = Loops()
    return loops.rule(
        [loops.dims(shape, FactorKind.BLOCKED) for shape in call.operands],
        [loops.dims(shape, FactorKind.BLOCKED) for shape in call.results],
    )


def elementwise(call: Call) -> Rule:
    """Of what depends on the operands at one place alone, some of which may be broadcast."""
    loops = Loops()
    shape = call.results[0]
    place = loops.dims(shape)
    return loops.rule([broadcast(place, shape, operand) for operand in call.operands], [place] * len(call.results))


def along(call: Call, dim: int) -> Rule:
    """Of what needs one dim whole and has equal results for equal elements of the others; sizes differ there alone."""
    loops = Loops()
    place = loops.dims(call.operands[0], blocked=(dim,))
    known = {call.operands[0][dim]: place[dim]}

    def of(shape: Shape) -> Place:
        size = shape[dim]
        if size not in known:
            known[size] = loops.dim(size, FactorKind.BLOCKED)
        return replaced(place, {dim: known[size]})

    return loops.rule([of(shape) for shape in call.operands], [of(shape) for shape in call.results])


def changed(call: Call, dims: Collection[int]) -> Rule:
    """Of one operand and one result of its rank, some dims of which are made anew; further operands are scalars.

    Elements move along such a dim where it keeps its size; else the operator needs all of it.
    """
    loops = Loops()
    shape, *scalars = call.operands
    operand, result = [], []
    for dim, (size, new_size) in enumerate(zip(shape, call.results[0], strict=True)):
        if dim in dims and size != new_size:
            operand.append(loops.dim(size, FactorKind.BLOCKED))
            result.append(loops.dim(new_size, FactorKind.BLOCKED))
        else:
            factor = loops.dim(size, FactorKind.PERMUTATION if dim in dims else FactorKind.MAP)
            operand.append(factor)
            result.append(factor)
    return loops.rule([tuple(operand), *((),) * len(scalars)], [tuple(result)])


def resized(call: Call) -> Rule:
    """Of a slice: what is as large as before is whole."""
    sizes = zip(call.operands[0], call.results[0], strict=True)
    return changed(call, [dim for dim, (size, new_size) in enumerate(sizes) if size != new_size])


def reshaped(before: Shape, after: Shape) -> Rule:
    """Elements keep their order, so that a factor that both sides have in front is cut alike.

    Dims are walked from the slowest; what two of them have in common is a factor of both. Where they have nothing in
    common before their products meet again, all up to there is blocked.
    """
    loops = Loops()
    if math.prod(before) == 0:
        return loops.rule([((),) * len(before)], [((),) * len(after)])
    places: list[list[tuple[int, ...]]] = [[() for _ in before], [() for _ in after]]
    left = [list(before), list(after)]
    at = [0, 0]
    while True:
        for side in (0, 1):
            while at[side] < len(left[side]) and left[side][at[side]] == 1:
                at[side] += 1
        if at[0] == len(before):
            break
        common = math.gcd(left[0][at[0]], left[1][at[1]])
        if common > 1:
            factor = loops.dim(common)
            for side in (0, 1):
                places[side][at[side]] += factor
                left[side][at[side]] //= common
        else:
            _block_until_even(loops, places, left, at)
    return loops.rule([tuple(places[0])], [tuple(places[1])])


def _block_until_even(loops: Loops, places: list[list[tuple[int, ...]]], left: list[list[int]], at: list[int]) -> None:
    """Blocks dims from where a reshape stands until as many elements lie behind it on both sides."""
    done = [1, 1]
    while done[0] != done[1] or done[0] == 1:
        side = 0 if done[0] <= done[1] else 1
        dim = at[side]
        done[side] *= left[side][dim]
        places[side][dim] += loops.dim(left[side][dim], FactorKind.BLOCKED)
        left[side][dim] = 1
        at[side] += 1
