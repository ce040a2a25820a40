"""Schedules by simple rules, which stand beside those of the search.

- one device: every operator on the one device on which all of them cost least, model after model.
- HEFT (Topcuoglu et al. 2002, section 4.1): operators in the order of their upward ranks (`ranks`), each on the device
  where it ends first. Operators and transfers are appended; gaps before them stay.

Neither splits nor fuses operators.
"""

from __future__ import annotations

from tuner.planners.engine.outcome import Incumbent
from tuner.planners.scheduling.greedy import NONE_SPARED, send_inputs
from tuner.planners.scheduling.problem import Run, Schedule, Transfer, Workload
from tuner.planners.scheduling.ranks import by_rank
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
    return _in_turn(workload, tables, by_rank(workload, tables), tuple(range(workload.num_devices)))


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
