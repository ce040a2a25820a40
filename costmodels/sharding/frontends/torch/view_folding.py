"""Views folded into the operators that read and write them, so that no rule sees tensors otherwise than they lie.

A view, a reshape or a transpose without a copy, costs a device nothing, and hides loops: linear layers see batch and
sequence as one dim of rows, batched products see batch and heads as one. As part of an operator's rule these are
factors of their own again, each of which an axis can serve.

Where a rule's factor and a view's have no common parts, as those of a reshape of (4, 6) to (8, 3), the view stays an
operator.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from costmodels.sharding.dims import Factor, FactorKind, Place, Rule
from costmodels.sharding.frontends.flat_program import Kernel

Pieces = list[tuple[int, int]]
"""Into what a factor is split: sizes, each with a number that it shares with a piece of the other rule."""


def folded(kernels: Sequence[Kernel], outputs: Collection[int], views: Collection[str]) -> list[Kernel]:
    """The same operators with as few views between them as can be.

    Args:
        kernels: In an order in which they can run.
        outputs: Values that must be there in the end.
        views: Primitives that are views; of those that repeat elements the result is larger than the operand.
    """
    written = _written_as_read(list(kernels), outputs, views)
    found: list[Kernel] = []
    view_of: dict[int, Kernel] = {}
    for kernel in written:
        for slot in range(len(kernel.step.operands)):
            view = view_of.get(kernel.step.operands[slot])
            if view is not None:
                kernel = _read_through(kernel, slot, view) or kernel  # noqa: PLW2901  # grows operand by operand
        if kernel.step.primitive in views:
            view_of[kernel.step.results[0]] = kernel
        found.append(kernel)
    wanted = Counter(operand for kernel in found for operand in kernel.step.operands)
    kept: list[Kernel] = []
    for kernel in reversed(found):
        is_view = kernel.step.primitive in views
        if is_view and not wanted[kernel.step.results[0]] and kernel.step.results[0] not in outputs:
            wanted.subtract(kernel.step.operands)
        else:
            kept.append(kernel)
    return kept[::-1]


def _written_as_read(kernels: list[Kernel], outputs: Collection[int], views: Collection[str]) -> list[Kernel]:
    """Operators whose result is read as one view alone write it so, if that has as many dims; twins are one view."""
    kernels = _without_twins(kernels, outputs, views)
    readers: dict[int, list[int]] = {}
    for number, kernel in enumerate(kernels):
        for operand in kernel.step.operands:
            readers.setdefault(operand, []).append(number)
    gone: set[int] = set()
    for number in range(len(kernels)):
        kernel = kernels[number]
        if number in gone or kernel.step.primitive in views:
            continue
        for slot in range(len(kernel.step.results)):
            while True:
                result = kernel.step.results[slot]
                read_by = readers.get(result, [])
                if len(read_by) != 1 or result in outputs or kernels[read_by[0]].step.primitive not in views:
                    break
                changed = _written_through(kernel, slot, kernels[read_by[0]])
                if changed is None:
                    break
                kernel = kernels[number] = changed
                gone.add(read_by[0])
    return [kernel for number, kernel in enumerate(kernels) if number not in gone]


def _without_twins(kernels: list[Kernel], outputs: Collection[int], views: Collection[str]) -> list[Kernel]:
    """Of equal views of one value the first alone; a view of a view is equal if both are."""
    same: dict[int, int] = {}
    first: dict[tuple[int, Rule, tuple[int, ...]], int] = {}
    found = []
    for kernel in kernels:
        operands = tuple(same.get(operand, operand) for operand in kernel.step.operands)
        if kernel.step.primitive in views:
            (result,) = kernel.step.results
            twin = first.setdefault((operands[0], kernel.rule, kernel.rule.result_shape(0)), result)
            if twin != result and result not in outputs:
                same[result] = twin
                continue
        found.append(replace(kernel, step=replace(kernel.step, operands=operands)))
    return found


def _read_through(kernel: Kernel, slot: int, view: Kernel) -> Kernel | None:
    """An operator that reads what a view reads instead of what it writes."""
    rule = composed(kernel.rule, kernel.rule.operands[slot], view.rule, view.rule.results[0], view.rule.operands[0])
    if rule is None:
        return None
    operands = list(kernel.step.operands)
    operands[slot] = view.step.operands[0]
    places = list(rule.refined.operands)
    places[slot] = rule.far
    return replace(
        kernel, step=replace(kernel.step, operands=tuple(operands)), rule=replace(rule.refined, operands=tuple(places))
    )


def _written_through(kernel: Kernel, slot: int, view: Kernel) -> Kernel | None:
    """An operator that writes what a view makes of its result; None where that repeats elements or merges dims."""
    before, after = view.rule.operand_shape(0), view.rule.result_shape(0)
    if math.prod(before) != math.prod(after) or sum(size > 1 for size in before) > sum(size > 1 for size in after):
        return None
    rule = composed(kernel.rule, kernel.rule.results[slot], view.rule, view.rule.operands[0], view.rule.results[0])
    if rule is None:
        return None
    results = list(kernel.step.results)
    results[slot] = view.step.results[0]
    places = list(rule.refined.results)
    places[slot] = rule.far
    return replace(
        kernel, step=replace(kernel.step, results=tuple(results)), rule=replace(rule.refined, results=tuple(places))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """A rule whose factors are split as a view needs them.

    Attributes:
        refined: The rule, of the same tensors.
        far: Where its factors lie on the tensor at the other side of the view.
    """

    refined: Rule
    far: Place


def composed(rule: Rule, near: Place, view: Rule, meets: Place, far: Place) -> Composed | None:
    """A rule seen through a view of one of its tensors; None where factors of both have no common parts.

    Args:
        rule: Of an operator.
        near: Where its factors lie on the tensor.
        view: Of the view.
        meets: Where the view's factors lie on the same tensor.
        far: Where these lie on the tensor at the other side of the view.
    """
    own: dict[int, Pieces] = {}
    others: dict[int, Pieces] = {}
    count = 0
    for mine, its in zip(near, meets, strict=True):
        left = [(factor, rule.factors[factor].size) for factor in mine]
        right = [(factor, view.factors[factor].size) for factor in its]
        while left and right:
            common = math.gcd(left[0][1], right[0][1])
            if common == 1:
                return None
            for side, pieces in ((left, own), (right, others)):
                factor, size = side[0]
                pieces.setdefault(factor, []).append((common, count))
                side[0] = (factor, size // common)
                if size == common:
                    del side[0]
            count += 1
        if left or right:
            return None
    if any(factor not in others for dim in far for factor in dim):
        return None
    blocked = {
        piece
        for factor, pieces in others.items()
        if view.factors[factor].kind == FactorKind.BLOCKED
        for _, piece in pieces
    }
    factors: list[Factor] = []
    new: dict[int, tuple[int, ...]] = {}
    number_of: dict[int, int] = {}
    for number, loop in enumerate(rule.factors):
        parts = own.get(number, [(loop.size, -1)])
        new[number] = tuple(range(len(factors), len(factors) + len(parts)))
        for size, piece in parts:
            number_of[piece] = len(factors)
            kind = FactorKind.BLOCKED if piece in blocked else loop.kind
            factors.append(replace(loop, size=size, kind=kind))

    def split(place: Place) -> Place:
        return tuple(tuple(one for factor in dim for one in new[factor]) for dim in place)

    refined = Rule(
        factors=tuple(factors), operands=tuple(map(split, rule.operands)), results=tuple(map(split, rule.results))
    )
    seen = tuple(tuple(number_of[piece] for factor in dim for _, piece in others[factor]) for dim in far)
    return Composed(refined=refined, far=seen)
