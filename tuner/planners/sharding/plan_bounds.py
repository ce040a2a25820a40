"""Lower bound of the step time over all plans of a graph, from which the gap of a plan follows.

All operators choose all axes at once, and a step costs no less than a sum of terms of two operators each
(`ShardingTerms.pairwise`). Operators with at most two neighbours are eliminated, which loses nothing. Where repeated
layers have the same tables, these are computed once. Between the remaining operators, messages are sent
(`messages.py`); each sweep of messages ends with a bound that is no lower than the last.

The bound ignores limits of memory and pins, so that it holds under all of them. It is below the optimum by what the
shares of several readers and the messages lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tuner.planners.engine.elimination import Table
from tuner.planners.sharding.messages import Messages, starts_of
from tuner.planners.sharding.sharding_milp import choices_of
from tuner.planners.sharding.sharding_terms import ShardingTerms
from tuner.planners.sharding.table_forms import Row

MOST_ENTRIES = 4e7
"""Most entries of all tables together; with more of them moves are left out of the bound."""

MOST_SWEEPS = 200
"""Most sweeps of messages, each forward or backward."""

MOST_VISITS = 1e9
"""Most visits of table entries by all sweeps together.

They take seconds, and are counted in place of time so that the bound is the same on every machine.
"""

LEAST_GAIN = 1e-5
"""Least gain of the bound by one sweep forward and one backward, relative to the bound, for which sweeps go on."""

SEGMENT = 64
"""Number of operators that a sweep visits one after the other; all segments are visited at the same time."""


def step_time_bound(terms: ShardingTerms) -> float:
    """Return a lower bound of the step time of every plan [s].

    Args:
        terms: Cost tables of a graph on a mesh, without prices.
    """
    graph, sizes = terms.graph, terms.mesh.sizes
    known: dict[int, tuple[Row, ...]] = {}
    for op in graph.ops:
        if id(op.rule) not in known:
            known[id(op.rule)] = choices_of(op, sizes)
    rows = [known[id(op.rule)] for op in graph.ops]
    counts = [len(own) for own in rows]
    # Entries of the tables between makers and readers tell in advance whether they are too large.
    entries = sum(
        counts[maker] * counts[use.op] for (maker, _), uses in zip(graph.maker, graph.uses, strict=True) for use in uses
    )
    network = Network(counts)
    for term in terms.pairwise(rows) if entries <= MOST_ENTRIES else terms.alone(rows):
        network.add(term.scope, term.table)
    network.eliminate()
    if not network.open:
        return network.constant
    messages = network.messages()
    # Sweeps go on while a pair of them, forward and backward, raises the bound enough.
    found = [-math.inf, -math.inf]
    for sweep in range(min(MOST_SWEEPS, max(2, int(MOST_VISITS // max(entries, 1))))):
        found.append(max(found[-1], messages.sweep(is_forward=sweep % 2 == 0)))
        bound = network.constant + found[-1]
        if found[-1] - found[-3] < LEAST_GAIN * bound:
            break
    return network.constant + found[-1]


class Network:
    """Variables with a cost table each, and cost tables between pairs of variables.

    Attributes:
        constant: Cost of every assignment, beside the tables.
        own: Cost of each variable by its value [v].
        open: Variables that were not eliminated.
        beside: Neighbours of each variable, each with the costs by the variable's value and by the neighbour's.
    """

    def __init__(self, counts: list[int]) -> None:
        """Begin with variables of these numbers of values, and no costs."""
        self.constant = 0.0
        self._counts = counts
        zeros = {count: np.zeros(count) for count in set(counts)}
        self.own: list[Table] = [zeros[count] for count in counts]
        self.beside: list[dict[int, Table]] = [{} for _ in counts]
        # The cache goes by the identities of tables. It keeps the tables alive, so that these stay unique.
        self._made: dict[tuple[object, ...], tuple[Table, tuple[Table, ...]]] = {}
        self.open = set(range(len(counts)))

    def add(self, scope: tuple[int, ...], table: Table) -> None:
        """Add a term of at most two variables."""
        if not scope:
            self.constant += float(table)
        elif len(scope) == 1:
            self.own[scope[0]] = self._sum(self.own[scope[0]], table)
        else:
            first, second = scope
            self._join(first, second, table)

    def eliminate(self) -> None:
        """Eliminate variables with at most two neighbours until none is left."""
        waiting = sorted(self.open, reverse=True)
        while waiting:
            variable = waiting.pop()
            others = self.beside[variable]
            if variable not in self.open or len(others) > 2:
                continue
            self.open.discard(variable)
            own = self.own[variable]
            for other in others:
                del self.beside[other][variable]
            # Minimise over the variable: its cost moves to the constant, to its only neighbour, or between its two
            # neighbours.
            if not others:
                self.constant += float(own.min())
            elif len(others) == 1:
                ((other, table),) = others.items()
                least = self._make(("end", id(own), id(table)), (own, table), _least_of_end)
                self.own[other] = self._sum(self.own[other], least)
            else:
                (first, to_first), (second, to_second) = others.items()
                tables = (own, to_first, to_second)
                self._join(first, second, self._make(("middle", *map(id, tables)), tables, _least_between))
            waiting += others

    def messages(self) -> Messages:
        """Return the messages between the variables that are left."""
        variables = sorted(self.open)
        place = {variable: number for number, variable in enumerate(variables)}
        edges = {
            (place[variable], place[other]): table
            for variable in variables
            for other, table in self.beside[variable].items()
            if variable < other
        }
        numbers = np.arange(len(variables))
        # Visit the first operator of every segment, then the second ones, and so on.
        order = (numbers % SEGMENT) * len(variables) + numbers
        starts = starts_of([self._counts[variable] for variable in variables])
        return Messages(starts, np.concatenate([self.own[variable] for variable in variables]), edges, order)

    def _join(self, first: int, second: int, table: Table) -> None:
        if second in self.beside[first]:
            table = self._sum(self.beside[first][second], table)
        self.beside[first][second] = table
        self.beside[second][first] = self._make(("turned", id(table)), (table,), np.transpose)

    def _sum(self, one: Table, other: Table) -> Table:
        return self._make(("sum", id(one), id(other)), (one, other), np.add)

    def _make(self, key: tuple[object, ...], of: tuple[Table, ...], make: Callable[..., Table]) -> Table:
        """Return the table that `make` computes from others, computing it once for the same tables."""
        if key not in self._made:
            self._made[key] = make(*of), of
        return self._made[key][0]


def _least_of_end(own: Table, table: Table) -> Table:
    """Return the least cost of a variable for each value of its only neighbour."""
    found: Table = (own[:, None] + table).min(axis=0)
    return found


def _least_between(own: Table, to_first: Table, to_second: Table) -> Table:
    """Return the least cost of a variable for each pair of values of its two neighbours."""
    found = np.empty((to_first.shape[1], to_second.shape[1]))
    costs = (own[:, None] + to_first).T
    # One row at a time, because the table over all three variables may be too large.
    for value, row in enumerate(costs):
        found[value] = (row[:, None] + to_second).min(axis=0)
    return found
