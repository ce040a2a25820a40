"""Which conflicts are resolved alike, and which colours are cut alike (TOAST, sections 3.5, 3.6 and 4.4).

A conflict where a tensor is written and one where it is read form a box if M leads from the one pair of names to the
other. Resolved alike, nothing moves between them; so they are compatible, unless another path through the dimension
graph leads across the box, from one side of it to the other. Compatible conflicts form a set, which is resolved in one
of two ways. Sets of repeated layers have the same shape, and share their resolution.

What the forward pass keeps for the backward pass does not tie the sets of both together, as the paper has a set for
each direction: it may be moved once in between. All who read in the backward pass what one set has kept are tied to
each other, as if it were written at the turn.

Colours of repeated layers form a group, and are cut together: those of parameters that are used alike, and those of
names of which as many stand in as many equal operators. Two colours that meet in one operator stay apart, though: of
the products of a perceptron every second one is cut along its rows, and those between along their columns.

Sources: TOAST (Alabed et al. 2025), sections 3.5, 3.6 and 4.4.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.sharding.dims import Rule
from costmodels.sharding.graph import STATE, Graph
from hardware.arrays import IntArray
from tuner.planners.toast.named_dims import WHOLE, Conflict, NamedDims

BACKWARD = "grad."
"""What the names of a backward pass begin with, where a graph does not say where it begins."""

ROUNDS = 3
"""How far the neighbours of a conflict tell it from others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Two conflicts that a tensor connects.

    Attributes:
        written: Where it is written.
        read: Where it is read.
        is_kept: Whether it is written in the forward pass and read in the backward pass.
        is_crossed: Whether the first name of one leads to the second name of the other.
        is_compatible: Whether no other path leads across.
    """

    written: Conflict
    read: Conflict
    is_kept: bool
    is_crossed: bool
    is_compatible: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CompatibilitySet:
    """Conflicts that are resolved alike.

    Attributes:
        colour: Of all their names.
        sides: Of each conflict the name that the first resolution keeps, and that of the second.
        group: Sets of repeated layers have the same.
    """

    colour: int
    sides: tuple[Conflict, ...]
    group: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Compatibility:
    """What of a graph is decided together.

    Attributes:
        names: The analysis.
        boxes: Pairs of conflicts.
        sets: The compatibility sets.
        num_set_groups: How many resolutions there are to choose.
        colour_groups: Of each colour its group; -1 of one that no operator can be cut by.
        num_groups: How many groups of colours there are.
        kinds: Of each operator its kind: those of one kind have the same primitive and rule.
    """

    names: NamedDims
    boxes: tuple[Box, ...]
    sets: tuple[CompatibilitySet, ...]
    num_set_groups: int
    colour_groups: IntArray
    num_groups: int
    kinds: tuple[int, ...]

    @property
    def num_resolutions(self) -> int:
        """In how many ways all conflicts can be resolved together."""
        return int(2**self.num_set_groups)

    def colours_of(self, group: int) -> IntArray:
        """The colours of a group."""
        return np.flatnonzero(self.colour_groups == group)


def compatibility(names: NamedDims) -> Compatibility:
    """What is decided together, by the analysis of a graph."""
    kinds = _kinds(names.graph)
    boxes = _boxes(names)
    sets = _with_groups(names, _sets(names.conflicts, boxes), boxes, kinds)
    groups, count = _colour_groups(names, kinds)
    return Compatibility(
        names=names,
        boxes=boxes,
        sets=sets,
        num_set_groups=len({each.group for each in sets}),
        colour_groups=groups,
        num_groups=count,
        kinds=kinds,
    )


def turn_of(graph: Graph) -> int | None:
    """The number of the first operator of the backward pass; None where there is none, or nobody says."""
    if graph.first_backward is not None:
        return graph.first_backward
    return next((number for number, op in enumerate(graph.ops) if op.name.startswith(BACKWARD)), None)


def _kinds(graph: Graph) -> tuple[int, ...]:
    """Numbers of what operators compute; factors that are called otherwise are no difference."""
    shapes: dict[int, Hashable] = {}
    known: dict[Hashable, int] = {}
    found = []
    for op in graph.ops:
        if id(op.rule) not in shapes:
            shapes[id(op.rule)] = _shape(op.rule)
        found.append(known.setdefault((op.primitive, shapes[id(op.rule)]), len(known)))
    return tuple(found)


def _shape(rule: Rule) -> Hashable:
    return tuple((factor.size, factor.kind) for factor in rule.factors), rule.operands, rule.results


def _boxes(names: NamedDims) -> tuple[Box, ...]:
    """All pairs of conflicts that a tensor connects inside one step."""
    graph, turn = names.graph, turn_of(names.graph)
    conflicts = set(names.conflicts)
    in_conflict = {name for pair in conflicts for name in pair}
    ops = names.ops.tolist()
    entries: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for source, target, tensor in zip(
        names.sources.tolist(), names.targets.tolist(), names.tensors.tolist(), strict=True
    ):
        maker, reader = ops[source], ops[target]
        if source in in_conflict and target in in_conflict and graph.ops[reader].primitive != STATE:
            entries[maker, reader, tensor].append((source, target))
    pairs: dict[tuple[Conflict, Conflict], bool] = {}
    for several in entries.values():
        for number, (one, to_one) in enumerate(several):
            for other, to_other in several[:number]:
                written, read = _ordered(one, other), _ordered(to_one, to_other)
                if written in conflicts and read in conflicts:
                    pairs[written, read] = (one < other) != (to_one < to_other)
    reached = _reached(names, {name for written, _ in pairs for name in written})
    found = []
    for (written, read), is_crossed in pairs.items():
        first, second = read[::-1] if is_crossed else read
        across = reached[second] >> written[0] | reached[first] >> written[1]
        found.append(
            Box(
                written=written,
                read=read,
                is_kept=turn is not None and ops[written[0]] < turn <= ops[read[0]],
                is_crossed=is_crossed,
                is_compatible=not across & 1,
            )
        )
    return tuple(found)


def _ordered(one: int, other: int) -> Conflict:
    return (one, other) if one < other else (other, one)


def _reached(names: NamedDims, sources: set[int]) -> list[int]:
    """Of each name the sources that lead to it inside one step, as a number with a bit for each."""
    graph = names.graph
    found = [0] * len(names.ops)
    for name in sources:
        found[name] = 1 << name
    is_state = np.array([op.primitive == STATE for op in graph.ops], dtype=bool)
    inside = np.flatnonzero(~is_state[names.ops[names.targets]])
    inside = inside[np.argsort(names.sources[inside], kind="stable")]  # by the order of the operators
    for source, target in zip(names.sources[inside].tolist(), names.targets[inside].tolist(), strict=True):
        if found[source]:
            found[target] |= found[source]
    return found


def _sets(conflicts: Sequence[Conflict], boxes: Sequence[Box]) -> list[list[Conflict]]:
    """Compatible conflicts together, each with its sides as all of the set are turned."""
    parent: dict[Conflict, Conflict] = {pair: pair for pair in conflicts}
    is_turned: dict[Conflict, bool] = dict.fromkeys(conflicts, False)

    def root(pair: Conflict) -> tuple[Conflict, bool]:
        path = []
        while parent[pair] != pair:
            path.append(pair)
            pair = parent[pair]
        turned = False
        for each in reversed(path):
            turned ^= is_turned[each]
            parent[each], is_turned[each] = pair, turned
        return pair, turned

    def tie(one: Conflict, other: Conflict, *, is_crossed: bool) -> None:
        (one, one_turned), (other, other_turned) = root(one), root(other)
        if one != other:  # else it is known how they stand to each other
            parent[other] = one
            is_turned[other] = one_turned ^ other_turned ^ is_crossed

    compatible = [box for box in boxes if box.is_compatible]
    for box in compatible:
        if not box.is_kept:
            tie(box.written, box.read, is_crossed=box.is_crossed)
    written = [(box, *root(box.written)) for box in compatible if box.is_kept]
    for box, top, turned in written:
        again = (~top[0], ~top[1])  # the forward set as it is read again; no operator has these names
        parent.setdefault(again, again)
        is_turned.setdefault(again, False)
        tie(again, box.read, is_crossed=turned ^ box.is_crossed)
    together: dict[Conflict, list[Conflict]] = defaultdict(list)
    for pair in conflicts:
        top, turned = root(pair)
        together[top].append(pair[::-1] if turned else pair)
    return list(together.values())


def _with_groups(
    names: NamedDims, sets: Sequence[Sequence[Conflict]], boxes: Sequence[Box], kinds: Sequence[int]
) -> tuple[CompatibilitySet, ...]:
    """Sets of one shape have one group, and are turned alike."""
    labels = _labels(names, boxes, kinds)
    known: dict[Hashable, int] = {}
    found = []
    for sides in sets:
        turned = [pair[::-1] for pair in sides]
        first, second = (_side_key(names, labels, each) for each in (sides, turned))
        if second < first:
            sides, first = turned, second  # noqa: PLW2901 # the set the other way round
        colour = int(names.colours[sides[0][0]])
        group = known.setdefault(tuple(first), len(known))
        found.append(CompatibilitySet(colour=colour, sides=tuple(sides), group=group))
    return tuple(found)


def _side_key(names: NamedDims, labels: Mapping[Conflict, int], sides: Sequence[Conflict]) -> list[tuple[int, int]]:
    return sorted((labels[_ordered(*pair)], int(names.factors[pair[0]])) for pair in sides)


def _labels(names: NamedDims, boxes: Sequence[Box], kinds: Sequence[int]) -> dict[Conflict, int]:
    """Numbers of conflicts by their operators and those near them; equal where these are (Weisfeiler and Leman)."""
    turn = turn_of(names.graph)
    near: dict[Conflict, list[tuple[Conflict, bool, bool]]] = defaultdict(list)
    for box in boxes:
        if box.is_compatible:
            near[box.written].append((box.read, True, box.is_crossed))
            near[box.read].append((box.written, False, box.is_crossed))
    keys: dict[Conflict, Hashable] = {}
    for pair in names.conflicts:
        op = int(names.ops[pair[0]])
        is_backward = turn is not None and op >= turn
        keys[pair] = (kinds[op], is_backward, int(names.factors[pair[0]]), int(names.factors[pair[1]]))
    labels = _numbered(keys)
    for _ in range(ROUNDS):
        labels = _numbered(
            {
                pair: (labels[pair], *sorted((labels[other], *how) for other, *how in near[pair]))
                for pair in names.conflicts
            }
        )
    return labels


def _numbered(keys: Mapping[Conflict, Hashable]) -> dict[Conflict, int]:
    known: dict[Hashable, int] = {}
    return {pair: known.setdefault(key, len(known)) for pair, key in keys.items()}


def _colour_groups(names: NamedDims, kinds: Sequence[int]) -> tuple[IntArray, int]:
    """Of each colour its group, counted by the first operator of each, and how many there are."""
    own = np.flatnonzero((names.followed < 0) & (names.factors != WHOLE))
    num_colours = int(names.colours.max(initial=-1)) + 1
    places: dict[int, Counter[tuple[int, int]]] = {}
    first: dict[int, int] = {}
    for name, colour, op, factor in zip(
        own.tolist(), names.colours[own].tolist(), names.ops[own].tolist(), names.factors[own].tolist(), strict=True
    ):
        places.setdefault(colour, Counter())[kinds[op], factor] += 1
        first.setdefault(colour, name)
    together = _Together(places)
    together.join(places, key=lambda colour: frozenset(places[colour].items()))
    for dims in _used_alike(names, kinds):
        together.join([colour for colour in dims if colour in places], key=lambda _: None)
    groups = np.full(num_colours, -1, dtype=np.int64)
    meeting = _meeting(names)
    count = 0
    for several in sorted(together.groups(), key=lambda colours: min(first[colour] for colour in colours)):
        parts: list[set[int]] = []
        for colour in sorted(several, key=lambda colour: first[colour]):
            part = next((part for part in parts if part.isdisjoint(meeting[colour])), None)
            if part is None:
                part = set()
                parts.append(part)
            part.add(colour)
        for part in parts:
            groups[list(part)] = count
            count += 1
    return groups, count


class _Together:
    """A partition that becomes coarser."""

    def __init__(self, items: Iterable[int]) -> None:
        self._parent = {item: item for item in items}

    def join(self, items: Iterable[int], *, key: Callable[[int], Hashable]) -> None:
        """Puts together those of one key."""
        first: dict[Hashable, int] = {}
        for item in items:
            one, other = self._top(item), self._top(first.setdefault(key(item), item))
            self._parent[max(one, other)] = min(one, other)

    def groups(self) -> list[list[int]]:
        """The parts."""
        found: dict[int, list[int]] = defaultdict(list)
        for item in self._parent:
            found[self._top(item)].append(item)
        return list(found.values())

    def _top(self, item: int) -> int:
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item


def _used_alike(names: NamedDims, kinds: Sequence[int]) -> list[list[int]]:
    """The colours of each dim of parameters with the same uses (section 4.4)."""
    graph = names.graph
    found: dict[Hashable, list[int]] = defaultdict(list)
    for number, op in enumerate(graph.ops):
        if op.primitive != STATE:
            continue
        tensor = op.results[0]
        uses = sorted((kinds[use.op], use.operand) for use in graph.uses[tensor])
        for name in range(int(names.begins[number]), int(names.begins[number + 1])):
            found[kinds[number], tuple(uses), int(names.factors[name])].append(int(names.colours[name]))
    return list(found.values())


def _meeting(names: NamedDims) -> dict[int, set[int]]:
    """Of each colour those that it meets in an operator."""
    found: dict[int, set[int]] = defaultdict(set)
    colours, begins = names.colours.tolist(), names.begins.tolist()
    for begin, end in itertools.pairwise(begins):
        here = set(colours[begin:end])
        for colour in here:
            found[colour] |= here - {colour}
    return found
