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
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


Known = dict[tuple[tuple[int, ...], ...], tuple[NDArray[np.intp], Table, tuple[Table, ...]]]
"""Eliminations of variables, by the identities of the tables that were added up and the axes that each of them took."""


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
    # A term waits in the bucket of the first of its variables that is eliminated.
    buckets: list[list[Term]] = [[] for _ in variables]
    constant = 0.0
    for scope, table in terms:
        if scope:
            buckets[min([place[variable] for variable in scope])].append(Term(scope, table))
        else:
            constant += float(table)
    chosen_by: list[tuple[tuple[int, ...], NDArray[np.intp] | None]] = []
    for variable, bucket in zip(variables, buckets, strict=True):
        if not bucket:
            chosen_by.append(((), None))
            continue
        others = tuple(sorted({other for scope, _ in bucket for other in scope if other != variable}))
        # The eliminated variable is the last axis of the sum.
        at = {other: axis for axis, other in enumerate((*others, variable))}
        key = tuple([(id(table), *[at[other] for other in scope]) for scope, table in bucket])
        if key not in known:
            known[key] = _eliminate(bucket, at, tuple([sizes[other] for other in at]))
        best, rest, _ = known[key]
        chosen_by.append((others, best))
        if others:
            buckets[min([place[other] for other in others])].append(Term(others, rest))
        else:
            constant += float(rest)
    # Going backwards, the values of a variable's neighbours are known when it chooses its own.
    values = [0] * len(sizes)
    for variable, (others, choice) in zip(reversed(variables), reversed(chosen_by), strict=True):
        if choice is not None:
            values[variable] = int(choice[tuple([values[other] for other in others])])
    return Least(cost=constant, values=tuple(values))


def _eliminate(
    bucket: Sequence[Term], at: Mapping[int, int], shape: tuple[int, ...]
) -> tuple[NDArray[np.intp], Table, tuple[Table, ...]]:
    """Add up tables and minimise the sum over its last axis.

    Args:
        bucket: Terms with these tables.
        at: Axis of the sum that belongs to each variable.
        shape: Shape of the sum.

    Returns:
        Index of the least entry of each row; the least entries; and the tables, which are kept alive so that their
            identities stay unique.
    """
    total = _lay_out(bucket[0], at)
    for term in bucket[1:]:
        total = total + _lay_out(term, at)
    if total.shape != shape:
        total = np.broadcast_to(total, shape)
    return total.argmin(axis=-1), total.min(axis=-1), tuple(table for _, table in bucket)


def _lay_out(term: Term, at: Mapping[int, int]) -> Table:
    """Return a term's table with an axis for each variable of a larger scope."""
    scope, table = term
    axes = [at[variable] for variable in scope]
    if axes != sorted(axes):
        table = table.transpose(sorted(range(len(axes)), key=axes.__getitem__))
    if len(axes) == len(at):
        return table
    present = set(axes)
    return table[tuple([slice(None) if axis in present else None for axis in range(len(at))])]
