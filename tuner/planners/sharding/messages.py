"""Messages between variables: a lower bound of all assignments' costs, with good assignments as a by-product.

Costs move between variables and edges without changing the sum of any assignment. Variables are visited in order,
forward and backward. Each takes the costs that its edges to earlier variables are certain to add, and distributes its
own costs in equal shares to its edges to later variables. The sum of all variables' least costs is a lower bound that
never falls. Variables without an edge between them, whose earlier neighbours are done, are visited at once.

Source: Kolmogorov, *A New Look at Reweighted Message Passing* (2015), for pairwise terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hardware.arrays import FloatArray, IntArray

Pair = tuple[int, int]
"""Numbers of two variables."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Visit:
    """Variables that are visited at once, in one direction.

    Letters: `k` edges to earlier variables, `R` rows (an edge and a state of the visited variable).

    Attributes:
        states: Indices of the variables' states among all states.
        begins: Index of each variable's first state among these.
        variables: Numbers of the variables.
        table: Costs of the edges, row after row, each with an entry for every state of the earlier variable.
        given: Index of the message to the earlier variable, for each entry.
        row_starts: Index of each row's first entry [R].
        taken: Index of each row's own message [R].
        row_state: Index of each row's state among `states` [R].
        earlier: Earlier variable of each row [R].
        handed: Indices of the messages that later edges send to these variables.
        handed_state: Indices of their states among `states`.
        share: Fraction of its variable's costs that one later edge gets, for each of `handed`.
        rest: Fraction of the costs that stays at each of `states`.
    """

    states: IntArray
    begins: IntArray
    variables: IntArray
    table: FloatArray
    given: NDArray[np.int32]
    row_starts: IntArray
    taken: IntArray
    row_state: IntArray
    earlier: IntArray
    handed: IntArray
    handed_state: IntArray
    share: FloatArray
    rest: FloatArray


class Messages:
    """Messages between variables, and the reparametrised costs of the variables.

    Attributes:
        costs: Cost of each state, with the costs that its edges are certain to add [X].
        states: State that the last sweep chose for each variable [v].
    """

    def __init__(self, starts: IntArray, costs: FloatArray, edges: Mapping[Pair, FloatArray], order: IntArray) -> None:
        """Prepare the visits of both directions.

        Args:
            starts: Index of each variable's first state among all states [v + 1].
            costs: Cost of each state [X].
            edges: Costs of two variables' states, by their numbers.
            order: Place of each variable in the order of visits [v].
        """
        self._starts = starts
        self._sizes = np.diff(starts)
        pairs = list(edges)
        # Each edge is turned so that it leads from the earlier variable to the later one.
        forward = [(first, second) if order[first] < order[second] else (second, first) for first, second in pairs]
        tables = [edges[pair] if pair == turned else edges[pair].T for pair, turned in zip(pairs, forward, strict=True)]
        ends = np.array(forward, dtype=np.int64).reshape(-1, 2)
        # An edge has one message to each of its ends, with an entry for each state there.
        first_at = starts_of(self._sizes[ends[:, 0]])
        second_at = starts_of(self._sizes[ends[:, 1]]) + first_at[-1]
        self._messages = np.zeros(int(second_at[-1]))
        self.costs = costs.copy()
        self._visits = {
            is_forward: self._plan(
                ends if is_forward else ends[:, ::-1],
                tables if is_forward else [table.T for table in tables],
                (first_at, second_at) if is_forward else (second_at, first_at),
                order if is_forward else -order,
            )
            for is_forward in (True, False)
        }
        self.states = np.zeros(len(self._sizes), dtype=np.int64)

    @property
    def num_visits(self) -> int:
        """Number of visits of a sweep, each of all variables that can be visited at once."""
        return len(self._visits[True])

    def sweep(self, *, is_forward: bool) -> float:
        """Visit all variables once, and return the sum of their least costs, which is a lower bound.

        `states` then holds a choice for each variable: the best one given the choices of earlier variables.
        """
        costs, messages, chosen = self.costs, self._messages, self.states
        for visit in self._visits[is_forward]:
            own = costs[visit.states]
            decoded = own
            if len(visit.row_starts):
                # The new message is the least reparametrised cost of the edge for each own state; its change is added
                # to the own costs. Decoding uses the edge's cost at the earlier variable's choice instead.
                old = messages[visit.taken]
                new = np.minimum.reduceat(visit.table - messages[visit.given], visit.row_starts)
                messages[visit.taken] = new
                own = own + np.bincount(visit.row_state, new - old, len(own))
                real = visit.table[visit.row_starts + chosen[visit.earlier]]
                decoded = own + np.bincount(visit.row_state, real - new, len(own))
            chosen[visit.variables] = first_least(decoded, visit.begins)
            if len(visit.handed):
                messages[visit.handed] -= visit.share * own[visit.handed_state]
                own = own * visit.rest
            costs[visit.states] = own
        return float(np.minimum.reduceat(costs, self._starts[:-1]).sum()) if len(costs) else 0.0

    def _plan(
        self, ends: IntArray, tables: Sequence[FloatArray], at: tuple[IntArray, IntArray], order: IntArray
    ) -> list[_Visit]:
        """Group the variables into visits: a variable comes one visit after the last of its earlier neighbours."""
        num_variables = len(self._sizes)
        earlier_edges: list[list[int]] = [[] for _ in range(num_variables)]
        later_edges: list[list[int]] = [[] for _ in range(num_variables)]
        for edge, (first, second) in enumerate(ends.tolist()):
            earlier_edges[second].append(edge)
            later_edges[first].append(edge)
        levels: dict[int, list[int]] = {}
        level_of = [0] * num_variables
        for variable in np.argsort(order, kind="stable").tolist():
            # Variables of one level have no edge between them, so that they can be visited at once.
            level = 1 + max((level_of[ends[edge, 0]] for edge in earlier_edges[variable]), default=-1)
            level_of[variable] = level
            levels.setdefault(level, []).append(variable)
        return [
            self._visit(variables, earlier_edges, later_edges, ends, tables, at)
            for _, variables in sorted(levels.items())
        ]

    def _visit(
        self,
        variables: list[int],
        earlier_edges: list[list[int]],
        later_edges: list[list[int]],
        ends: IntArray,
        tables: Sequence[FloatArray],
        at: tuple[IntArray, IntArray],
    ) -> _Visit:
        sizes = self._sizes
        place = {variable: number for number, variable in enumerate(variables)}
        begins = starts_of(sizes[variables])
        edges = [edge for variable in variables for edge in earlier_edges[variable]]
        firsts, seconds = ends[edges, 0], ends[edges, 1]
        widths, heights = sizes[firsts], sizes[seconds]
        table = np.concatenate([*(tables[edge].T.ravel() for edge in edges), np.zeros(0)])
        # A row holds the edge's costs for one state of the later variable and all states of the earlier one.
        row_widths = np.repeat(widths, heights)
        row_starts = starts_of(row_widths)
        row_edge = np.repeat(np.arange(len(edges)), heights)
        row_number = _count_up(heights)
        given = np.repeat(at[0][edges][row_edge], row_widths) + _count_up(row_widths)
        later = [edge for variable in variables for edge in later_edges[variable]]
        later_sizes = sizes[ends[later, 0]]
        own_places = np.array([place[int(first)] for first in ends[later, 0]], dtype=np.int64)
        num_earlier = np.array([len(earlier_edges[variable]) for variable in variables])
        num_later = np.array([len(later_edges[variable]) for variable in variables])
        # The share is small enough that a variable never gives away more than it has, in either direction.
        share = 1.0 / np.maximum(1, np.maximum(num_earlier, num_later))
        return _Visit(
            states=np.repeat(self._starts[variables], sizes[variables]) + _count_up(sizes[variables]),
            begins=begins[:-1],
            variables=np.array(variables),
            table=table,
            given=given.astype(np.int32),
            row_starts=row_starts[:-1],
            taken=at[1][edges][row_edge] + row_number,
            row_state=begins[[place[int(second)] for second in seconds]][row_edge] + row_number if edges else row_edge,
            earlier=firsts[row_edge],
            handed=np.repeat(at[0][later], later_sizes) + _count_up(later_sizes),
            handed_state=np.repeat(begins[own_places], later_sizes) + _count_up(later_sizes),
            share=np.repeat(share[own_places], later_sizes),
            rest=np.repeat(1.0 - share * num_later, sizes[variables]),
        )


def first_least(values: FloatArray, begins: IntArray) -> IntArray:
    """Return the index of the least value in each part of a row, the first of equal ones.

    Args:
        values: Values of all parts, one part after the other.
        begins: Index at which each part starts; no part is empty.
    """
    least = np.minimum.reduceat(values, begins)
    sizes = np.diff(np.append(begins, len(values)))
    # Several values of a part may be the least; keep the place of the first.
    hits = np.flatnonzero(values == np.repeat(least, sizes))
    part = np.repeat(np.arange(len(begins)), sizes)[hits]
    places = np.full(len(begins), len(values))
    np.minimum.at(places, part, hits)
    return places - begins


def starts_of(sizes: ArrayLike) -> IntArray:
    """Return the start of each part in a row of parts of these sizes, and the end of the last one [parts + 1]."""
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))]).astype(np.int64)


def _count_up(sizes: IntArray) -> IntArray:
    """Return 0, 1, ... for each part in turn."""
    starts = starts_of(sizes)
    return np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
