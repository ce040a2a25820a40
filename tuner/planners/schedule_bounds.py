"""A lower bound on what a partial schedule costs once it is complete.

Two things hold each model up, whatever is done:

- Its critical path. Every operator still to run starts on a device when that is free and its inputs have come, each
  input taking the way on which it comes first, as if nothing else were sent. After it, at least its quickest
  successors follow.
- Its load. The work that is left is spread over all devices, each from when it is free on. With any weights of the
  devices that add up to 1, a second of device d counts weight d; an operator takes at least the least of its weighted
  times; and what all devices give until T is no less than what all operators take (the dual of the linear program that
  splits operators at will).

For a set of models the second holds together: they can't all be complete before the work of all is done. The bound is
the least weighted sum of completion times that grants each set its load and each model its path. In it the models end
one after the other, so it is found by a recursion over sets: the last to end takes the load of all.

Letters as in `scheduling`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner.planners.schedule_state import NOWHERE, SLACK, ScheduleState
from tuner.planners.schedule_tables import ScheduleTables
from tuner.planners.scheduling import Workload


def cost_bound_s(state: ScheduleState, workload: Workload, tables: ScheduleTables) -> float:
    """No complete schedule that begins so has a lower weighted sum; inf where none is possible."""
    path_s = _path_ends_s(state, workload, tables)
    if path_s is None:
        return math.inf
    weights: list[float] = workload.weights.tolist()
    left = [model for model, ops in enumerate(tables.ops_of) if not all(state.done[op] for op in ops)]
    settled_s = sum(weights[model] * path_s[model] for model in range(len(weights)) if model not in left)
    work_s = [sum(tables.least_work_s[op] for op in tables.ops_of[model] if not state.done[op]) for model in left]
    free_s = sorted(
        (max(free, state.last_s), weight) for free, weight in zip(state.device_s, tables.device_weight, strict=True)
    )
    least_s = [0.0] * (1 << len(left))
    for models in range(1, len(least_s)):
        members = [at for at in range(len(left)) if models >> at & 1]
        load_s = _load_end_s(free_s, sum(work_s[at] for at in members))
        least_s[models] = min(
            least_s[models & ~(1 << at)] + weights[left[at]] * max(path_s[left[at]], load_s) for at in members
        )
    return settled_s + least_s[-1]


def _load_end_s(free_s: Sequence[tuple[float, float]], work_s: float) -> float:
    """When all work can be done at the earliest.

    Args:
        free_s: From when on each device is free, and its weight; in rising order.
        work_s: In weighted seconds.
    """
    end_s, total_s, weights = 0.0, work_s, 0.0
    for free, weight in free_s:
        if weights and total_s <= free * weights:
            break
        total_s += free * weight
        weights += weight
        end_s = total_s / weights
    return end_s


def _path_ends_s(state: ScheduleState, workload: Workload, tables: ScheduleTables) -> list[float] | None:
    """The earliest end of each model by its critical path [n]; None where an operator can run nowhere."""
    ends_s = [0.0] * len(tables.ops_of)
    ready: dict[int, list[float]] = {}
    room = [
        capacity * (1 + SLACK) - used
        for capacity, used in zip(workload.capacity_bytes.tolist(), state.used_bytes, strict=True)
    ]
    models = workload.model_of.tolist()
    for op, is_done in enumerate(state.done):
        if is_done:
            ends_s[models[op]] = max(ends_s[models[op]], state.end_s[op])
            continue
        least_s = math.inf
        ends_on = []
        for device, exec_s in enumerate(tables.least_exec_s[op]):
            end_s = math.inf
            if state.home[op] in {NOWHERE, device} and tables.least_bytes[op] <= room[device]:
                end_s = _start_s(state, tables, op, device, ready) + exec_s
            ends_on.append(end_s)
            least_s = min(least_s, end_s + tables.to_end_s[op][device])
        if math.isinf(least_s):
            return None
        ready[op] = ends_on
        ends_s[models[op]] = max(ends_s[models[op]], least_s)
    return ends_s


def _start_s(
    state: ScheduleState, tables: ScheduleTables, op: int, device: int, ready: dict[int, list[float]]
) -> float:
    """The earliest start of an operator on a device.

    Args:
        state: The partial schedule.
        tables: Of the workload.
        op: Not yet done.
        device: On which it may run.
        ready: The earliest end of its predecessors that are not done, on each device.
    """
    start_s = max(state.last_s, state.device_s[device])
    if state.home[op] != NOWHERE:
        start_s = max(start_s, state.end_s[op])
    for edge, producer in tables.before[op]:
        if not state.done[producer]:
            transfer_s = tables.transfer_s[edge]
            arrives_s = min(end + transfer_s[at][device] for at, end in enumerate(ready[producer]))
        elif state.home[producer] == device:
            arrives_s = state.end_s[producer]
        elif state.sent[edge]:
            continue  # its arrival is among those that settled the home
        else:
            arrives_s = _arrival_s(state, tables, edge, producer, device)
        start_s = max(start_s, arrives_s)
    return start_s


def _arrival_s(state: ScheduleState, tables: ScheduleTables, edge: int, producer: int, device: int) -> float:
    """When data that are ready but not sent can be at a device, over the ways as they are free now."""
    source = state.home[producer]
    begin_s = max(state.last_s, state.end_s[producer])
    return min(
        (
            max(begin_s, *(state.link_s[link] for link in way.links)) + tables.way_s[edge][source, device][at]
            for at, way in enumerate(tables.ways.get((source, device), ()))
        ),
        default=math.inf,
    )
