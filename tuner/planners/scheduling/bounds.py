"""Lower bounds of the costs of partial schedules; computed for many at once, which is ten times as fast.

Three lower bounds hold for the end of each model:

- Its critical path. Every operator that has not run starts on a device when that is free and its inputs have come. Each
  input takes the way on which it arrives first, as if nothing else were sent. At least its quickest successors follow
  it.
- Operators that share a home run one after the other on the device on which all of them together end first.
- Its load. The remaining work is spread over all devices, each from the time when it is free. With any weights of the
  devices that add up to 1, a second of device d counts as weight d, and an operator takes at least the least of its
  weighted times. All devices together give until T no less than all operators take (the dual of the linear program that
  splits operators at will).

For a set of models the last bound holds together: they can't all be complete before the work of all is done. The
bound is the least weighted sum of completion times that allows each set its load and each model the other two. In it,
the models end one after the other. It is therefore found by a recursion over sets, in which the last model to end waits
for the load of the whole set.

Letters as in `problem`; N states, W ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hardware.arrays import FloatArray, IntArray
from tuner.planners.scheduling.problem import Workload
from tuner.planners.scheduling.state import NOWHERE, SLACK, ScheduleState
from tuner.planners.scheduling.tables import ScheduleTables


class _States(NamedTuple):
    """States as arrays, with fields as in `ScheduleState`.

    Attributes:
        done: Whether each operator has been added [N, V].
        sent: Whether each edge's data have been sent [N, E].
        home: Home of each operator, or NOWHERE [N, V].
        end_s: End of each operator, or last arrival of its inputs [N, V].
        device_s: Time when each device is free [N, D].
        way_s: Time when all links and ports of each way are free [N, W].
        room_bytes: Free memory of each device [N, D].
        last_s: Start of the last addition [N].
    """

    done: NDArray[np.bool_]  # [N, V]
    sent: NDArray[np.bool_]  # [N, E]
    home: IntArray  # [N, V]
    end_s: FloatArray  # [N, V]
    device_s: FloatArray  # [N, D]
    way_s: FloatArray  # [N, W]
    room_bytes: FloatArray  # [N, D]
    last_s: FloatArray  # [N]


def cost_bounds_s(states: Sequence[ScheduleState], workload: Workload, tables: ScheduleTables) -> FloatArray:
    """Return a lower bound of the weighted sum of every schedule that begins with a state; inf if there is none [N]."""
    if not states:
        return np.zeros(0)
    arrays = _arrays(states, workload, tables)
    path_s = np.maximum(_path_ends_s(arrays, workload, tables), _mates_ends_s(arrays, workload, tables))
    # A complete model adds its end to the bound.
    is_complete = np.stack([arrays.done[:, list(ops)].all(axis=1) for ops in tables.ops_of], axis=1)
    settled_s = np.where(is_complete, path_s, 0.0) @ workload.weights
    # a complete model has no work left and no say; it may come anywhere in the order of the others
    weights = np.where(is_complete, 0.0, workload.weights)
    path_s = np.where(is_complete, 0.0, path_s)
    # Work left of each model [N, n], and devices in the order in which they are free [N, D].
    work_s = np.stack([~arrays.done[:, list(ops)] @ tables.least_work_s[list(ops)] for ops in tables.ops_of], axis=1)
    free_s = np.maximum(arrays.device_s, arrays.last_s[:, None])
    order = free_s.argsort(axis=1)
    free_s = np.take_along_axis(free_s, order, axis=1)
    weight = tables.device_weight[order]
    given, given_s = weight.cumsum(axis=1), (weight * free_s).cumsum(axis=1)
    least_s = [np.zeros(len(states))]
    for models in range(1, 1 << len(tables.ops_of)):
        members = [model for model in range(len(tables.ops_of)) if models >> model & 1]
        # the devices that are free first do the work; too few or too many of them only seem to end later
        # With the first k devices, T is the work plus the weighted times at which they become free, over their weights.
        # The least T over all k is the bound.
        load_s = ((work_s[:, members].sum(axis=1)[:, None] + given_s) / given).min(axis=1)
        ways = [
            least_s[models & ~(1 << model)] + weights[:, model] * np.maximum(path_s[:, model], load_s)
            for model in members
        ]
        least_s.append(np.min(ways, axis=0))
    return np.asarray(settled_s + least_s[-1])


def _arrays(states: Sequence[ScheduleState], workload: Workload, tables: ScheduleTables) -> _States:
    """Convert states to arrays."""
    count = len(states)
    link_s = np.array([state.link_s for state in states]).reshape(count, -1)
    # A way is free when the last of its links and ports is.
    way_s = np.full((count, len(tables.way_holds)), -np.inf)
    for way, held in enumerate(tables.way_holds):
        way_s[:, way] = link_s[:, held[0]] if len(held) == 1 else link_s[:, list(held)].max(axis=1)
    used = np.array([state.used_bytes for state in states])
    return _States(
        done=np.array([state.done for state in states]),
        sent=np.array([state.sent for state in states]).reshape(count, -1),
        home=np.array([state.home for state in states]),
        end_s=np.array([state.end_s for state in states]),
        device_s=np.array([state.device_s for state in states]),
        way_s=way_s,
        room_bytes=workload.capacity_bytes * (1 + SLACK) - used,
        last_s=np.array([state.last_s for state in states]),
    )


def _path_ends_s(states: _States, workload: Workload, tables: ScheduleTables) -> FloatArray:
    """Return the earliest end of each model by its critical path [N, n]; inf where an operator can run nowhere."""
    ends_s = np.zeros((len(states.last_s), len(tables.ops_of)))
    free_s = np.maximum(states.device_s, states.last_s[:, None])
    ready_s: list[FloatArray] = []
    devices = np.arange(workload.num_devices)
    for op, model in enumerate(workload.model_of.tolist()):
        is_done = states.done[:, op]
        own_s = states.end_s[:, op]
        home = states.home[:, op][:, None]
        # of a done operator the data are at home, from its end on
        at_home_s = np.where(home == devices, own_s[:, None], np.inf)
        if is_done.all():
            ends_s[:, model] = np.maximum(ends_s[:, model], own_s)
            ready_s.append(at_home_s)
            continue
        # what was sent has settled the home, and its last arrival is the operator's `end_s`
        start_s = np.maximum(free_s, own_s[:, None])
        for edge, producer in tables.before[op]:
            start_s = np.maximum(start_s, _arrivals_s(states, tables, edge, producer, ready_s[producer]))
        end_s = start_s + tables.least_exec_s[op]
        # An operator can't run where its home is another device, or where its memory does not fit.
        end_s[((home != NOWHERE) & (home != devices)) | (tables.least_bytes[op] > states.room_bytes)] = np.inf
        least_s = np.where(is_done, own_s, (end_s + tables.to_end_s[op]).min(axis=1))
        ends_s[:, model] = np.maximum(ends_s[:, model], least_s)
        ready_s.append(np.where(is_done[:, None], at_home_s, end_s))
    return ends_s


def _mates_ends_s(states: _States, workload: Workload, tables: ScheduleTables) -> FloatArray:
    """Return the earliest end of each model by operators that share a home, which runs one after the other [N, n]."""
    ends_s = np.zeros((len(states.last_s), len(tables.ops_of)))
    free_s = np.maximum(states.device_s, states.last_s[:, None])
    devices = np.arange(workload.num_devices)
    for mates in workload.mates:
        models = set(workload.model_of[list(mates)].tolist())
        if len(models) > 1:
            continue  # which of the models ends with the last of them is open
        end_s = free_s.copy()
        for op in mates:
            end_s += np.where(states.done[:, op][:, None], 0.0, tables.least_exec_s[op])
        home = states.home[:, mates[0]][:, None]
        end_s[(home != NOWHERE) & (home != devices)] = np.inf
        is_open = ~states.done[:, list(mates)].all(axis=1)
        (model,) = models
        ends_s[:, model] = np.maximum(ends_s[:, model], np.where(is_open, end_s.min(axis=1), 0.0))
    return ends_s


def _arrivals_s(states: _States, tables: ScheduleTables, edge: int, producer: int, ready_s: FloatArray) -> FloatArray:
    """Return when an edge's data can be at each device [N, D]; 0 where they were sent.

    Args:
        states: Partial schedules.
        tables: Tables of the workload.
        edge: Number of the edge.
        producer: Operator that makes the data.
        ready_s: Time when the data are ready on each device, if the producer runs there [N, D].
    """
    is_done = states.done[:, producer]
    if not is_done.any():
        return np.asarray((ready_s[:, :, None] + tables.transfer_s[edge]).min(axis=1))
    # over ways as they are free now
    arrivals_s = ready_s.copy()
    if len(tables.way_holds):
        begin_s = np.maximum(states.last_s, states.end_s[:, producer])[:, None]
        over_s = np.maximum(begin_s, states.way_s) + tables.each_way_s[edge]
        # Ways that do not begin at the producer's device can't be used.
        over_s[states.home[:, producer][:, None] != tables.way_source] = np.inf
        first = np.minimum.reduceat(over_s, tables.way_first, axis=1)
        targets = tables.way_targets
        arrivals_s[:, targets] = np.minimum(arrivals_s[:, targets], first)
    arrivals_s[states.sent[:, edge]] = 0.0
    # A producer that has not run may run anywhere, over the quickest way from there.
    if not is_done.all():
        freely_s = (ready_s[:, :, None] + tables.transfer_s[edge]).min(axis=1)
        arrivals_s = np.where(is_done[:, None], arrivals_s, freely_s)
    return arrivals_s
