"""How short a step is at least, on any plan of a graph: what tells a plan's gap.

All operators choose all axes at once, and a step costs no less than the sum of terms of two operators each
(`ShardingTerms.pairwise`). Operators with two neighbours at most are eliminated, which loses nothing; where repeated
layers have the same tables that is computed once. Between those that are left messages are sent
(`assignment.messages`), and each sweep of them ends with a bound that is no lower than the last.

The bound minds neither limits of memory nor pins, so that it holds under all of them. It stands below the optimum by
what the shares of several readers and the messages leave open.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tuner.planners.assignment.messages import Messages
from tuner.planners.assignment.problem import starts_of
from tuner.planners.engine.elimination import Table
from tuner.planners.sharding.sharding_milp import choices_of
from tuner.planners.sharding.sharding_terms import Row, ShardingTerms

MOST_ENTRIES = 4e7
"""Of all tables together; with more of them what is sent counts for nothing."""

MOST_SWEEPS = 200
"""Of messages, forth or back."""

MOST_VISITS = 1e9
"""Of tables' entries by all sweeps together: seconds of work, counted so that the bound is the same on any machine."""

LEAST_GAIN = 1e-5
"""Of the bound, by which a sweep forth and back raises it as long as they go on."""

SEGMENT = 64
"""Operators that are visited one after the other, those of all segments at once."""


def step_time_bound(terms: ShardingTerms) -> float:
    """A time that no plan's step is shorter than [s].

    Args:
        terms: What plans of a graph on a mesh cost, without prices.
    """
    graph, sizes = terms.graph, terms.mesh.sizes
    known: dict[int, tuple[Row, ...]] = {}
    for op in graph.ops:
        if id(op.rule) not in known:
            known[id(op.rule)] = choices_of(op, sizes)
    rows = [known[id(op.rule)] for op in graph.ops]
    counts = [len(own) for own in rows]
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
    found = [-math.inf, -math.inf]
    for sweep in range(min(MOST_SWEEPS, max(2, int(MOST_VISITS // max(entries, 1))))):
        found.append(max(found[-1], messages.sweep(is_forward=sweep % 2 == 0)))
        bound = network.constant + found[-1]
        if found[-1] - found[-3] < LEAST_GAIN * bound:
            break
    return network.constant + found[-1]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Made:
    """A table, and what it was made of, which keeps these alive so that their identities stay theirs.

    Attributes:
        table: What was made.
        of: Of what.
    """

    table: Table
    of: tuple[Table, ...]


class Network:
    """Variables with a table each, and tables between two of them.

    Attributes:
        constant: What all assignments cost beside the tables.
        own: Of each variable the cost by its value [v].
        open: Variables that are left.
        beside: Of each variable its neighbours, each with the costs by its own value and by the neighbour's.
    """

    def __init__(self, counts: list[int]) -> None:
        self.constant = 0.0
        self._counts = counts
        zeros = {count: np.zeros(count) for count in set(counts)}
        self.own: list[Table] = [zeros[count] for count in counts]
        self.beside: list[dict[int, Table]] = [{} for _ in counts]
        self._made: dict[tuple[object, ...], _Made] = {}
        self.open = set(range(len(counts)))

    def add(self, scope: tuple[int, ...], table: Table) -> None:
        """Adds a term of two variables at most."""
        if not scope:
            self.constant += float(table)
        elif len(scope) == 1:
            self.own[scope[0]] = self._sum(self.own[scope[0]], table)
        else:
            first, second = scope
            self._join(first, second, table)

    def eliminate(self) -> None:
        """Takes out variables with two neighbours at most until there is none."""
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
        """Messages between the variables that are left."""
        variables = sorted(self.open)
        place = {variable: number for number, variable in enumerate(variables)}
        edges = {
            (place[variable], place[other]): table
            for variable in variables
            for other, table in self.beside[variable].items()
            if variable < other
        }
        numbers = np.arange(len(variables))
        order = (numbers % SEGMENT) * len(variables) + numbers
        starts = starts_of([self._counts[variable] for variable in variables])
        return Messages(starts, np.concatenate([self.own[variable] for variable in variables]), edges, order)

    def _join(self, first: int, second: int, table: Table) -> None:
        """Adds costs by the values of two variables."""
        if second in self.beside[first]:
            table = self._sum(self.beside[first][second], table)
        self.beside[first][second] = table
        self.beside[second][first] = self._make(("turned", id(table)), (table,), np.transpose)

    def _sum(self, one: Table, other: Table) -> Table:
        return self._make(("sum", id(one), id(other)), (one, other), np.add)

    def _make(self, key: tuple[object, ...], of: tuple[Table, ...], make: Callable[..., Table]) -> Table:
        """What is made of tables; of the same ones once."""
        if key not in self._made:
            self._made[key] = _Made(table=make(*of), of=of)
        return self._made[key].table


def _least_of_end(own: Table, table: Table) -> Table:
    """What a variable costs at least by its only neighbour's value."""
    found: Table = (own[:, None] + table).min(axis=0)
    return found


def _least_between(own: Table, to_first: Table, to_second: Table) -> Table:
    """What a variable costs at least by the values of both neighbours."""
    found = np.empty((to_first.shape[1], to_second.shape[1]))
    costs = (own[:, None] + to_first).T
    for value, row in enumerate(costs):
        found[value] = (row[:, None] + to_second).min(axis=0)
    return found
