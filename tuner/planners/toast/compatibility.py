"""Compatibility sets and groups of colours: conflicts resolved together, and colours cut together.

Names, colours, conflicts and the map M are defined in named_dims.py. Two conflicts form a box if M leads from the two
names of one, where a tensor is written, to the two names of the other, where it is read. If both conflicts are resolved
alike, the tensor does not move. They are therefore compatible, unless another path through the names crosses the box,
from one side to the other. Compatible conflicts form a set, which is resolved as a whole in one of two ways. Sets of
repeated layers have the same shape, and share their resolution.

A tensor that the forward pass keeps for the backward pass does not join sets of the two passes: it may be moved once in
between, and the paper too has a set for each direction. All conflicts of the backward pass that read one forward set
are joined to each other, as if the set were written again where the backward pass begins.

Colours of repeated layers form a group, and are cut together. Colours are in one group if parameters with equal uses
have them, or if they have equally many names in equal operators. Two colours that meet in one operator are never in one
group: of the weights of an MLP, one is cut along its rows and the next along its columns.

Sources: TOAST (Alabed et al. 2025), sections 3.5, 3.6 and 4.4.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.sharding.graph import STATE, Graph
from hardware.arrays import IntArray
from tuner.planners.toast.named_dims import WHOLE, Conflict, NamedDims, connect_pairs

BACKWARD = "grad."
"""Prefix of operators of the backward pass, for a graph that does not say where that begins."""

ROUNDS = 3
"""Number of refinement rounds in which neighbours distinguish a conflict from others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Two conflicts that a tensor connects.

    Attributes:
        written: Conflict where the tensor is written.
        read: Conflict where the tensor is read.
        is_kept: Whether it is written in the forward pass and read in the backward pass.
        is_crossed: Whether the first name of one conflict leads to the second name of the other.
        is_compatible: Whether no other path leads across the box.
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
        colour: Colour of all their names.
        sides: Names of each conflict: the one that the first resolution keeps, then the one that the second keeps.
        group: Number of the group; sets of repeated layers share it.
    """

    colour: int
    sides: tuple[Conflict, ...]
    group: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Compatibility:
    """Parts of a graph that are decided together.

    Attributes:
        names: Named dims of the graph.
        boxes: Pairs of conflicts that tensors connect.
        sets: Compatibility sets.
        num_set_groups: Number of groups of sets, each of which needs one resolution.
        colour_groups: Group of each colour; -1 for a colour by which no operator can be cut.
        num_groups: Number of groups of colours.
        kinds: Kind of each operator; operators of one kind have the same primitive and rule.
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
        """Number of ways to resolve all conflicts together."""
        return int(2**self.num_set_groups)

    def colours_of(self, group: int) -> IntArray:
        """Return the colours of a group."""
        return np.flatnonzero(self.colour_groups == group)


def compatibility(names: NamedDims) -> Compatibility:
    """Find the conflicts and colours of a graph that are decided together."""
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
    """Return the number of the first operator of the backward pass; None if there is none or it is unknown."""
    if graph.first_backward is not None:
        return graph.first_backward
    return next((number for number, op in enumerate(graph.ops) if op.name.startswith(BACKWARD)), None)


def _kinds(graph: Graph) -> tuple[int, ...]:
    """Number operators by what they compute; names of factors make no difference."""
    shapes: dict[int, Hashable] = {}
    known: dict[Hashable, int] = {}
    found = []
    for op in graph.ops:
        if id(rule := op.rule) not in shapes:
            sizes = tuple((factor.size, factor.kind) for factor in rule.factors)
            shapes[id(rule)] = (sizes, rule.operands, rule.results)
        found.append(known.setdefault((op.primitive, shapes[id(rule)]), len(known)))
    return tuple(found)


def _boxes(names: NamedDims) -> tuple[Box, ...]:
    """Find all pairs of conflicts that a tensor connects inside one step."""
    graph, turn = names.graph, turn_of(names.graph)
    conflicts = set(names.conflicts)
    # Only entries of M between names in conflict can form a box; entries of one tensor and one reader belong together.
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
                written, read = _order(one, other), _order(to_one, to_other)
                if written in conflicts and read in conflicts:
                    pairs[written, read] = (one < other) != (to_one < to_other)
    # A box is compatible if no name of the written conflict leads to the opposite side of the read one.
    reached = _find_sources(names, {name for written, _ in pairs for name in written})
    found = []
    for (written, read), is_crossed in pairs.items():
        first, second = read[::-1] if is_crossed else read
        # Bit k of a number tells whether name k leads there.
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


def _order(one: int, other: int) -> Conflict:
    return (one, other) if one < other else (other, one)


def _find_sources(names: NamedDims, sources: set[int]) -> list[int]:
    """Return the sources that lead to each name inside one step, as an integer with a bit for each source."""
    graph = names.graph
    found = [0] * len(names.ops)
    for name in sources:
        found[name] = 1 << name
    # Entries to states lead to the next step and are left out.
    is_state = np.array([op.primitive == STATE for op in graph.ops], dtype=bool)
    inside = np.flatnonzero(~is_state[names.ops[names.targets]])
    inside = inside[np.argsort(names.sources[inside], kind="stable")]  # by the order of the operators
    for source, target in zip(names.sources[inside].tolist(), names.targets[inside].tolist(), strict=True):
        if found[source]:
            found[target] |= found[source]
    return found


def _sets(conflicts: Sequence[Conflict], boxes: Sequence[Box]) -> list[list[Conflict]]:
    """Join compatible conflicts into sets, each conflict with its sides in the order of the set.

    The sets are trees of conflicts (union-find). An edge of a tree tells whether the sides of its two ends are swapped.
    """
    parent: dict[Conflict, Conflict] = {pair: pair for pair in conflicts}
    is_turned: dict[Conflict, bool] = dict.fromkeys(conflicts, False)

    def root(pair: Conflict) -> tuple[Conflict, bool]:
        """Return the root of a conflict's set, and whether the sides are swapped on the way there."""
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
        if one != other:  # else it is already known whether their sides are swapped
            parent[other] = one
            is_turned[other] = one_turned ^ other_turned ^ is_crossed

    compatible = [box for box in boxes if box.is_compatible]
    for box in compatible:
        if not box.is_kept:
            tie(box.written, box.read, is_crossed=box.is_crossed)
    written = [(box, *root(box.written)) for box in compatible if box.is_kept]
    for box, top, turned in written:
        again = (~top[0], ~top[1])  # stands for the forward set in the backward pass; real names are not negative
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
    """Number the groups of sets with the same shape, and put their sides in the same order."""
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
    """Return the label of each conflict and the factor of its name on the first side, sorted."""
    return sorted((labels[_order(*pair)], int(names.factors[pair[0]])) for pair in sides)


def _labels(names: NamedDims, boxes: Sequence[Box], kinds: Sequence[int]) -> dict[Conflict, int]:
    """Give conflicts with equal operators and equal neighbours equal labels (Weisfeiler and Leman)."""
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
    labels = _number(keys)
    # Each round distinguishes conflicts by the labels of their neighbours, one box further away.
    for _ in range(ROUNDS):
        labels = _number(
            {
                pair: (labels[pair], *sorted((labels[other], *how) for other, *how in near[pair]))
                for pair in names.conflicts
            }
        )
    return labels


def _number(keys: Mapping[Conflict, Hashable]) -> dict[Conflict, int]:
    """Number equal keys alike, in the order of their first occurrence."""
    known: dict[Hashable, int] = {}
    return {pair: known.setdefault(key, len(known)) for pair, key in keys.items()}


def _colour_groups(names: NamedDims, kinds: Sequence[int]) -> tuple[IntArray, int]:
    """Return the group of each colour, and the number of groups; groups are numbered by their first operator."""
    # A colour is described by the kinds of its operators and its factors in them; equal descriptions are joined.
    own = np.flatnonzero((names.followed < 0) & (names.factors != WHOLE))
    num_colours = int(names.colours.max(initial=-1)) + 1
    places: dict[int, Counter[tuple[int, int]]] = {}
    first: dict[int, int] = {}
    for name, colour, op, factor in zip(
        own.tolist(), names.colours[own].tolist(), names.ops[own].tolist(), names.factors[own].tolist(), strict=True
    ):
        places.setdefault(colour, Counter())[kinds[op], factor] += 1
        first.setdefault(colour, name)
    leaders: dict[Hashable, int] = {}
    ties = [(colour, leaders.setdefault(frozenset(own.items()), colour)) for colour, own in places.items()]
    for dims in _dims_used_alike(names, kinds):
        ties += itertools.pairwise(colour for colour in dims if colour in places)
    # Colours are joined in the order of their first names, so that the groups come in that order too.
    together: dict[int, list[int]] = defaultdict(list)
    part_of = connect_pairs(num_colours, ties)
    for colour in sorted(places, key=lambda colour: first[colour]):
        together[part_of[colour]].append(colour)
    groups = np.full(num_colours, -1, dtype=np.int64)
    meeting = _colours_beside(names)
    count = 0
    for several in together.values():
        # Split a group so that no two colours of one part meet in an operator.
        parts: list[set[int]] = []
        for colour in several:
            part = next((part for part in parts if part.isdisjoint(meeting[colour])), None)
            if part is None:
                part = set()
                parts.append(part)
            part.add(colour)
        for part in parts:
            groups[list(part)] = count
            count += 1
    return groups, count


def _dims_used_alike(names: NamedDims, kinds: Sequence[int]) -> list[list[int]]:
    """Group equal dims of parameters with equal uses, and return the colours of each group (section 4.4)."""
    graph = names.graph
    found: dict[Hashable, list[int]] = defaultdict(list)
    for number, op in enumerate(graph.ops):
        if op.primitive != STATE:
            continue
        tensor = op.results[0]
        # Parameters of repeated layers are read by operators of the same kinds, as the same operands.
        uses = sorted((kinds[use.op], use.operand) for use in graph.uses[tensor])
        for name in range(int(names.begins[number]), int(names.begins[number + 1])):
            found[kinds[number], tuple(uses), int(names.factors[name])].append(int(names.colours[name]))
    return list(found.values())


def _colours_beside(names: NamedDims) -> dict[int, set[int]]:
    """Return the other colours that each colour meets in an operator."""
    found: dict[int, set[int]] = defaultdict(set)
    colours, begins = names.colours.tolist(), names.begins.tolist()
    for begin, end in itertools.pairwise(begins):
        here = set(colours[begin:end])
        for colour in here:
            found[colour] |= here - {colour}
    return found
