"""Exact minimum of a sum of small tables, by variable elimination.

A variable takes one of a few values. A term has a cost for each combination of values of the variables in its scope. To
eliminate a variable, all terms with it in their scope are added up and minimised over it, which leaves one term over
its neighbours. In reverse order, every variable then takes the best value for the values of its neighbours. The work is
exponential in the number of neighbours that a variable has at its turn, and linear in the variables.

Source: Bertelè and Brioschi, *Nonserial Dynamic Programming* (1972); Dechter, *Bucket elimination* (1999).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
"""Costs by the values of some variables, with an axis for each."""


MANY_TERMS = 1000
"""Number of terms above which the order of the work is not kept for later calls."""


class Term(NamedTuple):
    """Cost of some variables together.

    Attributes:
        scope: Variables in ascending order.
        table: Cost by their values, with an axis for each variable.
    """

    scope: tuple[int, ...]
    table: Table


Known = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[NDArray[np.intp], Table, tuple[Table, ...]]]
"""Eliminations of variables, by the identities of the tables that were added up and the axes that they took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Order of elimination.

    Attributes:
        variables: Variables to eliminate, in their order.
        fixed: Variables to fix beforehand, so that no table becomes too large.
    """

    variables: tuple[int, ...]
    fixed: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """Minimum of a sum of terms.

    Attributes:
        cost: Sum of all terms.
        values: Value of each variable.
    """

    cost: float
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """Elimination of one variable.

    Attributes:
        variable: Variable that is eliminated.
        others: Its neighbours.
        tables: Numbers of the tables that are added up; the rest of each elimination has the next number.
        axes: Axis of the sum for each axis of each table, one table after the other.
        lays: How each table lies among the axes of the sum.
        shape: Shape of the sum.
    """

    variable: int
    others: tuple[int, ...]
    tables: tuple[int, ...]
    axes: tuple[int, ...]
    lays: tuple[tuple[tuple[int, ...] | None, tuple[slice | None, ...] | None], ...]
    shape: tuple[int, ...]


def cheapest_order(
    sizes: Sequence[int],
    scopes: Iterable[Sequence[int]],
    *,
    most_entries: float = math.inf,
    spared: Container[int] = (),
) -> Order:
    """Choose an order with small tables: the next variable is always the one whose own table is the smallest.

    Where even that table has too many entries, the variable with the most neighbours is fixed.

    Args:
        sizes: Number of values of each variable.
        scopes: Scopes of the terms.
        most_entries: Most entries of one table.
        spared: Variables that are fixed only if the next one has no other neighbours.
    """
    beside: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for variable in scope:
            beside[variable].update(scope)
    for variable, others in enumerate(beside):
        others.discard(variable)

    def entries_of(variable: int) -> int:
        found = sizes[variable]
        for other in beside[variable]:
            found *= sizes[other]
        return found

    # A variable without neighbours can go at any time.
    order = [variable for variable, others in enumerate(beside) if not others]
    # Sizes in the heap may be outdated. `latest` holds the valid one of each variable that is left.
    latest = {variable: entries_of(variable) for variable, others in enumerate(beside) if others}
    heap = [(entries, variable) for variable, entries in latest.items()]
    heapq.heapify(heap)

    fixed: set[int] = set()
    while heap:
        entries, variable = heapq.heappop(heap)
        if latest.get(variable) != entries:
            continue
        # Fixing a neighbour makes this table smaller; the variable comes again afterwards.
        if entries > most_entries and beside[variable]:
            heapq.heappush(heap, (entries, variable))
            variable = max(beside[variable], key=lambda other: (other not in spared, len(beside[other]), -other))
            fixed.add(variable)
            around = beside[variable]
            for other in around:
                beside[other].discard(variable)
        else:
            order.append(variable)
            around = beside[variable]
            for other in around:
                others = beside[other]
                others |= around
                others.discard(other)
                others.discard(variable)
        del latest[variable]
        for other in around:
            now = entries_of(other)
            if now != latest[other]:
                latest[other] = now
                heapq.heappush(heap, (now, other))
    return Order(variables=tuple(order), fixed=frozenset(fixed))


def least(sizes: Sequence[int], terms: Iterable[Term], variables: Sequence[int], known: Known | None = None) -> Least:
    """Find the values for which the sum of the terms is least.

    Variables whose terms share the same tables, as those of repeated layers do, are eliminated once.

    Args:
        sizes: Number of values of each variable.
        terms: Terms over some of the variables.
        variables: Variables with several values, in the order of their elimination.
        known: Eliminations of earlier calls, to which those of this one are added; None for none.
    """
    known = {} if known is None else known
    scopes, tables = [], []
    constant = 0.0
    for scope, table in terms:
        if scope:
            scopes.append(scope)
            tables.append(table)
        else:
            constant += float(table)
    turns = (_turns if len(scopes) <= MANY_TERMS else _turns.__wrapped__)(tuple(sizes), tuple(scopes), tuple(variables))
    chosen_by = []
    for turn in turns:
        own = [tables[number] for number in turn.tables]
        key = (tuple(map(id, own)), turn.axes)
        if key not in known:
            known[key] = _eliminate(own, turn)
        best, rest, _ = known[key]
        chosen_by.append(best)
        tables.append(rest)
        if not turn.others:
            constant += float(rest)
    # Going backwards, the values of a variable's neighbours are known when it chooses its own.
    values = [0] * len(sizes)
    for turn, choice in zip(reversed(turns), reversed(chosen_by), strict=True):
        values[turn.variable] = int(choice[tuple([values[other] for other in turn.others])])
    return Least(cost=constant, values=tuple(values))


@lru_cache(maxsize=512)
def _turns(
    sizes: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], variables: tuple[int, ...]
) -> tuple[_Turn, ...]:
    """Return the eliminations of variables, which are the same for tables with the same axes."""
    place = [0] * len(sizes)
    for position, variable in enumerate(variables):
        place[variable] = position
    # A term waits in the bucket of the first of its variables that is eliminated. What an elimination leaves is a term
    # as well, whose number follows those of the others.
    waiting: list[list[int]] = [[] for _ in variables]
    all_scopes = list(scopes)
    for number, scope in enumerate(scopes):
        waiting[min([place[variable] for variable in scope])].append(number)
    turns = []
    for variable, numbers in zip(variables, waiting, strict=True):
        if not numbers:
            continue
        bucket = [other for number in numbers for other in all_scopes[number]]
        others = tuple(sorted(set(bucket) - {variable}))
        # The eliminated variable is the last axis of the sum.
        scope = (*others, variable)
        at = dict(zip(scope, range(len(scope)), strict=True))
        turns.append(
            _Turn(
                variable=variable,
                others=others,
                tables=tuple(numbers),
                axes=tuple([at[other] for other in bucket]),
                lays=tuple([_lay_of(tuple([at[other] for other in all_scopes[each]]), len(scope)) for each in numbers]),
                shape=tuple([sizes[other] for other in scope]),
            )
        )
        if others:
            waiting[min([place[other] for other in others])].append(len(all_scopes))
        all_scopes.append(others)
    return tuple(turns)


def _eliminate(tables: Sequence[Table], turn: _Turn) -> tuple[NDArray[np.intp], Table, tuple[Table, ...]]:
    """Add up tables and minimise the sum over its last axis.

    Returns:
        Index of the least entry of each row; the least entries; and the tables, which are kept alive so that their
            identities stay unique.
    """
    total: Any = 0.0
    for table, (order, index) in zip(tables, turn.lays, strict=True):
        laid = table if order is None else table.transpose(order)
        total = total + (laid if index is None else laid[index])
    if total.shape != turn.shape:
        total = np.broadcast_to(total, turn.shape)
    return total.argmin(axis=-1), total.min(axis=-1), tuple(tables)


@lru_cache(maxsize=2**12)
def _lay_of(axes: tuple[int, ...], num_axes: int) -> tuple[tuple[int, ...] | None, tuple[slice | None, ...] | None]:
    """Return how a table with these axes lies among those of a sum: the order of its axes, and where it has none."""
    order = sorted(axes)
    index = None if len(axes) == num_axes else tuple([slice(None) if at in order else None for at in range(num_axes)])
    return (None if list(axes) == order else tuple([axes.index(axis) for axis in order])), index
