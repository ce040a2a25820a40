"""Named dimension analysis: which dims of a step are cut together, and where there is a choice (TOAST, section 3).

Every operator gives fresh names to the dims of its operands and results. Its rule identifies some of them (the paper's
identities I), which leaves one name for each factor that an axis can serve. The map M leads from the names of a tensor
where it is written to its names where it is read. Names that M connects have one colour: an axis that cuts one of them
cuts them all, and nothing moves.

Two names of one operator may have one colour, as queries and keys of attention both have that of the sequence. An axis
serves at most one factor of an operator. Such a pair is therefore a conflict, which has to be resolved by a choice.

Constants, and tensors computed from constants alone (masks, positions), connect no names, because any device can make
the part that it wants. Their names follow the first operator that reads them. A dim that its operator needs whole has a
name as well, because its readers may be able to cut it.

Letters: n names, m entries of M.

Sources: TOAST (Alabed et al. 2025), sections 3.1 to 3.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from costmodels.sharding.dims import Rule
from costmodels.sharding.graph import CONSTANT, STATE, Graph
from hardware.arrays import IntArray

WHOLE = -1
"""Value in place of a factor, for the name of a dim that its operator needs whole."""

Conflict = tuple[int, int]
"""Two names of one operator that have one colour, in ascending order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedDims:
    """Names of a graph, their colours and their conflicts.

    Attributes:
        graph: Graph of the training step.
        ops: Operator of each name [n].
        factors: Factor of each name, or WHOLE [n].
        begins: First name of each operator, and the number of names at the end [ops + 1].
        sources: Source of each entry of M, a name of an operator that writes a tensor [m].
        targets: Target of each entry of M, a name of an operator that reads it [m].
        tensors: Tensor of each entry of M [m].
        constants: Operators that compute from constants alone.
        followed: Name that each name of such an operator follows; -1 without one, and for all other names [n].
        colours: Colour of each name; a following name has that of the name it follows [n].
    """

    graph: Graph
    ops: IntArray
    factors: IntArray
    begins: IntArray
    sources: IntArray
    targets: IntArray
    tensors: IntArray
    constants: frozenset[int]
    followed: IntArray
    colours: IntArray

    @cached_property
    def num_colours(self) -> int:
        """Number of colours among names that follow no other."""
        own = self.colours[self.followed < 0]
        return len(np.unique(own))

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """All conflicts, in the order of the operators; operators that compute from constants alone have none."""
        found: list[Conflict] = []
        colours, begins, factors = self.colours.tolist(), self.begins.tolist(), self.factors.tolist()
        for op in range(len(self.graph.ops)):
            names = [name for name in range(begins[op], begins[op + 1]) if factors[name] != WHOLE]
            if op in self.constants or len({colours[name] for name in names}) == len(names):
                continue
            found += [pair for pair in combinations(names, 2) if colours[pair[0]] == colours[pair[1]]]
        return tuple(found)

    def name_of(self, op: int, factor: int) -> int | None:
        """Return the name of a factor, or None if no axis can serve it."""
        cuttable = self.graph.ops[op].rule.cuttable
        return int(self.begins[op]) + cuttable.index(factor) if factor in cuttable else None

    def names_of(self, colour: int) -> IntArray:
        """Return all names of a colour."""
        return np.flatnonzero(self.colours == colour)


def named_dims(graph: Graph) -> NamedDims:
    """Analyse the named dims of a graph."""
    rules = {id(op.rule): op.rule for op in graph.ops}
    places = {key: _place_factors(rule) for key, rule in rules.items()}
    begins = [0]
    ops: list[int] = []
    factors: list[int] = []
    whole: dict[tuple[int, int], int] = {}
    for number, op in enumerate(graph.ops):
        ops += [number] * len(op.rule.cuttable)
        factors += op.rule.cuttable
        for tensor, dims in zip(op.results, places[id(op.rule)].results, strict=True):
            for dim, lead in enumerate(dims):
                if lead == WHOLE:
                    whole[tensor, dim] = len(ops)
                    ops.append(number)
                    factors.append(WHOLE)
        begins.append(len(ops))
    sources, targets, tensors = _build_map(graph, places, begins, whole)
    constants = _constant_only(graph)
    is_constant = np.zeros(len(graph.ops), dtype=bool)
    is_constant[list(constants)] = True
    ops_n = np.array(ops, dtype=np.int64)
    # Colours are the connected components of M without the entries that leave constants.
    ties = ~is_constant[ops_n[sources]] if len(sources) else np.zeros(0, dtype=bool)
    colours = connect_pairs(len(ops), np.stack([sources[ties], targets[ties]], axis=1))
    # NumPy keeps the last of several values written to one place, so that readers are written in reverse order.
    followed = np.full(len(ops), -1, dtype=np.int64)
    late = np.flatnonzero(~ties)
    late = late[np.argsort(ops_n[targets[late]], kind="stable")][::-1]  # the first reader is written last
    followed[sources[late]] = targets[late]
    for name in np.flatnonzero(followed >= 0)[::-1].tolist():  # a reader stands later, and knows its colour
        colours[name] = colours[followed[name]]
    return NamedDims(
        graph=graph,
        ops=ops_n,
        factors=np.array(factors, dtype=np.int64),
        begins=np.array(begins, dtype=np.int64),
        sources=sources,
        targets=targets,
        tensors=tensors,
        constants=constants,
        followed=followed,
        colours=colours,
    )


def connect_pairs(count: int, pairs: ArrayLike) -> IntArray:
    """Return the number of the connected component of each item; pairs connect in both directions [count].

    Args:
        count: Number of items.
        pairs: Items that belong together [p, 2].
    """
    ends = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    links = coo_array((np.ones(len(ends), dtype=np.int8), (ends[:, 0], ends[:, 1])), shape=(count, count))
    return connected_components(links, directed=False)[1].astype(np.int64) if count else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    """Positions of the factors on the dims of a rule's tensors.

    The entry of a dim is the position of its factor among the cuttable ones, WHOLE for a dim that can't be cut, or None
    for a dim of one element.

    Attributes:
        operands: Entries of each operand's dims.
        results: Entries of each result's dims.
    """

    operands: tuple[tuple[int | None, ...], ...]
    results: tuple[tuple[int | None, ...], ...]


def _place_factors(rule: Rule) -> _Places:
    """Return the positions of a rule's factors on the dims of its tensors."""
    positions = {factor: position for position, factor in enumerate(rule.cuttable)}

    def lead(dim: Sequence[int]) -> int | None:
        """Return the position of a dim's first factor of more than one iteration."""
        first = next((factor for factor in dim if rule.factors[factor].size > 1), None)
        return None if first is None else positions.get(first, WHOLE)

    return _Places(
        operands=tuple(tuple(lead(dim) for dim in place) for place in rule.operands),
        results=tuple(tuple(lead(dim) for dim in place) for place in rule.results),
    )


def _build_map(
    graph: Graph, places: Mapping[int, _Places], begins: Sequence[int], whole: dict[tuple[int, int], int]
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the sources, targets and tensors of the entries of M."""
    found: list[tuple[int, int, int]] = []
    for tensor, (maker, slot) in enumerate(graph.maker):
        written = [
            whole[tensor, dim] if lead == WHOLE else (None if lead is None else begins[maker] + lead)
            for dim, lead in enumerate(places[id(graph.ops[maker].rule)].results[slot])
        ]
        for use in graph.uses[tensor]:
            read = places[id(graph.ops[use.op].rule)].operands[use.operand]
            begin = begins[use.op]
            found += [
                (source, begin + lead, tensor)
                for source, lead in zip(written, read, strict=True)
                if source is not None and lead is not None and lead != WHOLE
            ]
    # Columns are source, target and tensor.
    entries = np.array(found, dtype=np.int64).reshape(-1, 3)
    return entries[:, 0], entries[:, 1], entries[:, 2]


def _constant_only(graph: Graph) -> frozenset[int]:
    found: set[int] = set()
    for number, op in enumerate(graph.ops):
        reads = bool(op.operands) and op.primitive != STATE
        if op.primitive == CONSTANT or (reads and all(graph.maker[tensor][0] in found for tensor in op.operands)):
            found.add(number)
    return frozenset(found)
