"""Check of a schedule against the rules of its problem, independent of how schedules are found.

Letters as in `scheduling.problem`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from tuner.planners.scheduling.problem import Run, Schedule, Split, Workload, ways_between

TOLERANCE_S = 1e-6
"""Tolerance of times, for solvers that accept slightly violated limits; in the unit of a workload's times."""


def violations(workload: Workload, schedule: Schedule) -> list[str]:
    """Return a sentence for each rule that a schedule breaks; empty for a valid one."""
    checks = (_durations, _routes, _precedence, _one_at_a_time, _memory)
    missing = list(_completeness(workload, schedule))
    return missing or [sentence for check in checks for sentence in check(workload, schedule)]


def _completeness(workload: Workload, schedule: Schedule) -> Iterator[str]:
    """Yield a sentence if not every operator runs exactly once."""
    ops = sorted(op for run in schedule.runs for op in run.ops)
    if ops != list(range(workload.num_ops)):
        yield f"every operator runs once, but these run: {ops}"


def _durations(workload: Workload, schedule: Schedule) -> Iterator[str]:
    """Yield a sentence for each run of impossible duration."""
    for run in schedule.runs:
        if not any(abs(run.end_s - run.start_s - time_s) <= TOLERANCE_S for time_s in _possible_s(workload, run)):
            yield f"no way to run operators {run.ops} on devices {run.devices} takes {run.end_s - run.start_s} s"


def _possible_s(workload: Workload, run: Run) -> Iterator[float]:
    """Yield the possible durations of a run [s]."""
    if len(run.ops) == 2:
        of_pair = (fusion for fusion in workload.fusions if (fusion.first, fusion.second) == run.ops)
        yield from (fusion.exec_s[run.devices[0]] for fusion in of_pair)
    elif len(run.devices) == 1:
        yield float(workload.exec_s[run.ops[0], run.devices[0]])
    else:
        for split in workload.splits:
            if (split.op, split.parts) == (run.ops[0], len(set(run.devices))):
                yield max(split.part_s[device] for device in run.devices) + split.gathering_s(run.devices)


def _routes(workload: Workload, schedule: Schedule) -> Iterator[str]:
    """Yield a sentence for each edge between two devices that lacks a transfer over links that work together, and for
    operators that should share a home.
    """
    home, ways = schedule.devices(), ways_between(workload)
    for mates in workload.mates:
        if len({home[op] for op in mates}) > 1:
            yield f"operators {mates} share a home"
    edges = sorted(transfer.edge for transfer in schedule.transfers)
    crossing = [edge for edge, (u, v) in enumerate(workload.edges.tolist()) if home[u] != home[v]]
    if edges != crossing:
        yield f"data cross devices along edges {crossing}, but transfers are of {edges}"
    for transfer in schedule.transfers:
        u, v = workload.edges[transfer.edge].tolist()
        way = next((way for way in ways.get((home[u], home[v]), ()) if way.links == transfer.links), None)
        if way is None:
            yield f"links {transfer.links} do not lead from device {home[u]} to {home[v]} together"
        elif abs(transfer.end_s - transfer.start_s - way.transfer_s(workload.data_bytes[transfer.edge])) > TOLERANCE_S:
            yield f"the transfer of edge {transfer.edge} does not take its time"


def _precedence(workload: Workload, schedule: Schedule) -> Iterator[str]:
    """Yield a sentence for each violation of equations 4 and 5."""
    run_of = {op: run for run in schedule.runs for op in run.ops}
    sent = {transfer.edge: transfer for transfer in schedule.transfers}
    for edge, (u, v) in enumerate(workload.edges.tolist()):
        if run_of[u] is run_of[v]:
            continue
        ready_s = run_of[u].end_s
        if edge in sent:
            if sent[edge].start_s < ready_s - TOLERANCE_S:
                yield f"the transfer of edge {edge} starts before its data are there"
            ready_s = sent[edge].end_s
        if run_of[v].start_s < ready_s - TOLERANCE_S:
            yield f"operator {v} starts before what it takes from {u} is there"


def _one_at_a_time(workload: Workload, schedule: Schedule) -> Iterator[str]:
    """Yield a sentence for each device, and by equation 7 each link and port, that does two things at once."""
    device_spans = [
        (device, run.start_s, _free_s(workload, run, device)) for run in schedule.runs for device in run.devices
    ]
    link_spans = [
        (link, transfer.start_s, transfer.end_s) for transfer in schedule.transfers for link in transfer.links
    ]
    port_spans = [
        (port, transfer.start_s, transfer.end_s)
        for transfer in schedule.transfers
        for link in transfer.links
        for port in workload.links[link].ports
    ]
    for what, spans in (("device", device_spans), ("link", link_spans), ("port", port_spans)):
        for (one, _, end_s), (other, start_s, _) in itertools.pairwise(sorted(spans)):
            if one == other and start_s < end_s - TOLERANCE_S:
                yield f"{what} {one} does two things at {start_s} s"


def _free_s(workload: Workload, run: Run, device: int) -> float:
    """Return when a device of a run is free again [s]."""
    if device == run.devices[0]:
        return run.end_s
    parts = (split for split in workload.splits if (split.op, split.parts) == (run.ops[0], len(run.devices)))
    return run.start_s + min(split.part_s[device] for split in parts)


def _memory(workload: Workload, schedule: Schedule) -> Iterator[str]:
    """Yield a sentence for each device that holds too much (equation 6), at any time if memory is released."""
    kept = np.zeros(workload.num_devices)
    for run in schedule.runs:
        fused = next((fusion for fusion in workload.fusions if (fusion.first, fusion.second) == run.ops), None)
        own = workload.memory_bytes[run.ops[0]] if fused is None else fused.memory_bytes
        split = _split_of(workload, run)
        if split is None or split.received_bytes is None:
            kept[list(run.devices)] += own / len(run.devices)
        else:
            kept[run.devices[0]] += own
    # what is there for a time: device, from and to when, and how much
    spans = [*_data_spans(workload, schedule), *_work_spans(workload, schedule)]
    for device in range(workload.num_devices):
        own_spans = [span for span in spans if span[0] == device]
        used = max(
            (
                sum(size for _, start_s, end_s, size in own_spans if start_s <= time_s < end_s - TOLERANCE_S)
                for _, time_s, _, _ in own_spans
            ),
            default=0.0,
        )
        if kept[device] + used > workload.capacity_bytes[device] * (1 + TOLERANCE_S):
            yield f"device {device} holds {kept[device] + used} bytes of {workload.capacity_bytes[device]}"


def _data_spans(workload: Workload, schedule: Schedule) -> Iterator[tuple[int, float, float, float]]:
    """Yield when the data of each edge are on which device; always, if memory is not released."""
    run_of = {op: run for run in schedule.runs for op in run.ops}
    sent = {transfer.edge: transfer for transfer in schedule.transfers}
    for edge, (u, v) in enumerate(workload.edges.tolist()):
        size, giver, taker = float(workload.data_bytes[edge]), run_of[u], run_of[v]
        source, target = giver.devices[0], taker.devices[0]
        if giver is taker:
            continue
        if workload.working_bytes is None:
            yield from ((device, -1.0, np.inf, size) for device in {source, target})
        elif source == target:
            yield source, giver.start_s, taker.end_s, size
        else:
            yield source, giver.start_s, sent[edge].end_s, size
            yield target, sent[edge].start_s, taker.end_s, size


def _work_spans(workload: Workload, schedule: Schedule) -> Iterator[tuple[int, float, float, float]]:
    """Yield what runs take while they run, if memory is released."""
    if workload.working_bytes is not None:
        for run in schedule.runs:
            size = float(workload.working_bytes[list(run.ops)].sum()) / len(run.devices)
            split = _split_of(workload, run)
            received = (split.received_bytes or 0.0) if split else 0.0
            for device in run.devices:
                more = 0.0 if device == run.devices[0] else received
                yield device, run.start_s, _free_s(workload, run, device), size + more


def _split_of(workload: Workload, run: Run) -> Split | None:
    """Return the split of a run; no operator has two of as many parts."""
    return next((one for one in workload.splits if (one.op, one.parts) == (run.ops[0], len(run.devices))), None)
