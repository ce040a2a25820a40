"""Schedules by simple rules, which stand beside those of the search.

- one device: every operator on the one device on which all of them cost least, model after model.
- HEFT (Topcuoglu et al. 2002, section 4.1): operators in the order of their upward ranks, each on the device where it
  ends first. The upward rank is the mean time of an operator and of the longest way from it to an end, transfers
  included, here times the weight of its model. Operators and transfers are appended; gaps before them stay.

Neither splits nor fuses operators.
"""

from __future__ import annotations

import numpy as np

from hardware.arrays import FloatArray
from tuner.planners.engine.outcome import Incumbent
from tuner.planners.scheduling.greedy import NONE_SPARED, send_inputs
from tuner.planners.scheduling.problem import Run, Schedule, Transfer, Workload
from tuner.planners.scheduling.state import ScheduleState, empty_state, with_run
from tuner.planners.scheduling.tables import ScheduleTables, schedule_tables


def on_one_device(workload: Workload) -> Incumbent[Schedule] | None:
    """Return the best schedule on one device; None if no device can run everything."""
    tables = schedule_tables(workload)
    found = []
    for device in range(workload.num_devices):
        # Smith's rule: the least time per weight goes first, which is the best order of models on one device
        own_s = [workload.exec_s[list(ops), device].sum() for ops in tables.ops_of]
        models = sorted(range(len(own_s)), key=lambda model: own_s[model] / workload.weights[model])
        order = [op for model in models for op in tables.ops_of[model]]
        found.append(_in_turn(workload, tables, order, (device,)))
    return min((one for one in found if one), key=lambda one: one.cost, default=None)


def by_heft(workload: Workload) -> Incumbent[Schedule] | None:
    """Return the schedule of HEFT; None if an operator then fits nowhere."""
    tables = schedule_tables(workload)
    rank_s = upward_ranks_s(workload, tables) * workload.weights[workload.model_of]
    # a predecessor has the larger rank; numbers settle ranks that are equal
    order = sorted(range(workload.num_ops), key=lambda op: (-rank_s[op], op))
    return _in_turn(workload, tables, order, tuple(range(workload.num_devices)))


def upward_ranks_s(workload: Workload, tables: ScheduleTables) -> FloatArray:
    """Return the mean time from the start of each operator to the end of all that follows it [V]."""
    exec_s = np.ma.masked_invalid(workload.exec_s).mean(axis=1).filled(0.0)
    pairs = ~np.eye(workload.num_devices, dtype=np.bool_)
    ranks_s = np.zeros(workload.num_ops)
    for op in reversed(range(workload.num_ops)):
        onward_s = [0.0]
        for edge, to in tables.after[op]:
            between_s = np.ma.masked_invalid(tables.transfer_s[edge][pairs])
            sent_s = float(between_s.mean()) if between_s.count() else 0.0
            onward_s.append(sent_s + float(ranks_s[to]))
        ranks_s[op] = exec_s[op] + max(onward_s)
    return ranks_s


def _in_turn(
    workload: Workload, tables: ScheduleTables, order: list[int], devices: tuple[int, ...]
) -> Incumbent[Schedule] | None:
    """Place operators in an order, each whole on the device of its earliest end; None if one fits on none."""
    state = empty_state(workload)
    for op in order:
        placed = [one for device in devices for one in _whole(state, workload, tables, op, device)]
        if not placed:
            return None
        state = min(placed, key=lambda one: one.end_s[op])._replace(last_s=0.0)
    schedule = Schedule(
        runs=tuple(event for event in state.events if isinstance(event, Run)),
        transfers=tuple(event for event in state.events if isinstance(event, Transfer)),
    )
    return Incumbent(cost=schedule.cost_s(workload), solution=schedule)


def _whole(
    state: ScheduleState, workload: Workload, tables: ScheduleTables, op: int, device: int
) -> list[ScheduleState]:
    """Return the state with an operator whole on a device and its inputs sent there; empty if that is impossible."""
    supplied = send_inputs(state, workload, tables, op, device)
    if supplied is None:
        return []
    return [
        one
        for one in with_run(supplied, workload, tables, op, NONE_SPARED)
        if isinstance(run := one.events[-1], Run) and run.ops == (op,) and run.devices == (device,)
    ]
