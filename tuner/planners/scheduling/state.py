"""Partial schedules, and the runs and transfers that may be added to them next.

A schedule is built in the order in which its runs and transfers start. An addition starts as soon as its inputs have
arrived and its devices or links are free, and never before the last addition. Every schedule without idle waiting can
be built in the order of its own starts. Runs and transfers are added one by one, because a transfer may have to pass a
link long before its consumer runs. A transfer fixes the device of its consumer.

An addition that could have started before the last one would only wait for that order, and need not be tried. Added
before the other, with which it shares neither a device nor a link, it starts and ends earlier, and all else is the
same. An addition that takes no time ends no earlier, and is therefore tried nevertheless.

Letters as in `problem`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from tuner.planners.scheduling.memory import WORK, Fit, Loan, Loans, ended, fits
from tuner.planners.scheduling.problem import Run, Split, Transfer, Way, Workload
from tuner.planners.scheduling.tables import ScheduleTables, prefixes_kept, subsets

NOWHERE = -1
"""Home of an operator for which none is fixed."""

SLACK = 1e-9
"""Fraction of a capacity by which a device may exceed it: below the rounding error of a sum of bytes."""


class ScheduleState(NamedTuple):
    """A partial schedule.

    Attributes:
        done: Whether each operator has been added [V].
        sent: Whether each edge's data have been sent [E].
        home: Home of each operator, or NOWHERE [V].
        end_s: End of each operator that is done; otherwise the last arrival of data that were sent to it [V].
        device_s: Time when each device is free [D].
        link_s: Time when each link, and then each port, is free [links + ports].
        used_bytes: Memory on each device that stays in use from beginning to end [D].
        loans: Memory on each device that is released [D]; none where nothing is.
        last_s: Start of the last addition [s].
        could_s: Earliest start of the last addition, had no addition with a later start come before it [s].
        events: Runs and transfers that were added.
    """

    done: tuple[bool, ...]
    sent: tuple[bool, ...]
    home: tuple[int, ...]
    end_s: tuple[float, ...]
    device_s: tuple[float, ...]
    link_s: tuple[float, ...]
    used_bytes: tuple[float, ...]
    loans: tuple[Loans, ...]
    last_s: float
    could_s: float
    events: tuple[Run | Transfer, ...]


def empty_state(workload: Workload) -> ScheduleState:
    """Return the schedule without any run or transfer."""
    num_ops, num_devices = workload.exec_s.shape
    return ScheduleState(
        done=(False,) * num_ops,
        sent=(False,) * len(workload.data_bytes),
        home=(NOWHERE,) * num_ops,
        end_s=(0.0,) * num_ops,
        device_s=(0.0,) * num_devices,
        link_s=(0.0,) * workload.num_held,
        used_bytes=(0.0,) * num_devices,
        loans=((),) * num_devices,
        last_s=0.0,
        could_s=0.0,
        events=(),
    )


def next_states(state: ScheduleState, workload: Workload, tables: ScheduleTables) -> Iterator[ScheduleState]:
    """Yield the states with one more run or transfer that must be tried; of symmetric choices only one."""
    untouched = _untouched(state, workload)
    for op in range(workload.num_ops):
        if not state.done[op]:
            for added in with_run(state, workload, tables, op, untouched):
                if not _waits_in_vain(state, added):
                    yield added
            for edge, producer in tables.before[op]:
                if state.done[producer] and not state.sent[edge]:
                    for added in with_transfer(state, workload, tables, edge, untouched):
                        if not _waits_in_vain(state, added):
                            yield added


def _waits_in_vain(state: ScheduleState, added: ScheduleState) -> bool:
    """Return whether the last addition could have started before the addition preceding it."""
    event = added.events[-1]
    return added.could_s < state.last_s and event.end_s > event.start_s


def _untouched(state: ScheduleState, workload: Workload) -> frozenset[int]:
    """Return the devices on which nothing runs, and nothing is fixed to run."""
    devices = range(workload.num_devices)
    touched = {device for event in state.events if isinstance(event, Run) for device in event.devices}
    return frozenset(devices) - touched.union(state.home)


def with_run(
    state: ScheduleState,
    workload: Workload,
    tables: ScheduleTables,
    op: int,
    untouched: frozenset[int],
    *,
    free_first: bool = False,
) -> Iterator[ScheduleState]:
    """Yield the operator on every device that has its inputs: whole, split, and fused with each of its successors.

    Args:
        state: State before the run.
        workload: Workload to schedule.
        tables: Tables of the workload.
        op: Number of an operator that is not done.
        untouched: Devices in use by nobody; of several that are alike only the first is tried.
        free_first: Whether a split takes the other devices that are free first, and no others.
    """
    for home in range(workload.num_devices):
        start_s = _inputs_s(state, tables, op, home)
        if math.isinf(start_s) or not prefixes_kept((home,), untouched, tables.device_class):
            continue
        yield from _run(state, workload, tables, (op,), (home,), (float(workload.exec_s[op, home]),), 0.0, start_s)
        # A split runs at home and on any other devices; their order does not matter.
        for split in tables.splits[op]:
            all_others = subsets(range(workload.num_devices), home, split.parts - 1)
            for others in [_free_first(state, home, split.parts - 1)] if free_first else all_others:
                devices = (home, *others)
                if prefixes_kept(devices, untouched, tables.device_class):
                    part_s = tuple(split.part_s[device] for device in devices)
                    gather_s = split.gathering_s(devices)
                    yield from _run(state, workload, tables, (op,), devices, part_s, gather_s, start_s, split=split)
        # A fused run needs the inputs of both operators.
        for fusion in tables.fusions[op]:
            both = (op, fusion.second)
            if not state.done[fusion.second]:
                both_s = max(start_s, _inputs_s(state, tables, fusion.second, home, fused_with=op))
                time_s = (fusion.exec_s[home],)
                yield from _run(
                    state, workload, tables, both, (home,), time_s, 0.0, both_s, memory_bytes=fusion.memory_bytes
                )


def _free_first(state: ScheduleState, home: int, count: int) -> tuple[int, ...]:
    """Return the devices beside the home that are free first."""
    others = (device for device in range(len(state.device_s)) if device != home)
    return tuple(sorted(others, key=state.device_s.__getitem__)[:count])


def _inputs_s(state: ScheduleState, tables: ScheduleTables, op: int, home: int, fused_with: int = NOWHERE) -> float:
    """Return when all inputs of an operator are on a device [s]; inf if one of them is not fixed to arrive there."""
    if state.home[op] not in {NOWHERE, home}:
        return math.inf
    inputs_s = state.end_s[op]
    for edge, producer in tables.before[op]:
        if producer == fused_with:
            continue
        if not state.done[producer] or (state.home[producer] != home and not state.sent[edge]):
            return math.inf
        if state.home[producer] == home:
            inputs_s = max(inputs_s, state.end_s[producer])
    return inputs_s


def _run(
    state: ScheduleState,
    workload: Workload,
    tables: ScheduleTables,
    ops: tuple[int, ...],
    devices: tuple[int, ...],
    part_s: tuple[float, ...],
    gather_s: float,
    inputs_s: float,
    memory_bytes: float | None = None,
    split: Split | None = None,
) -> Iterator[ScheduleState]:
    """Yield the states with a run if it is possible and fits into memory; several where it may wait for room.

    Args:
        state: State before the run.
        workload: Workload to schedule.
        tables: Tables of the workload.
        ops: Number of the operator, or the two numbers of fused ones.
        devices: Devices that run it, the home first.
        part_s: Time of its part on each of them [s].
        gather_s: Time at home after the longest part [s].
        inputs_s: Time when all inputs are there [s].
        memory_bytes: Memory of the operators; None for that of the first one.
        split: Split of the operator; None if it runs on one device.
    """
    # `could_s` ignores the order of additions, `start_s` keeps to it.
    could_s = max(inputs_s, *(state.device_s[device] for device in devices))
    time_s = max(part_s) + gather_s
    if math.isinf(could_s + time_s):
        return
    home = devices[0]
    # Data of edges are held at home.
    used = list(state.used_bytes)
    own_bytes = float(workload.memory_bytes[ops[0]]) if memory_bytes is None else memory_bytes
    for device, share in zip(devices, (own_bytes,) if split is None else split.memory_shares(own_bytes), strict=True):
        used[device] += share
    if workload.working_bytes is None:
        used[home] += _edges_bytes(state, workload, tables, ops, home)
    if any(used[device] > workload.capacity_bytes[device] * (1 + SLACK) for device in devices):
        return
    found: Iterable[Fit] = (Fit(max(could_s, state.last_s), could_s, {}),)
    if workload.working_bytes is not None:
        hold_s = (time_s, *part_s[1:])
        room = {device: float(workload.capacity_bytes[device]) * (1 + SLACK) - used[device] for device in devices}
        working = float(sum(workload.working_bytes[op] for op in ops))
        shares = (working,) if split is None else split.working_shares(working)
        after = partial(_loans_with_run, state, workload, tables, ops, devices, hold_s, shares)
        found = fits(could_s, state.last_s, state.loans, room, after)
    for fit in found:
        end_s = fit.start_s + time_s
        device_s = list(state.device_s)
        for device, own_s in zip(devices, part_s, strict=True):
            device_s[device] = fit.start_s + own_s
        device_s[home] = end_s
        done, homes, ends_s = list(state.done), list(state.home), list(state.end_s)
        for op in ops:
            done[op], ends_s[op] = True, end_s
            for mate in tables.mates[op]:
                homes[mate] = home
        run = Run(ops=ops, devices=devices, start_s=fit.start_s, end_s=end_s)
        yield state._replace(
            done=tuple(done),
            home=tuple(homes),
            end_s=tuple(ends_s),
            device_s=tuple(device_s),
            used_bytes=tuple(used),
            loans=tuple(fit.loans.get(device, own) for device, own in enumerate(state.loans)),
            last_s=fit.start_s,
            could_s=fit.could_s,
            events=(*state.events, run),
        )


def _edges_bytes(
    state: ScheduleState, workload: Workload, tables: ScheduleTables, ops: tuple[int, ...], home: int
) -> float:
    """Return the memory at home for outputs of the operators, and for inputs sent from other devices (equation 6)."""
    sent = [edge for edge in _taken(tables, ops) if state.home[workload.edges[edge, 0]] != home]
    return float(sum(workload.data_bytes[edge] for edge in _made(tables, ops) + sent))


def _made(tables: ScheduleTables, ops: tuple[int, ...]) -> list[int]:
    """Return the edges on which a run gives data to others."""
    return [edge for op in ops for edge, consumer in tables.after[op] if consumer not in ops]


def _taken(tables: ScheduleTables, ops: tuple[int, ...]) -> list[int]:
    """Return the edges on which a run takes data of others."""
    return [edge for op in ops for edge, producer in tables.before[op] if producer not in ops]


def _loans_with_run(
    state: ScheduleState,
    workload: Workload,
    tables: ScheduleTables,
    ops: tuple[int, ...],
    devices: tuple[int, ...],
    hold_s: tuple[float, ...],
    shares: tuple[float, ...],
    start_s: float,
) -> dict[int, Loans]:
    """Return the loans of some devices with a run that starts at a time.

    Args:
        state: State before the run.
        workload: Workload that releases memory.
        tables: Tables of the workload.
        ops: Number of the operator, or the two numbers of fused ones.
        devices: Devices that run it, the home first.
        hold_s: Time for which it holds each of them [s].
        shares: Memory that it takes on each of them meanwhile [bytes].
        start_s: Start of the run [s].
    """
    found = {device: state.loans[device] for device in devices}
    for device, own_s, share in zip(devices, hold_s, shares, strict=True):
        if share:
            found[device] = (*found[device], Loan(WORK, start_s, start_s + own_s, share))
    home = devices[0]
    made = (Loan(edge, start_s, math.inf, float(workload.data_bytes[edge])) for edge in _made(tables, ops))
    found[home] = (*ended(found[home], _taken(tables, ops), start_s + hold_s[0]), *made)
    return found


def with_transfer(
    state: ScheduleState, workload: Workload, tables: ScheduleTables, edge: int, untouched: frozenset[int]
) -> Iterator[ScheduleState]:
    """Yield the edge's data sent to every device on which the consumer may run, over every way.

    Args:
        state: State before the transfer.
        workload: Workload to schedule.
        tables: Tables of the workload.
        edge: Number of an edge whose producer is done and whose data were not sent.
        untouched: Devices in use by nobody, as for `with_run`.
    """
    producer, consumer = workload.edges[edge].tolist()
    source = state.home[producer]
    settled = state.home[consumer]
    targets = range(workload.num_devices) if settled == NOWHERE else (settled,)
    for target in targets:
        may_run = target != source and math.isfinite(tables.least_exec_s[consumer][target])
        if not may_run or not prefixes_kept((target,), untouched, tables.device_class):
            continue
        seen: set[tuple[tuple[int, float], ...]] = set()
        for way in tables.ways.get((source, target), ()):
            # Ways over links of one class that are free at the same time lead to the same schedules.
            alike = tuple(sorted((tables.link_class[link], state.link_s[link]) for link in way.holds))
            if alike not in seen:
                seen.add(alike)
                for sent in _send(state, workload, way, edge, source, target):
                    homes = list(sent.home)
                    for mate in tables.mates[consumer]:
                        homes[mate] = target
                    yield sent._replace(home=tuple(homes))


def _send(
    state: ScheduleState, workload: Workload, way: Way, edge: int, source: int, target: int
) -> Iterator[ScheduleState]:
    """Yield the state with a transfer over a way if its data have room at their target."""
    producer, consumer = workload.edges[edge].tolist()
    size = float(workload.data_bytes[edge])
    time_s = way.transfer_s(size)
    could_s = max(state.end_s[producer], *(state.link_s[link] for link in way.holds))
    found: Iterable[Fit] = (Fit(max(could_s, state.last_s), could_s, {}),)
    if workload.working_bytes is not None:
        room = {target: float(workload.capacity_bytes[target]) * (1 + SLACK) - state.used_bytes[target]}
        after = partial(_loans_with_data, state.loans[target], target, edge, size)
        found = fits(could_s, state.last_s, state.loans, room, after)
    for fit in found:
        end_s = fit.start_s + time_s
        link_s = list(state.link_s)
        for link in way.holds:
            link_s[link] = end_s
        sent, homes, ends_s = list(state.sent), list(state.home), list(state.end_s)
        sent[edge], homes[consumer], ends_s[consumer] = True, target, max(ends_s[consumer], end_s)
        loans = [fit.loans.get(device, own) for device, own in enumerate(state.loans)]
        loans[source] = ended(loans[source], (edge,), end_s)
        transfer = Transfer(edge=edge, links=way.links, start_s=fit.start_s, end_s=end_s)
        yield state._replace(
            sent=tuple(sent),
            home=tuple(homes),
            end_s=tuple(ends_s),
            link_s=tuple(link_s),
            loans=tuple(loans),
            last_s=fit.start_s,
            could_s=fit.could_s,
            events=(*state.events, transfer),
        )


def _loans_with_data(own: Loans, target: int, edge: int, size: float, start_s: float) -> dict[int, Loans]:
    """Return the loans of a device with data that begin to arrive at a time."""
    return {target: (*own, Loan(edge, start_s, math.inf, size))}
