"""Partial placements, and every way to go on from one: the next task, with sets and layouts of its units.

Tasks are added in the order of their starts, each as early as its inputs and its cells allow. Every schedule in which
no task could start earlier is reached so. Cells that are alike (same pool, free at the same time, held by the same
units) are interchangeable: a set is chosen by how many of each kind of cells or hosts it takes, and takes the first
ones. Where there are more than MOST_SPLITS ways, only those are tried that split at most one kind of hosts.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tuner.place.options import WHOLE, Option, SetKind
from tuner.place.search.problem import PlacementProblem
from tuner.place.workload import WEIGHTS

Value = TypeVar("Value")

MOST_SPLITS = 24
"""Most ways to take hosts of several kinds of which all are tried."""

NOT_YET = -1.0


class State(NamedTuple):
    """Partial placement.

    Attributes:
        free_s: Time when each cell is free [cells].
        held: Units on each cell, as bits [cells].
        chosen: Number of each unit's option; -1 while it has none [modules].
        where: Cells of each unit, as bits [modules].
        start_s: Start of each task; NOT_YET before it is added [tasks].
        end_s: End of each task [tasks].
        last: Start and number of the task that was added last.
        pending: Task whose units are being placed; -1 if none.
    """

    free_s: tuple[float, ...]
    held: tuple[int, ...]
    chosen: tuple[int, ...]
    where: tuple[int, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    last: tuple[float, int]
    pending: int

    @property
    def is_complete(self) -> bool:
        """Whether every task has been added."""
        return NOT_YET not in self.end_s


def empty_state(problem: PlacementProblem) -> State:
    """Return the state in which nothing is placed."""
    cells, modules, tasks = problem.num_cells, len(problem.unit_of), len(problem.tasks)
    return State(
        free_s=(0.0,) * cells,
        held=(0,) * cells,
        chosen=(-1,) * modules,
        where=(0,) * modules,
        start_s=(NOT_YET,) * tasks,
        end_s=(NOT_YET,) * tasks,
        last=(0.0, -1),
        pending=-1,
    )


def options_chosen(problem: PlacementProblem, state: State) -> dict[int, Option]:
    """Return the option of each unit that has one."""
    return {unit: problem.options[unit][at] for unit, at in enumerate(state.chosen) if at >= 0}


def finish_s(problem: PlacementProblem, state: State) -> float:
    """Return the end of what was added [s], weights for the next step included."""
    latest = max(0.0, *state.end_s)
    chosen = options_chosen(problem, state)
    for edge in problem.workload.edges:
        if edge.sends == WEIGHTS:
            source, target = problem.unit_of[edge.source], problem.unit_of[edge.target]
            ends = state.end_s[problem.task_of[edge.source]], state.end_s[problem.task_of[edge.target]]
            if NOT_YET not in ends:
                sent_s = problem.weights_s(
                    edge, chosen[source], state.where[source], chosen[target], state.where[target]
                )
                # weights are not replaced while the receiver is at work
                latest = max(latest, max(ends) + sent_s)
    return latest


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bonds:
    """What is settled beforehand.

    Attributes:
        cells: Cells that a unit may have, as bits; units that are not named may have any.
        options: Number of the only option that a unit may have.
        marks: Number of each cell; cells with unlike numbers are not interchangeable [cells].
    """

    cells: Mapping[int, tuple[int, ...]]
    options: Mapping[int, int]
    marks: tuple[int, ...]

    def allows(self, problem: PlacementProblem, unit: int, number: int) -> bool:
        """Return whether a unit may have an option on some cells."""
        if self.options.get(unit, number) != number:
            return False
        kind = problem.options[unit][number].kind
        return unit not in self.cells or any(problem.same_cells(kind, cells) for cells in self.cells[unit])


def bonds_of(
    problem: PlacementProblem, cells: Mapping[int, tuple[int, ...]], options: Mapping[int, int] | None = None
) -> Bonds:
    """Bind units to cells, and to options."""
    sets = sorted({one for allowed in cells.values() for one in allowed})
    marks = tuple(
        sum(1 << number for number, one in enumerate(sets) if one >> cell & 1) for cell in range(problem.num_cells)
    )
    return Bonds(cells=cells, options=options or {}, marks=marks)


def next_states(problem: PlacementProblem, state: State, bonds: Bonds) -> Iterator[State]:
    """Yield the states with one more decision."""
    if state.pending >= 0:
        yield from _place_next(problem, state, state.pending, bonds)
        return
    for task, waits in enumerate(problem.before):
        if state.end_s[task] == NOT_YET and all(state.end_s[before] != NOT_YET for before, _ in waits):
            yield from _place_next(problem, state, task, bonds)


def _place_next(problem: PlacementProblem, state: State, task: int, bonds: Bonds) -> Iterator[State]:
    """Yield the states in which the next unit of a task is placed; the task is added after its last unit."""
    open_units = [unit for unit in problem.units_of[task] if state.chosen[unit] < 0]
    if not open_units:
        added = _add(problem, state, task)
        if added is not None:
            yield added
        return
    unit = open_units[0]
    sets: dict[SetKind, list[int]] = {}
    chosen = options_chosen(problem, state)
    where = {other: state.where[other] for other in chosen}
    for number, option in enumerate(problem.options[unit]):
        if bonds.options.get(unit, number) != number:
            continue
        if option.kind not in sets:
            sets[option.kind] = [
                cells
                for cells in _sets(problem, state, option.kind, bonds, unit)
                if problem.may_have(unit, cells, where)
            ]
        for cells in sets[option.kind]:
            held = list(state.held)
            for cell in bits_of(cells):
                held[cell] |= 1 << unit
            chosen[unit] = option
            seen = {(held[cell], problem.pool_of_cell[cell]) for cell in bits_of(cells)}
            if not all(problem.fits(one, problem.pools[pool].capacity_bytes, chosen) for one, pool in seen):
                continue
            placed = state._replace(
                held=tuple(held),
                chosen=_with(state.chosen, unit, number),
                where=_with(state.where, unit, cells),
                pending=task,
            )
            if len(open_units) > 1:
                yield placed
                continue
            added = _add(problem, placed, task)
            if added is not None:
                yield added
    chosen.pop(unit, None)


def scheduled(
    problem: PlacementProblem, chosen: Mapping[int, int], where: Mapping[int, int], order: Sequence[int]
) -> State:
    """Return the complete placement in which tasks are added in a given order, each as early as it can start.

    Args:
        problem: Tables of the workload.
        chosen: Number of each unit's option.
        where: Cells of each unit, as bits.
        order: Tasks, each after those that it waits for.
    """
    state = empty_state(problem)
    held = [0] * problem.num_cells
    for unit, cells in where.items():
        for cell in bits_of(cells):
            held[cell] |= 1 << unit
    modules = range(len(problem.unit_of))
    state = state._replace(
        held=tuple(held),
        chosen=tuple(chosen.get(unit, -1) for unit in modules),
        where=tuple(where.get(unit, 0) for unit in modules),
    )
    for task in order:
        added = _add(problem, state._replace(last=(0.0, -1)), task)
        assert added is not None, "no start is before the first"
        state = added
    return state


def _add(problem: PlacementProblem, state: State, task: int) -> State | None:
    """Return the state with a task whose units are placed; None if it would start before the last one added."""
    chosen = options_chosen(problem, state)
    where = {unit: state.where[unit] for unit in chosen}
    cells = 0
    for unit in problem.units_of[task]:
        cells |= where[unit]
    start_s = 0.0
    for before, edge in problem.before[task]:
        source, target = problem.unit_of[edge.source], problem.unit_of[edge.target]
        sent_s = problem.edge_s(edge, chosen[source], where[source], chosen[target], where[target])
        start_s = max(start_s, state.end_s[before] + sent_s)
    at = bits_of(cells)
    start_s = max(start_s, *(state.free_s[cell] for cell in at))
    if (start_s, task) < state.last:
        return None
    end_s = start_s + problem.task_time_s(task, chosen, where)
    free_s = list(state.free_s)
    for cell in at:
        free_s[cell] = end_s
    return state._replace(
        free_s=tuple(free_s),
        start_s=_with(state.start_s, task, start_s),
        end_s=_with(state.end_s, task, end_s),
        last=(start_s, task),
        pending=-1,
    )


def _sets(problem: PlacementProblem, state: State, kind: SetKind, bonds: Bonds, unit: int) -> Iterator[int]:
    """Yield sets of cells of a kind, one of each that differ in more than the names of like cells."""
    if unit in bonds.cells:
        yield from (cells for cells in bonds.cells[unit] if problem.same_cells(kind, cells))
        return
    if kind.pool == WHOLE:
        yield problem.whole
        return
    marks = tuple(zip(state.free_s, state.held, bonds.marks, strict=True))
    alike: dict[tuple[tuple[float, int, int], ...], list[list[int]]] = defaultdict(list)
    for pool, first, last in problem.hosts:
        if pool == kind.pool:
            ordered = sorted(range(first, last), key=marks.__getitem__)
            alike[tuple(marks[cell] for cell in ordered)].append(ordered)
    if kind.cells == problem.pools[kind.pool].cells:
        classes = [alike[key] for key in sorted(alike)]
        for counts in _counts(tuple(map(len, classes)), kind.hosts):
            taken = [host for members, count in zip(classes, counts, strict=True) for host in members[:count]]
            yield sum(1 << cell for host in taken for cell in host)
        return
    for signature, members in sorted(alike.items()):
        own: dict[tuple[float, int, int], list[int]] = defaultdict(list)
        for mark, cell in zip(signature, members[0], strict=True):
            own[mark].append(cell)
        parts = list(own.values())
        for counts in _counts(tuple(map(len, parts)), kind.cells):
            yield sum(1 << cell for part, count in zip(parts, counts, strict=True) for cell in part[:count])


def _counts(sizes: tuple[int, ...], wanted: int) -> list[tuple[int, ...]]:
    """Return the ways to take a number of things from classes of these sizes."""
    if sum(sizes) < wanted:
        return []
    found = _all_counts(sizes, wanted, MOST_SPLITS + 1)
    if len(found) <= MOST_SPLITS:
        return found
    some = set()
    for whole in itertools.product((0, 1), repeat=len(sizes)):
        counts = [size * taken for size, taken in zip(sizes, whole, strict=True)]
        rest = wanted - sum(counts)
        if rest == 0:
            some.add(tuple(counts))
        for at, size in enumerate(sizes):
            if not whole[at] and 0 < rest < size:
                some.add((*counts[:at], rest, *counts[at + 1 :]))
    return sorted(some, reverse=True)


def _all_counts(sizes: tuple[int, ...], wanted: int, most: int) -> list[tuple[int, ...]]:
    """Return the first `most` ways to take a number of things from classes of these sizes."""
    if not sizes:
        return [()] if wanted == 0 else []
    found: list[tuple[int, ...]] = []
    for count in range(min(sizes[0], wanted), max(0, wanted - sum(sizes[1:])) - 1, -1):
        found += [(count, *rest) for rest in _all_counts(sizes[1:], wanted - count, most - len(found))]
        if len(found) >= most:
            break
    return found


@functools.lru_cache(maxsize=100_000)
def bits_of(cells: int) -> tuple[int, ...]:
    """Return the numbers of the cells that are set in `cells`."""
    found = []
    while cells:
        low = cells & -cells
        found.append(low.bit_length() - 1)
        cells ^= low
    return tuple(found)


def _with(values: tuple[Value, ...], at: int, value: Value) -> tuple[Value, ...]:
    return (*values[:at], value, *values[at + 1 :])
