"""Actions of TOAST's search: cut a group of colours by an axis, with its conflicts resolved (TOAST, 4.2 to 4.4).

An action is a group of colours, a bit for each group of its compatibility sets, and an axis. It serves the factors of
these colours in all operators where the axis is still free and the factor is divisible. A state is the row of every
class of operators and nothing else. All orders of actions that end in the same plan therefore meet in one state. The
order in which colours compete for one axis does matter: batch before model dim shards weights as FSDP does, and gathers
them where the batch is cut.

A class holds all operators with the same rule whose factors have the same groups of colours, and the same choice where
these are in conflict. They are served alike in every state. Operators that compute from constants alone follow their
readers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.dims import Rule
from costmodels.sharding.plan import NONE, Plan
from tuner.planners.sharding.class_costs import BASE, decode_rows, encode_rows, rows_served
from tuner.planners.sharding.pins import Pinned
from tuner.planners.toast.compatibility import Compatibility
from tuner.planners.toast.named_dims import WHOLE

MANY_COLOURS = 100
"""Number of colours from which the paper's threshold LEAST_DIMS applies."""

LEAST_DIMS = 10
"""Fewest names that an action must cut in a large graph, as in the paper: cutting fewer makes no difference."""

MOST_SETS = 4
"""Most groups of compatibility sets of one colour that are resolved independently.

These are the groups with the most conflicts. The others are resolved as the first of them.
"""

State = bytes
"""Encoded rows of all classes [k], as numbers of `class_costs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One action of the search.

    Attributes:
        group: Group of colours that is cut.
        resolution: Side that is kept in each of the group's sets, one bit per set, the first set lowest.
        axis: Mesh axis that cuts the colours.
    """

    group: int
    resolution: int
    axis: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Effect:
    """Factors that an action serves, one in each class that it changes.

    Attributes:
        classes: Numbers of these classes.
        factors: Factor that is served in each class.
        sizes: Size of each of these factors.
    """

    classes: Any
    factors: Any
    sizes: Any


class ColourActions:
    """Actions on a graph and a mesh, and the states that they lead to.

    Attributes:
        found: Named dims of the graph that are decided together.
        mesh: Mesh that the graph is planned on.
        pins: Pins of the user, or None; operators in one class are matched alike by all pins.
        classes: Class of each operator [o].
        actions: All actions.
        first: State in which no axis serves anything but hard pins.
        sets_of: Groups of compatibility sets of each group of colours, in the order of the bits.
    """

    def __init__(
        self, found: Compatibility, mesh: DeviceMesh, *, least_dims: int | None = None, pins: Pinned | None = None
    ) -> None:
        """Find classes and actions.

        Args:
            found: Named dims of the graph that are decided together.
            mesh: Mesh that the graph is planned on.
            least_dims: Fewest names that an action must cut; None for LEAST_DIMS in a graph of MANY_COLOURS, else 0.
            pins: Pins of the user, on levels of this mesh; the first state serves all hard ones.
        """
        self.found, self.mesh, self.pins = found, mesh, pins
        self._classes = _Classes(found, {} if pins is None else _marks(pins, len(mesh.sizes)))
        self.classes = self._classes.of_ops
        self.sets_of = self._sets_of()
        if least_dims is None:
            least_dims = LEAST_DIMS if found.names.num_colours >= MANY_COLOURS else 0
        self._effects: dict[tuple[int, int], _Effect] = {}
        self.actions = tuple(self._enumerate(least_dims))
        self.first: State = np.array(self._classes.pinned, dtype=np.int64).tobytes()

    def after(self, state: State, action: Action) -> State:
        """Return the state that an action leads to; the same one where it changes nothing."""
        effect = self._effect(action.group, action.resolution)
        # An axis is free in a class where its digit is 0. The factor must be divisible by all axes that would then
        # serve it.
        codes = np.frombuffer(state, dtype=np.int64)
        own = codes[effect.classes]
        sizes, unit = self.mesh.sizes, BASE**action.axis
        ways = np.full(len(own), sizes[action.axis], dtype=np.int64)
        for axis, size in enumerate(sizes):
            if axis != action.axis:
                ways[own // BASE**axis % BASE == effect.factors + 1] *= size
        able = (own // unit % BASE == 0) & (effect.sizes % ways == 0)
        if not able.any():
            return state
        changed = codes.copy()
        changed[effect.classes[able]] = own[able] + unit * (effect.factors[able] + 1)
        return changed.tobytes()

    def codes(self, state: State) -> list[int]:
        """Return the encoded rows of all classes, including those that follow others."""
        found: list[int] = np.frombuffer(state, dtype=np.int64).tolist()
        self._classes.follow(found, self.mesh.sizes)
        return found

    def plan(self, state: State) -> Plan:
        """Return the plan of a state."""
        served = rows_served(self.codes(state), self.classes, len(self.mesh.sizes))
        return Plan(graph=self.found.names.graph, mesh=self.mesh, served=served)

    def in_words(self, action: Action) -> str:
        """Describe an action by a dim that it cuts, the resolutions, and the axis."""
        name = group_name(self.found, action.group)
        bits = "".join(str(action.resolution >> bit & 1) for bit in range(len(self.sets_of[action.group])))
        return f"{name}{f' [{bits}]' if bits else ''} by {self.mesh.names[action.axis]}"

    def _enumerate(self, least_dims: int) -> list[Action]:
        """Enumerate the actions: every group of enough names, by every axis that can cut it, with every resolution."""
        names = self.found.names
        own = (names.followed < 0) & (names.factors != WHOLE)
        # Names that follow others, and dims that must be whole, do not make an action more useful.
        counts = np.bincount(self.found.colour_groups[names.colours[own]], minlength=self.found.num_groups)
        found = []
        for group in range(self.found.num_groups):
            if counts[group] < least_dims:
                continue
            for axis, size in enumerate(self.mesh.sizes):
                if size == 1 or not (self._effect(group, 0).sizes % size == 0).any():
                    continue
                found += [
                    Action(group=group, resolution=resolution, axis=axis)
                    for resolution in range(2 ** len(self.sets_of[group]))
                ]
        return found

    def _sets_of(self) -> tuple[tuple[int, ...], ...]:
        """Choose the sets of each group of colours that get a bit of their own: those with the most conflicts."""
        sizes: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for each in self.found.sets:
            sizes[int(self.found.colour_groups[each.colour])][each.group] += len(each.sides)
        found = []
        for group in range(self.found.num_groups):
            # Each set group doubles the number of actions, so that only the largest get a bit.
            largest = sorted(sizes[group], key=lambda one, group=group: (-sizes[group][one], one))  # type: ignore[misc] # mypy sees no default
            found.append(tuple(sorted(largest[:MOST_SETS])))
        return tuple(found)

    def _effect(self, group: int, resolution: int) -> _Effect:
        """Return the effect of an action on an unspecified axis."""
        if (group, resolution) not in self._effects:
            bits = {each: resolution >> bit & 1 for bit, each in enumerate(self.sets_of[group])}
            self._effects[group, resolution] = self._classes.effect(group, bits)
        return self._effects[group, resolution]


def group_name(found: Compatibility, group: int) -> str:
    """Name a group of colours by a dim of its first operator."""
    names = found.names
    name = int(names.names_of(int(found.colours_of(group)[0]))[0])
    op = names.graph.ops[int(names.ops[name])]
    factor = op.rule.factors[int(names.factors[name])]
    if factor.name:
        return f"{factor.name} of {op.name}"
    dims = [dim for dim in (*op.rule.result_dims, *op.rule.operand_dims) if dim[int(names.factors[name])] is not None]
    return f"dim {dims[0][int(names.factors[name])]} of {op.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """Pins of an operator.

    Attributes:
        row: Factor that each axis serves by hard pins, or NONE.
        factors: Number of each pin that matches the operator, hard or soft, and the factor that it means.
    """

    row: tuple[int, ...]
    factors: tuple[tuple[int, int], ...]


def _marks(pins: Pinned, num_axes: int) -> dict[int, _Mark]:
    found = {}
    for op in dict.fromkeys(op for factors in pins.factors for op in factors):
        row = [NONE] * num_axes
        for number, level in enumerate(pins.levels):
            if (op, number) in pins.served:
                row[level.axis] = pins.served[op, number]
        own = tuple((number, factors[op]) for number, factors in enumerate(pins.factors) if op in factors)
        found[op] = _Mark(row=tuple(row), factors=own)
    return found


class _Classes:
    """Classes of a graph's operators.

    Attributes:
        of_ops: Class of each operator [o].
        pinned: Encoded row that hard pins want of each class; 0 where they want none [k].
        count: Number of classes.
    """

    def __init__(self, found: Compatibility, marks: Mapping[int, _Mark]) -> None:
        """Group operators into classes, from the last operator to the first."""
        names = found.names
        self.pinned: list[int] = []
        self.of_ops: list[int] = [0] * len(names.graph.ops)
        sides: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        factors, ops = names.factors.tolist(), names.ops.tolist()
        for each in found.sets:
            for one, other in each.sides:
                sides[ops[one]].append((each.group, factors[one], factors[other]))
        # A class is described by the kind of its operators, the groups of their factors, their conflicts and pins.
        groups = found.colour_groups[names.colours].tolist() if len(ops) else []
        begins, followed = names.begins.tolist(), names.followed.tolist()
        known: dict[Hashable, int] = {}
        self._rules: list[Rule] = []
        self._members: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._sides: list[list[tuple[int, int, int]]] = []
        self._followers: list[tuple[int, tuple[tuple[int, int, int], ...]]] = []
        for number in reversed(range(len(names.graph.ops))):
            rule = names.graph.ops[number].rule
            own = range(begins[number], begins[number] + len(rule.cuttable))
            mark = marks.get(number)
            # Readers come before makers in this order, so that a follower finds the classes of the operators that it
            # follows.
            is_following = number in names.constants and mark is None
            if is_following:
                leaders = tuple(
                    (factors[name], self.of_ops[ops[followed[name]]], factors[followed[name]])
                    for name in own
                    if followed[name] >= 0
                )
                key: Hashable = (found.kinds[number], "follows", leaders)
            else:
                leaders = ()
                key = (
                    found.kinds[number],
                    tuple(groups[begins[number] : begins[number] + len(rule.cuttable)]),
                    tuple(sorted(sides[number])),
                    mark,
                )
            if key not in known:
                known[key] = len(known)
                self._rules.append(rule)
                self._sides.append(sorted(sides[number]))
                self.pinned.append(0 if mark is None else encode_rows(mark.row))
                if leaders:
                    self._followers.append((known[key], leaders))
                elif not is_following:
                    for name in own:
                        self._members[groups[name]].append((known[key], factors[name]))
            self.of_ops[number] = known[key]
        self.count = len(known)

    def effect(self, group: int, bits: dict[int, int]) -> _Effect:
        """Return the factors that a group of colours serves, with its sets resolved by `bits`."""
        by_class: dict[int, list[int]] = defaultdict(list)
        for own, factor in self._members[group]:
            by_class[own].append(factor)
        # An axis serves at most one factor of a class; the resolution chooses among several of one colour.
        chosen = {own: self._kept(own, factors, bits) for own, factors in by_class.items()}
        sizes = [self._rules[own].factors[factor].size for own, factor in chosen.items()]
        return _Effect(
            classes=np.array(list(chosen), dtype=np.int64),
            factors=np.array(list(chosen.values()), dtype=np.int64),
            sizes=np.array(sizes, dtype=np.int64),
        )

    def follow(self, codes: list[int], sizes: Sequence[int]) -> None:
        """Fill in the rows of classes that follow others, which stand before them in `codes`."""
        for own, leaders in self._followers:
            if not any(codes[leader] for _, leader, _ in leaders):
                continue
            # A follower takes the factors that its leaders serve, the first leader first, where they divide.
            row = [NONE] * len(sizes)
            for factor, leader, its_factor in leaders:
                for axis, served in enumerate(decode_rows(codes[leader], len(sizes))):
                    if served != its_factor or row[axis] != NONE:
                        continue
                    ways = math.prod(size for other, size in enumerate(sizes) if other == axis or row[other] == factor)
                    if self._rules[own].factors[factor].size % ways == 0:
                        row[axis] = factor
            codes[own] = encode_rows(row)

    def _kept(self, own: int, factors: Sequence[int], bits: dict[int, int]) -> int:
        """Return the factor that wins most of its conflicts; of several the first."""
        if len(factors) == 1:
            return factors[0]
        first = next(iter(bits.values()), 0)
        won = dict.fromkeys(factors, 0)
        for group, one, other in self._sides[own]:
            if one in won and other in won:
                # The side that the resolution keeps wins the conflict.
                won[other if bits.get(group, first) else one] += 1
        return max(factors, key=lambda factor: (won[factor], -factor))
