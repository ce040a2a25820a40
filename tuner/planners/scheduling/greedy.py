"""Greedy schedules: operator after operator is placed with all its transfers, with several attempts side by side.

This is list scheduling with a beam. HEFT (Topcuoglu et al. 2002) places one operator after the other where it ends
first. Here the bound on the whole cost decides, and a few partial schedules are kept instead of one. Additions need not
be made in the order of their starts, so that no operator waits for that order.

The bound does not see memory run out, so that all attempts may fill one device and end there. Then the beam begins
again, and the fuller the fullest device is, the more a partial schedule counts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence

from tuner.planners.scheduling.bounds import cost_bounds_s
from tuner.planners.scheduling.memory import peak_bytes
from tuner.planners.scheduling.problem import Workload
from tuner.planners.scheduling.ranks import by_rank
from tuner.planners.scheduling.state import NOWHERE, ScheduleState, with_run, with_transfer
from tuner.planners.scheduling.tables import ScheduleTables

BEAM = 6
"""Number of partial schedules that are kept."""

MOST_READY = 4
"""Most operators that are tried next, those of largest rank (assumed)."""

FILL_WEIGHTS = (0.0, 1.0, 4.0)
"""Weights of the fullest device in one attempt after the other, until one does not run out of memory (assumed)."""

NONE_SPARED: frozenset[int] = frozenset()
"""Value of `untouched` with which every device is tried."""


def complete_greedily(state: ScheduleState, workload: Workload, tables: ScheduleTables) -> ScheduleState | None:
    """Complete a partial schedule; None if every attempt runs out of memory."""
    attempts = (_beam_search(state, workload, tables, fill_weight=weight) for weight in FILL_WEIGHTS)
    return next((found for found in attempts if found), None)


def _beam_search(
    state: ScheduleState, workload: Workload, tables: ScheduleTables, *, fill_weight: float
) -> ScheduleState | None:
    """Complete a partial schedule with several attempts side by side; None if all run out of memory.

    Args:
        state: Partial schedule.
        workload: Workload to schedule.
        tables: Tables of the workload.
        fill_weight: Weight of the share of memory in use on the fullest device, as a share of the bound.
    """
    capacity: list[float] = workload.capacity_bytes.tolist()
    place = {op: at for at, op in enumerate(by_rank(workload, tables))}
    best, best_s = None, math.inf
    beam = [state]
    while beam:
        # the same runs placed in another order are one attempt
        grown = {
            (child.done, child.home, child.end_s): child
            for member in beam
            for child in _placements(member, workload, tables, place)
        }
        children = list(grown.values())
        bounds_s = cost_bounds_s(children, workload, tables).tolist()
        open_ = []
        for child, bound_s in zip(children, bounds_s, strict=True):
            if not all(child.done):
                fill = _fill(child, capacity) if fill_weight else 0.0
                open_.append((bound_s * (1 + fill_weight * fill), sum(child.end_s), child))
            elif bound_s < best_s:
                best, best_s = child, bound_s
        beam = [child for _, _, child in heapq.nsmallest(BEAM, open_, key=lambda entry: entry[:2])]
    return best


def _fill(state: ScheduleState, capacity: Sequence[float]) -> float:
    """Return the share of its memory that the fullest device has in use, at its peak."""
    used = zip(state.used_bytes, state.loans, capacity, strict=True)
    return max((kept + peak_bytes(loans)) / whole for kept, loans, whole in used)


def _placements(
    state: ScheduleState, workload: Workload, tables: ScheduleTables, place: Mapping[int, int]
) -> Iterator[ScheduleState]:
    """Yield the operators of largest rank whose predecessors are done, on every device, with transfers of their inputs.

    Args:
        state: Partial schedule.
        workload: Workload to schedule.
        tables: Tables of the workload.
        place: Place of each operator in the order of ranks.
    """
    ready = (
        op
        for op, is_done in enumerate(state.done)
        if not is_done and all(state.done[producer] for _, producer in tables.before[op])
    )
    for op in heapq.nsmallest(MOST_READY, ready, key=place.__getitem__):
        homes = range(workload.num_devices) if state.home[op] == NOWHERE else (state.home[op],)
        for home in homes:
            supplied = send_inputs(state, workload, tables, op, home)
            if supplied is not None:
                for child in with_run(supplied, workload, tables, op, NONE_SPARED, free_first=True):
                    if child.home[op] == home:
                        yield child._replace(last_s=0.0)


def send_inputs(
    state: ScheduleState, workload: Workload, tables: ScheduleTables, op: int, home: int
) -> ScheduleState | None:
    """Send all inputs of an operator to a device, each over the way of earliest arrival; None if that is impossible."""
    state = state._replace(last_s=0.0)
    for edge, producer in sorted(tables.before[op], key=lambda pair: state.end_s[pair[1]]):
        if state.home[producer] == home or state.sent[edge]:
            continue
        ways = (sent for sent in with_transfer(state, workload, tables, edge, NONE_SPARED) if sent.home[op] == home)
        first = min(ways, key=lambda sent: sent.events[-1].end_s, default=None)
        if first is None:
            return None
        state = first._replace(last_s=0.0)
    return state
