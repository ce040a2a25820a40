"""The exact minimum of a sum of small tables, by eliminating one variable after the other.

A variable takes one of a few values, and a term costs something for each combination of the values of those variables
that it spans. To eliminate a variable, all terms that span it are added up and minimised over it: what is left is one
term over its neighbours. In reverse order every variable then takes the value that its neighbours' leave as the best.
The work is exponential in the neighbours that a variable has when its turn comes, and linear in the variables.

Source: Bertelè and Brioschi, *Nonserial Dynamic Programming* (1972); Dechter, *Bucket elimination* (1999).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Term:
    """What some variables cost together.

    Attributes:
        scope: The variables, in ascending order.
        table: The cost by their values, an axis for each variable.
    """

    scope: tuple[int, ...]
    table: Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """In which order variables are eliminated.

    Attributes:
        variables: Those that are.
        fixed: Those whose value must be fixed before, so that no table becomes too large.
    """

    variables: tuple[int, ...]
    fixed: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """The minimum.

    Attributes:
        cost: The sum of all terms.
        values: Of each variable.
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
    """An order that makes small tables: next is always the variable whose own table is the smallest.

    Where even that has too many entries, the variable with the most others beside it is fixed.

    Args:
        sizes: Values of each variable.
        scopes: Of the terms.
        most_entries: Of one table.
        spared: Variables that are fixed only where no others are left beside the next.
    """
    beside: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for variable in scope:
            beside[variable].update(scope)
    for variable, others in enumerate(beside):
        others.discard(variable)

    def entries_of(variable: int) -> float:
        return sizes[variable] * math.prod(sizes[other] for other in beside[variable])

    heap = [(entries_of(variable), variable) for variable in range(len(sizes))]
    heapq.heapify(heap)
    latest = {variable: entries for entries, variable in heap}

    order: list[int] = []
    fixed: set[int] = set()
    while heap:
        entries, variable = heapq.heappop(heap)
        if latest.get(variable) != entries:
            continue
        if entries > most_entries and beside[variable]:
            heapq.heappush(heap, (entries, variable))
            variable = max(beside[variable], key=lambda other: (other not in spared, len(beside[other]), -other))
            fixed.add(variable)
        else:
            order.append(variable)
            for other in beside[variable]:
                beside[other] |= beside[variable]
                beside[other].discard(other)
        del latest[variable]
        for other in beside[variable]:
            beside[other].discard(variable)
        for other in beside[variable]:
            latest[other] = entries_of(other)
            heapq.heappush(heap, (latest[other], other))
    return Order(variables=tuple(order), fixed=frozenset(fixed))


def least(sizes: Sequence[int], terms: Iterable[Term], variables: Sequence[int]) -> Least:
    """The values at which the terms cost least together.

    Args:
        sizes: Values of each variable.
        terms: Over some of them each.
        variables: All that have several values, in the order in which they are eliminated.
    """
    place = {variable: position for position, variable in enumerate(variables)}
    buckets: list[list[Term]] = [[] for _ in variables]
    constant = 0.0
    for term in terms:
        if term.scope:
            buckets[min(place[variable] for variable in term.scope)].append(term)
        else:
            constant += float(term.table)
    chosen_by: list[tuple[tuple[int, ...], NDArray[np.intp] | None]] = []
    for variable, bucket in zip(variables, buckets, strict=True):
        others = tuple(sorted({other for term in bucket for other in term.scope} - {variable}))
        if not bucket:
            chosen_by.append(((), None))
            continue
        scope = (*others, variable)
        total = _laid_out(bucket[0], scope)
        for term in bucket[1:]:
            total = total + _laid_out(term, scope)
        shape = tuple(sizes[other] for other in scope)
        total = np.broadcast_to(total, shape) if total.shape != shape else total
        best = total.argmin(axis=-1)
        chosen_by.append((others, best))
        rest = np.take_along_axis(total, best[..., None], axis=-1)[..., 0]
        if others:
            buckets[min(place[other] for other in others)].append(Term(scope=others, table=rest))
        else:
            constant += float(rest)
    values = [0] * len(sizes)
    for variable, (others, choice) in reversed(list(zip(variables, chosen_by, strict=True))):
        if choice is not None:
            values[variable] = int(choice[tuple(values[other] for other in others)])
    return Least(cost=constant, values=tuple(values))


def _laid_out(term: Term, scope: Sequence[int]) -> Table:
    """A term's table with an axis for each variable of a scope that holds all of its own."""
    present = [variable for variable in scope if variable in term.scope]
    table: Any = term.table.transpose([term.scope.index(variable) for variable in present])
    return table[tuple(slice(None) if variable in term.scope else None for variable in scope)]  # type: ignore[no-any-return] # numpy's indexing is not typed by shape
