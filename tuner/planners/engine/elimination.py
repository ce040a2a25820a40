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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
"""Costs by the values of some variables, with an axis for each."""


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
    place = [0] * len(sizes)
    for position, variable in enumerate(variables):
        place[variable] = position
    # A term waits in the bucket of the first of its variables that is eliminated: the variables of all terms there, one
    # term after the other, and their tables.
    waiting: list[tuple[list[int], list[Table]]] = [([], []) for _ in variables]
    constant = 0.0
    for scope, table in terms:
        if scope:
            bucket, tables = waiting[min([place[variable] for variable in scope])]
            bucket += scope
            tables.append(table)
        else:
            constant += float(table)
    chosen_by: list[tuple[tuple[int, ...], NDArray[np.intp] | None]] = []
    for variable, (bucket, tables) in zip(variables, waiting, strict=True):
        if not tables:
            chosen_by.append(((), None))
            continue
        others = tuple(sorted(set(bucket) - {variable}))
        # The eliminated variable is the last axis of the sum.
        scope = (*others, variable)
        at = dict(zip(scope, range(len(scope)), strict=True))
        axes = tuple([at[other] for other in bucket])
        key = (tuple(map(id, tables)), axes)
        if key not in known:
            known[key] = _eliminate(tables, axes, tuple([sizes[other] for other in scope]))
        best, rest, _ = known[key]
        chosen_by.append((others, best))
        if others:
            later, later_tables = waiting[min([place[other] for other in others])]
            later += others
            later_tables.append(rest)
        else:
            constant += float(rest)
    # Going backwards, the values of a variable's neighbours are known when it chooses its own.
    values = [0] * len(sizes)
    for variable, (others, choice) in zip(reversed(variables), reversed(chosen_by), strict=True):
        if choice is not None:
            values[variable] = int(choice[tuple([values[other] for other in others])])
    return Least(cost=constant, values=tuple(values))


def _eliminate(
    tables: Sequence[Table], axes: Sequence[int], shape: tuple[int, ...]
) -> tuple[NDArray[np.intp], Table, tuple[Table, ...]]:
    """Add up tables and minimise the sum over its last axis.

    Args:
        tables: Tables to add up.
        axes: Axis of the sum for each axis of each table, one table after the other.
        shape: Shape of the sum.

    Returns:
        Index of the least entry of each row; the least entries; and the tables, which are kept alive so that their
            identities stay unique.
    """
    total: Any = 0.0
    begin = 0
    for table in tables:
        total = total + _lay_out(table, axes[begin : begin + table.ndim], len(shape))
        begin += table.ndim
    if total.shape != shape:
        total = np.broadcast_to(total, shape)
    return total.argmin(axis=-1), total.min(axis=-1), tuple(tables)


def _lay_out(table: Table, axes: Sequence[int], num_axes: int) -> Table:
    """Return a table with these axes among those of a sum."""
    order = sorted(axes)
    if list(axes) != order:
        table = table.transpose([axes.index(axis) for axis in order])
    if len(axes) == num_axes:
        return table
    return table[tuple([slice(None) if axis in order else None for axis in range(num_axes)])]
