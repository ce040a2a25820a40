"""Folding of views into the operators that read and write them.

A view (a reshape or a transpose without a copy) costs a device nothing, but it hides loops. Linear layers see batch and
sequence as one dim of rows; batched products see batch and heads as one dim. Once the view is part of an operator's
rule, these are separate factors again, and an axis can serve each of them.

If a factor of the rule and a factor of the view have no common divisor, as in a reshape of (4, 6) to (8, 3), the view
stays an operator.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from costmodels.sharding.dims import Factor, FactorKind, Place, Rule
from costmodels.sharding.frontends.flat_program import Kernel

T = TypeVar("T")

Pieces = list[tuple[int, int]]
"""Pieces of a factor: sizes, each with a number that it shares with a piece of the other rule."""


def fold_views(kernels: Sequence[Kernel], outputs: Collection[int], views: Collection[str]) -> list[Kernel]:
    """Return the operators with as many views removed as possible.

    Args:
        kernels: Operators in an order in which they can run.
        outputs: Values that the program must still compute.
        views: Names of primitives that are views, including those that repeat elements.
    """
    written = _fold_result_views(list(kernels), outputs, views)
    found: list[Kernel] = []
    view_of: dict[int, Kernel] = {}
    for kernel in written:
        for slot in range(len(kernel.step.operands)):
            view = view_of.get(kernel.step.operands[slot])
            if view is not None:
                kernel = _fold_operand_view(kernel, slot, view) or kernel  # noqa: PLW2901  # each operand refines the rule further
        if kernel.step.primitive in views:
            view_of[kernel.step.results[0]] = kernel
        found.append(kernel)
    # Drop views that nobody reads any more, from the last one, because each may be the only reader of another.
    wanted = Counter(operand for kernel in found for operand in kernel.step.operands)
    kept: list[Kernel] = []
    for kernel in reversed(found):
        is_view = kernel.step.primitive in views
        if is_view and not wanted[kernel.step.results[0]] and kernel.step.results[0] not in outputs:
            wanted.subtract(kernel.step.operands)
        else:
            kept.append(kernel)
    return kept[::-1]


def _fold_result_views(kernels: list[Kernel], outputs: Collection[int], views: Collection[str]) -> list[Kernel]:
    """Return operators that write the view of their result, if that view is the only reader and keeps all dims apart.

    Equal views are merged first.
    """
    kernels = _merge_equal_views(kernels, outputs, views)
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
                # Repeat, because the view's result may in turn be read by a single view.
                read_by = readers.get(result, [])
                if len(read_by) != 1 or result in outputs or kernels[read_by[0]].step.primitive not in views:
                    break
                changed = _fold_result_view(kernel, slot, kernels[read_by[0]])
                if changed is None:
                    break
                kernel = kernels[number] = changed
                gone.add(read_by[0])
    return [kernel for number, kernel in enumerate(kernels) if number not in gone]


def _merge_equal_views(kernels: list[Kernel], outputs: Collection[int], views: Collection[str]) -> list[Kernel]:
    """Keep only the first of equal views of one value; views of equal views are equal, too."""
    same: dict[int, int] = {}
    first: dict[tuple[int, Rule, tuple[int, ...]], int] = {}
    found = []
    for kernel in kernels:
        operands = tuple(same.get(operand, operand) for operand in kernel.step.operands)
        if kernel.step.primitive in views:
            (result,) = kernel.step.results
            # Two views are equal if their operands, rules and result shapes are equal.
            twin = first.setdefault((operands[0], kernel.rule, kernel.rule.result_shape(0)), result)
            if twin != result and result not in outputs:
                same[result] = twin
                continue
        found.append(replace(kernel, step=replace(kernel.step, operands=operands)))
    return found


def _fold_operand_view(kernel: Kernel, slot: int, view: Kernel) -> Kernel | None:
    """Return an operator that reads the operand of a view instead of its result; None if the factors do not fit."""
    behind = [view.rule.operands[at] for at in view.reads_via[0]]
    near, far = kernel.rule.operands[slot], view.rule.operands[0]
    rule = compose_rule(kernel.rule, near, view.rule, view.rule.results[0], far, also=behind)
    if rule is None:
        return None
    # Skip the view: read its operand, at the place that the composed rule gives.
    step = replace(kernel.step, operands=_put(kernel.step.operands, slot, view.step.operands[0]))
    operands = rule.refined.operands
    count = len(operands)
    return replace(
        kernel,
        step=step,
        rule=replace(rule.refined, operands=(*_put(operands, slot, rule.far), *rule.also, operands[slot])),
        reads=_put(kernel.reads, slot, (*view.reads[0], view, *kernel.reads[slot])),
        reads_via=_put(kernel.reads_via, slot, (*range(count, count + len(behind) + 1), *kernel.reads_via[slot])),
    )


def _fold_result_view(kernel: Kernel, slot: int, view: Kernel) -> Kernel | None:
    """Return an operator that writes the result of a view of its own result.

    Return None if the view repeats elements or merges dims, or if the factors do not fit.
    """
    # An operator cannot write repeated elements, and a merged dim would hide its factors from later readers.
    before, after = view.rule.operand_shape(0), view.rule.result_shape(0)
    if math.prod(before) != math.prod(after) or sum(size > 1 for size in before) > sum(size > 1 for size in after):
        return None
    rule = compose_rule(kernel.rule, kernel.rule.results[slot], view.rule, view.rule.operands[0], view.rule.results[0])
    if rule is None:
        return None
    step = replace(kernel.step, results=_put(kernel.step.results, slot, view.step.results[0]))
    results = rule.refined.results
    return replace(
        kernel,
        step=step,
        rule=replace(
            rule.refined, operands=(*rule.refined.operands, results[slot]), results=_put(results, slot, rule.far)
        ),
        writes=_put(kernel.writes, slot, (*kernel.writes[slot], view)),
        writes_via=_put(kernel.writes_via, slot, (*kernel.writes_via[slot], len(rule.refined.operands))),
    )


def _put(items: tuple[T, ...], slot: int, item: T) -> tuple[T, ...]:
    return (*items[:slot], item, *items[slot + 1 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """A rule with its factors split as a view requires.

    Attributes:
        refined: Rule on the same tensors, with split factors.
        far: Place of the split factors on the tensor at the other side of the view.
        also: Place of the split factors on further tensors of the view.
    """

    refined: Rule
    far: Place
    also: tuple[Place, ...] = ()


def compose_rule(
    rule: Rule, near: Place, view: Rule, meets: Place, far: Place, *, also: Sequence[Place] = ()
) -> Composed | None:
    """Return a rule seen through a view of one of its tensors; None if the factors of both have no common divisors.

    Args:
        rule: Rule of the operator.
        near: Place of the operator's factors on the tensor that both share.
        view: Rule of the view.
        meets: Place of the view's factors on the tensor that both share.
        far: Place of the view's factors on the tensor at its other side.
        also: Places of the view's factors on further tensors, all of which `meets` has.
    """
    own: dict[int, Pieces] = {}
    others: dict[int, Pieces] = {}
    count = 0
    for mine, its in zip(near, meets, strict=True):
        # Split both factor lists of the dim into pieces of common sizes, from the slowest factor on.
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
    # A piece that the view needs whole is blocked for the operator, too.
    blocked = {
        piece
        for factor, pieces in others.items()
        if view.factors[factor].kind == FactorKind.BLOCKED
        for _, piece in pieces
    }
    # Renumber the factors: each factor of the rule is replaced by its pieces.
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

    def through(place: Place) -> Place:
        return tuple(tuple(number_of[piece] for factor in dim for _, piece in others[factor]) for dim in place)

    return Composed(refined=refined, far=through(far), also=tuple(map(through, also)))
