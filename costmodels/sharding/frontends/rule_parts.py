"""Building blocks of sharding rules for primitives of any library.

A `Call` describes a primitive by shapes and parameters, and `Loops` collects the factors of its rule. Dims of size 1
carry no factor. A rule depends on shapes and parameters only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from costmodels.sharding.dims import Factor, FactorKind, Place, Rule

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a primitive.

    Attributes:
        primitive: Name of the primitive.
        operands: Shapes of the tensors that it reads.
        results: Shapes of the tensors that it writes.
        params: Parameters of the call, in the form of its library.
    """

    primitive: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    params: Mapping[str, Any]


@dataclass(slots=True)
class Loops:
    """Factors of a rule under construction."""

    factors: list[Factor] = field(default_factory=list)

    def dim(self, size: int, kind: FactorKind = FactorKind.MAP) -> tuple[int, ...]:
        """Return the factors of a new dim: one factor of its own, or none for a size of at most 1."""
        if size <= 1:
            return ()
        self.factors.append(Factor(size=size, kind=kind))
        return (len(self.factors) - 1,)

    def dims(self, shape: Shape, kind: FactorKind = FactorKind.MAP, *, blocked: Collection[int] = ()) -> Place:
        """Return the factors of a tensor's dims, one new factor for each dim."""
        return tuple(self.dim(size, FactorKind.BLOCKED if dim in blocked else kind) for dim, size in enumerate(shape))

    def rule(self, operands: Sequence[Place], results: Sequence[Place]) -> Rule:
        """Return the rule with all factors so far."""
        return Rule(factors=tuple(self.factors), operands=tuple(operands), results=tuple(results))


def same_rule(words: str, rule: Callable[[Call], Rule]) -> dict[str, Callable[[Call], Rule]]:
    """Return a table with one rule for all names in a text."""
    return dict.fromkeys(words.split(), rule)


def replace_factors(place: Place, changes: Mapping[int, tuple[int, ...]]) -> Place:
    """Return a place with the factors of some dims replaced."""
    return tuple(changes.get(dim, factors) for dim, factors in enumerate(place))


def without(place: Place, dims: Collection[int]) -> Place:
    """Return a place without some dims."""
    return tuple(factors for dim, factors in enumerate(place) if dim not in dims)


def broadcast(place: Place, shape: Shape, operand: Shape) -> Place:
    """Return the place of an operand that is broadcast to `shape`, which lies at `place`.

    Dims are matched from the last one, as in NumPy.
    """
    # Dims of size 1 that are broadcast carry no factor.
    lead = len(shape) - len(operand)
    return tuple(place[lead + dim] if size == shape[lead + dim] else () for dim, size in enumerate(operand))


def fits(rule: Rule, call: Call) -> bool:
    """Return whether a rule has the shapes of a call; empty tensors may have any."""
    pairs = [
        *zip(call.operands, map(rule.operand_shape, range(len(rule.operands))), strict=False),
        *zip(call.results, map(rule.result_shape, range(len(rule.results))), strict=False),
    ]
    counts = (len(rule.operands), len(rule.results))
    is_whole = counts == (len(call.operands), len(call.results))
    return is_whole and all(shape == place or 0 in shape for shape, place in pairs)


def blocked_rule(call: Call) -> Rule:
    """Return a rule under which nothing can be partitioned."""
    loops = Loops()
    return loops.rule(
        [loops.dims(shape, FactorKind.BLOCKED) for shape in call.operands],
        [loops.dims(shape, FactorKind.BLOCKED) for shape in call.results],
    )


def elementwise(call: Call) -> Rule:
    """Return the rule of an operator that computes each element from the operands' elements at the same index.

    Operands may be broadcast.
    """
    loops = Loops()
    shape = call.results[0]
    place = loops.dims(shape)
    return loops.rule([broadcast(place, shape, operand) for operand in call.operands], [place] * len(call.results))


def batched(call: Call, count: int) -> Rule:
    """Return the rule of an operator that needs whole all dims but the first `count`, those of its batch.

    Tensors with another batch than the first operand's are needed whole.
    """
    loops = Loops()
    batch = call.operands[0][:count]
    lead = loops.dims(batch)

    def place(shape: Shape) -> Place:
        if shape[:count] != batch:
            return loops.dims(shape, FactorKind.BLOCKED)
        return (*lead, *loops.dims(shape[count:], FactorKind.BLOCKED))

    return loops.rule(list(map(place, call.operands)), list(map(place, call.results)))


def along(call: Call, dim: int) -> Rule:
    """Return the rule of an operator that needs one dim whole and maps over the others, such as a sort or a softmax.

    Operands and results may differ in size along that dim only.
    """
    loops = Loops()
    place = loops.dims(call.operands[0], blocked=(dim,))
    # Operands and results of equal size along the dim share its factor.
    known = {call.operands[0][dim]: place[dim]}

    def of(shape: Shape) -> Place:
        size = shape[dim]
        if size not in known:
            known[size] = loops.dim(size, FactorKind.BLOCKED)
        return replace_factors(place, {dim: known[size]})

    return loops.rule([of(shape) for shape in call.operands], [of(shape) for shape in call.results])


def rearrange_rule(call: Call, dims: Collection[int]) -> Rule:
    """Return the rule of an operator that rearranges some dims of one operand; further operands are scalars.

    Elements move along such a dim if it keeps its size. Otherwise the operator needs the whole dim.
    """
    loops = Loops()
    shape, *scalars = call.operands
    operand, result = [], []
    for dim, (size, new_size) in enumerate(zip(shape, call.results[0], strict=True)):
        if dim in dims and size != new_size:
            operand.append(loops.dim(size, FactorKind.BLOCKED))
            result.append(loops.dim(new_size, FactorKind.BLOCKED))
        else:
            # A dim that keeps its size has one factor on both sides, along which elements may move.
            factor = loops.dim(size, FactorKind.PERMUTATION if dim in dims else FactorKind.MAP)
            operand.append(factor)
            result.append(factor)
    return loops.rule([tuple(operand), *((),) * len(scalars)], [tuple(result)])


def slice_rule(call: Call) -> Rule:
    """Return the rule of a slice: dims that keep their size are maps."""
    sizes = zip(call.operands[0], call.results[0], strict=True)
    return rearrange_rule(call, [dim for dim, (size, new_size) in enumerate(sizes) if size != new_size])


def reshape_rule(before: Shape, after: Shape) -> Rule:
    """Return the rule of a reshape, under which a leading factor that both shapes share can be partitioned.

    Elements keep their order. Dims are walked from the slowest on both sides. The greatest common divisor of the two
    current dims is a factor of both. If it is 1, all dims up to the next position where both products agree are
    blocked.
    """
    loops = Loops()
    # An empty tensor has no elements whose order matters, and the walk below would not end.
    if math.prod(before) == 0:
        return loops.rule([((),) * len(before)], [((),) * len(after)])
    places: list[list[tuple[int, ...]]] = [[() for _ in before], [() for _ in after]]
    left = [list(before), list(after)]
    at = [0, 0]
    while True:
        for side in (0, 1):
            # Skip dims that are used up.
            while at[side] < len(left[side]) and left[side][at[side]] == 1:
                at[side] += 1
        if at[0] == len(before):
            break
        # The common divisor is the slowest remaining part of both dims.
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
    """Block dims on both sides from the current position until both sides have consumed equally many elements."""
    # Product of the dims that each side has consumed.
    done = [1, 1]
    while done[0] != done[1] or done[0] == 1:
        # The side that lags behind takes its next dim.
        side = 0 if done[0] <= done[1] else 1
        dim = at[side]
        done[side] *= left[side][dim]
        places[side][dim] += loops.dim(left[side][dim], FactorKind.BLOCKED)
        left[side][dim] = 1
        at[side] += 1
