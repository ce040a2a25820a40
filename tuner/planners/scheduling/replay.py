"""Schedule from another solver, run again with its own decisions and exact times.

A solver of integer programs rounds: its starts may lie a little before the ends of what they wait for. Only its
decisions are taken, which are the device of each operator, the links of each transfer, and the order of all starts.
"""

from __future__ import annotations

from tuner.planners.engine.outcome import Incumbent
from tuner.planners.scheduling.greedy import NONE_SPARED
from tuner.planners.scheduling.problem import Run, Schedule, Transfer, Workload
from tuner.planners.scheduling.state import ScheduleState, empty_state, with_run, with_transfer
from tuner.planners.scheduling.tables import ScheduleTables, schedule_tables


def replayed(workload: Workload, schedule: Schedule) -> Incumbent[Schedule] | None:
    """Return a schedule's decisions with exact times; None if they then break a limit of memory."""
    tables = schedule_tables(workload)
    left: list[Run | Transfer] = sorted((*schedule.runs, *schedule.transfers), key=lambda event: event.start_s)
    state = empty_state(workload)
    while left:
        # starts that rounding has exchanged: the first event that can go next does
        tried = ((event, _with(state, workload, tables, event)) for event in left)
        event, after = next(((event, after) for event, after in tried if after is not None), (None, None))
        if event is None or after is None:
            return None
        left.remove(event)
        state = after._replace(last_s=0.0)
    exact = Schedule(
        runs=tuple(event for event in state.events if isinstance(event, Run)),
        transfers=tuple(event for event in state.events if isinstance(event, Transfer)),
    )
    return Incumbent(cost=exact.cost_s(workload), solution=exact)


def _with(
    state: ScheduleState, workload: Workload, tables: ScheduleTables, event: Run | Transfer
) -> ScheduleState | None:
    """Return the state after an event with the same decisions; None if its inputs are not there, or it does not fit."""
    if isinstance(event, Run):
        for after in with_run(state, workload, tables, event.ops[0], NONE_SPARED):
            run = after.events[-1]
            if isinstance(run, Run) and (run.ops, run.devices) == (event.ops, event.devices):
                return after
        return None
    if not state.done[workload.edges[event.edge, 0]]:
        return None
    for after in with_transfer(state, workload, tables, event.edge, NONE_SPARED):
        transfer = after.events[-1]
        if isinstance(transfer, Transfer) and _alike(tables, transfer.links, event.links):
            return after
    return None


def _alike(tables: ScheduleTables, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two ways take links of the same classes, of which only one is tried at a time."""
    return sorted(tables.link_class[link] for link in one) == sorted(tables.link_class[link] for link in other)
