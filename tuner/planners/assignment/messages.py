"""Messages between variables: a lower bound on all assignments' costs, and good assignments on the way.

Costs move between variables and edges without changing any assignment's sum. Variables are visited in order, forth and
back: each takes what its edges to earlier ones are sure to cost, and hands its own costs on to its edges to later ones
in equal shares. The sum of all variables' least costs is then a lower bound that never falls. Variables that have no
edge between them, and whose earlier neighbours are done, are visited at once.

Source: Kolmogorov, *A New Look at Reweighted Message Passing* (2015), for pairwise terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardware.arrays import FloatArray, IntArray
from tuner.planners.assignment.contraction import Pair
from tuner.planners.assignment.problem import starts_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Visit:
    """Variables that are visited at once, in one direction.

    Letters: `k` their edges to earlier variables, `R` rows (an edge and a state of the visited variable).

    Attributes:
        states: Of the variables.
        begins: Where each variable's states start among these.
        table: The edges' costs, a row after the other, each with an entry for every state of the earlier variable.
        given: Of each entry the place of the message to the earlier variable.
        row_starts: Where each row starts [R].
        taken: Of each row the place of its message [R].
        row_state: Of each row the place of its state among `states` [R].
        earlier: Of each row the earlier variable [R].
        handed: Places of the messages that later edges send to these variables.
        handed_state: Their places among `states`.
        share: What one later edge gets of its variable's costs, for each of `handed`.
        rest: What stays of each of `states`.
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
    """The messages between variables, and their reparametrised costs.

    Attributes:
        costs: Of each state, with what its edges are sure to cost [X].
    """

    def __init__(self, starts: IntArray, costs: FloatArray, edges: Mapping[Pair, FloatArray], order: IntArray) -> None:
        """Prepares the visits.

        Args:
            starts: Where each variable's states start among all [v + 1].
            costs: Of each state [X].
            edges: The costs of two variables' states, by their numbers.
            order: The place of each variable in the order of visits [v].
        """
        self._starts = starts
        self._sizes = np.diff(starts)
        pairs = list(edges)
        forward = [(first, second) if order[first] < order[second] else (second, first) for first, second in pairs]
        tables = [edges[pair] if pair == turned else edges[pair].T for pair, turned in zip(pairs, forward, strict=True)]
        ends = np.array(forward, dtype=np.int64).reshape(-1, 2)
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

    def sweep(self, *, is_forward: bool) -> float:
        """Visits all variables once; the sum of their least costs, which is a bound.

        `states` then holds a choice for each variable: the best beside what the earlier ones chose.
        """
        costs, messages, chosen = self.costs, self._messages, self.states
        for visit in self._visits[is_forward]:
            own = costs[visit.states]
            decoded = own
            if len(visit.row_starts):
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
        num_variables = len(self._sizes)
        earlier_edges: list[list[int]] = [[] for _ in range(num_variables)]
        later_edges: list[list[int]] = [[] for _ in range(num_variables)]
        for edge, (first, second) in enumerate(ends.tolist()):
            earlier_edges[second].append(edge)
            later_edges[first].append(edge)
        levels: dict[int, list[int]] = {}
        level_of = [0] * num_variables
        for variable in np.argsort(order, kind="stable").tolist():
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
        row_widths = np.repeat(widths, heights)
        row_starts = starts_of(row_widths)
        row_edge = np.repeat(np.arange(len(edges)), heights)
        row_number = _counting(heights)
        given = np.repeat(at[0][edges][row_edge], row_widths) + _counting(row_widths)
        later = [edge for variable in variables for edge in later_edges[variable]]
        later_sizes = sizes[ends[later, 0]]
        own_places = np.array([place[int(first)] for first in ends[later, 0]], dtype=np.int64)
        num_earlier = np.array([len(earlier_edges[variable]) for variable in variables])
        num_later = np.array([len(later_edges[variable]) for variable in variables])
        share = 1.0 / np.maximum(1, np.maximum(num_earlier, num_later))
        return _Visit(
            states=np.repeat(self._starts[variables], sizes[variables]) + _counting(sizes[variables]),
            begins=begins[:-1],
            variables=np.array(variables),
            table=table,
            given=given.astype(np.int32),
            row_starts=row_starts[:-1],
            taken=at[1][edges][row_edge] + row_number,
            row_state=begins[[place[int(second)] for second in seconds]][row_edge] + row_number if edges else row_edge,
            earlier=firsts[row_edge],
            handed=np.repeat(at[0][later], later_sizes) + _counting(later_sizes),
            handed_state=np.repeat(begins[own_places], later_sizes) + _counting(later_sizes),
            share=np.repeat(share[own_places], later_sizes),
            rest=np.repeat(1.0 - share * num_later, sizes[variables]),
        )


def first_least(values: FloatArray, begins: IntArray) -> IntArray:
    """In each part of a row of values, which one is the least.

    Args:
        values: Of all parts.
        begins: Where each part, none of them empty, starts.
    """
    least = np.minimum.reduceat(values, begins)
    sizes = np.diff(np.append(begins, len(values)))
    hits = np.flatnonzero(values == np.repeat(least, sizes))
    part = np.repeat(np.arange(len(begins)), sizes)[hits]
    places = np.full(len(begins), len(values))
    np.minimum.at(places, part, hits)
    return places - begins


def _counting(sizes: IntArray) -> IntArray:
    """0, 1, ... of each part in turn."""
    starts = starts_of(sizes)
    return np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
