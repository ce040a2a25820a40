"""Parts of a dim that the devices of a plan hold, for layouts in which every axis cuts by a digit of its own.

An index along a dim is a number with one digit for each axis that cuts the dim in some layout. An axis deals by its
digit whether or not others cut the dim too, so a slice moves nothing, and a gather needs the devices along its own axes
only (costmodels/sharding/layouts.py). costmodels/sharding/exports/layout_changes.py says where a digit lies.

Parts of one factor of an operator must hold the same indices in all its tensors. So the digits of an axis at all dims
that operators connect have the same `above`. Axes that cut a dim together need digits that do not overlap. While a
tensor is moved, axes of both of its layouts may cut a dim at once. Their digits do not overlap either, wherever the
size of the dim allows it; elsewhere another exchange is sent than the plan says. That takes plans that cut a short
dim by many axes, for example four heads by three pairs of axes at different operators.

Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from costmodels.sharding.exports.layout_changes import Placement, contiguous, held, overlap
from costmodels.sharding.exports.relayouts import relayouts
from costmodels.sharding.graph import Graph
from costmodels.sharding.layouts import Layout
from costmodels.sharding.plan import NONE, Plan
from hardware.arrays import IntArray

Cut = tuple[int, int, int]
"""A tensor, one of its dims, and an axis that cuts it."""

_MOST_TRIES = 20_000
"""Largest number of choices that the search for digits tries."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Digits:
    """Digits of the axes on all dims of a plan's tensors.

    Attributes:
        plan: Plan whose layouts they realise.
        above: Number of equal parts of the dim above the digit of each cut; cuts for which no digit serves all layouts
            are missing.
    """

    plan: Plan
    above: Mapping[Cut, int]

    def placement(self, tensor: int, layout: Layout) -> Placement:
        """Return a layout of a tensor with the digits of its axes.

        Axes without a digit for all layouts deal contiguous parts one after the other, in the order of the mesh.
        """
        found = contiguous(layout, self.plan.mesh.sizes)
        return tuple(
            (dim, self.above.get((tensor, dim, axis)) or above if dim >= 0 else 1)
            for axis, (dim, above) in enumerate(found)
        )

    def indices(self, tensor: int, dim: int, layout: Layout, place: Sequence[int]) -> IntArray:
        """Return the indices of a dim that a device holds, in increasing order.

        Args:
            tensor: Number of the tensor.
            dim: Dim of the tensor.
            layout: Layout of the tensor.
            place: Coordinates of the device in the mesh.
        """
        size, sizes = self.plan.graph.tensors[tensor].shape[dim], self.plan.mesh.sizes
        return held(self.placement(tensor, layout), size, dim, sizes, place)


def digits_of(plan: Plan) -> Digits:
    """Return the digits of a plan."""
    groups = _Groups(plan)
    above: dict[Cut, int] = {}
    for component in groups.components():
        # Axes of both layouts of a move can be told apart where the dim is long enough, and else those of one layout.
        found = groups.assign(component, groups.together | groups.passing) or groups.assign(component, groups.together)
        above |= found or {}
    return Digits(plan=plan, above={cut: above[group] for cut, group in groups.group_of.items() if group in above})


class _Groups:
    """Cuts of a plan in groups that must have one digit, and pairs of groups whose digits must not overlap.

    Attributes:
        group_of: Representative of the group of each cut.
        limit: Number of parts into which every dim of a group can be cut, by representative.
        together: Pairs of groups that cut one dim in one layout.
        passing: Pairs of groups that may cut one dim while a tensor is moved.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        graph, sizes = plan.graph, plan.mesh.sizes
        self._first: dict[Cut, Cut] = {}
        combinations: set[tuple[int, int, tuple[int, ...]]] = set()
        limits: dict[Cut, int] = defaultdict(int)
        for number, op in enumerate(graph.ops):
            layouts = [(tensor, plan.wanted(number, slot)) for slot, tensor in enumerate(op.operands)]
            layouts += [(tensor, plan.written(number, slot)) for slot, tensor in enumerate(op.results)]
            layouts += [(tensor, plan.layout(tensor)) for tensor in op.results]
            combinations |= {each for tensor, layout in layouts for each in _combinations(graph, tensor, layout)}
            for axis, factor in enumerate(plan.served[number].tolist()):
                if factor == NONE:
                    continue
                cuts = [(tensor, dim, axis) for tensor, dim in _dims_with(graph, number, factor)]
                for cut in cuts:
                    self._join(cuts[0], cut)
                    # a factor that shares its dim with others is shorter than the dim
                    limits[cut] = math.gcd(limits[cut], op.rule.factors[factor].size)
        for tensor, dim, axes in combinations:
            for axis in axes:
                cut = (tensor, dim, axis)
                self._first.setdefault(cut, cut)
                limits[cut] = math.gcd(limits[cut], graph.tensors[tensor].shape[dim])
        self.group_of = {cut: self._root(cut) for cut in self._first}
        self.limit: dict[Cut, int] = defaultdict(int)
        for cut, limit in limits.items():
            self.limit[self.group_of[cut]] = math.gcd(self.limit[self.group_of[cut]], limit)
        self._sizes = sizes
        self.together = self._pairs(combinations)
        self.passing = self._pairs(
            (
                each.tensor,
                dim,
                tuple(axis for axis in range(len(sizes)) if dim in (each.before[axis], each.after[axis])),
            )
            for each in relayouts(plan)
            for dim in range(len(graph.tensors[each.tensor].shape))
        )

    def components(self) -> list[list[Cut]]:
        """Return the groups in lists that no pair connects, each in an order that begins at the first axis."""
        beside = _neighbours(self.together | self.passing)
        found, seen = [], set()
        for group in sorted(set(self.group_of.values()), key=lambda cut: (cut[2], cut)):
            if group in seen:
                continue
            component, queue = [], [group]
            seen.add(group)
            while queue:
                one = queue.pop(0)
                component.append(one)
                queue += (fresh := [other for other in sorted(beside[one]) if other not in seen])
                seen.update(fresh)
            found.append(sorted(component, key=lambda cut: cut[2]))
        return found

    def assign(self, component: list[Cut], pairs: set[tuple[Cut, Cut]]) -> dict[Cut, int] | None:
        """Return the number of parts above each group's digit, by depth-first search; None if nothing was found."""
        beside = _neighbours(pairs)
        found: dict[Cut, int] = {}
        choices: list[list[int]] = []
        for _ in range(_MOST_TRIES):
            if len(found) == len(component):
                return found
            if len(choices) == len(found):
                group = component[len(found)]
                size = self._sizes[group[2]]
                taken = [(found[other], self._sizes[other[2]]) for other in beside[group] if other in found]
                parts = self.limit[group] // size
                free = [
                    above
                    for above in range(1, parts + 1)
                    if parts % above == 0 and not any(overlap((above, size), span) for span in taken)
                ]
                choices.append(free[::-1])
            while choices and not choices[-1]:
                choices.pop()
                if choices:
                    del found[component[len(choices) - 1]]
            if not choices:
                return None
            found[component[len(choices) - 1]] = choices[-1].pop()
        return None

    def _pairs(self, combinations: Iterable[tuple[int, int, tuple[int, ...]]]) -> set[tuple[Cut, Cut]]:
        found = set()
        for tensor, dim, axes in set(combinations):
            for one, other in itertools.combinations(axes, 2):
                found.add((self.group_of[tensor, dim, one], self.group_of[tensor, dim, other]))
        return found

    def _root(self, cut: Cut) -> Cut:
        while self._first.setdefault(cut, cut) != cut:
            self._first[cut] = self._first[self._first[cut]]
            cut = self._first[cut]
        return cut

    def _join(self, one: Cut, other: Cut) -> None:
        self._first[self._root(other)] = self._root(one)


def _combinations(graph: Graph, tensor: int, layout: Layout) -> Iterable[tuple[int, int, tuple[int, ...]]]:
    """Return the axes on each dim of a layout that any axis cuts."""
    for dim in range(len(graph.tensors[tensor].shape)):
        axes = tuple(axis for axis, cut in enumerate(layout) if cut == dim)
        if axes:
            yield tensor, dim, axes


def _dims_with(graph: Graph, number: int, factor: int) -> Iterable[tuple[int, int]]:
    """Return the tensors and dims of an operator that carry a factor."""
    op = graph.ops[number]
    sides = ((op.operands, op.rule.operand_dims), (op.results, op.rule.result_dims))
    for tensors, dims in sides:
        for tensor, own in zip(tensors, dims, strict=True):
            dim = own[factor]
            if dim is not None:
                yield tensor, dim


def _neighbours(pairs: Iterable[tuple[Cut, Cut]]) -> Mapping[Cut, set[Cut]]:
    found: dict[Cut, set[Cut]] = defaultdict(set)
    for one, other in pairs:
        found[one].add(other)
        found[other].add(one)
    return found
