"""Exhaustive solver of the scheduling problem: the oracle of the tests, for a handful of operators.

Every choice of fusions, splits, devices and ways is tried, and for each of them every order of runs and transfers that
the dependencies allow. Where memory is released, a run or a transfer may also wait for the end of any other. It shares
the types of `scheduling.problem` with the search and nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.oracles.schedule_check import violations
from tuner.planners.scheduling.problem import Run, Schedule, Transfer, Way, Workload, ways_between


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One run with all its decisions but its time.

    Attributes:
        ops: Number of the operator, or the two numbers of fused ones.
        devices: Devices that run it, the home first.
        hold_s: Time for which it holds each of its devices [s].
        time_s: Time of the run [s].
    """

    ops: tuple[int, ...]
    devices: tuple[int, ...]
    hold_s: tuple[float, ...]
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Times:
    """Partial schedule.

    Attributes:
        jobs: Start and end of each job so far.
        sent: Start and end of each transfer so far.
        device_s: Time when each device is free [s].
        link_s: Time when each link and port is free [s].
    """

    jobs: dict[int, tuple[float, float]]
    sent: dict[int, tuple[float, float]]
    device_s: tuple[float, ...]
    link_s: tuple[float, ...]


def schedule_exhaustively(workload: Workload) -> Schedule | None:
    """Return the best schedule; None if there is none."""
    best, best_s = None, math.inf
    for fused in _fusions(workload):
        for jobs in itertools.product(*(_jobs(workload, ops) for ops in fused)):
            for routes in _routes(workload, jobs):
                for schedule in _schedules(workload, jobs, routes):
                    cost_s = schedule.cost_s(workload)
                    if cost_s < best_s and not violations(workload, schedule):
                        best, best_s = schedule, cost_s
    return best


def _fusions(workload: Workload) -> Iterator[list[tuple[int, ...]]]:
    """Yield every way to leave operators alone or fuse them in pairs."""
    pairs = sorted({(fusion.first, fusion.second) for fusion in workload.fusions})
    for size in range(len(pairs) + 1):
        for chosen in itertools.combinations(pairs, size):
            taken = [op for pair in chosen for op in pair]
            if len(taken) == len(set(taken)):
                alone: list[tuple[int, ...]] = [(op,) for op in range(workload.num_ops) if op not in taken]
                yield [*chosen, *alone]


def _jobs(workload: Workload, ops: tuple[int, ...]) -> Iterator[_Job]:
    """Yield every way to run these operators as one."""
    devices = range(workload.num_devices)
    if len(ops) == 2:
        rows = [np.array(fusion.exec_s) for fusion in workload.fusions if (fusion.first, fusion.second) == ops]
    else:
        rows = [workload.exec_s[ops[0]]]
    for row in rows:
        for device in devices:
            if math.isfinite(row[device]):
                time_s = float(row[device])
                yield _Job(ops=ops, devices=(device,), hold_s=(time_s,), time_s=time_s)
    for split in workload.splits:
        if ops == (split.op,):
            for where in itertools.permutations(devices, split.parts):
                part_s = [split.part_s[device] for device in where]
                time_s = max(part_s) + split.gathering_s(where)
                yield _Job(ops=ops, devices=where, hold_s=(time_s, *part_s[1:]), time_s=time_s)


def _routes(workload: Workload, jobs: tuple[_Job, ...]) -> Iterator[dict[int, Way]]:
    """Yield every choice of a way for each edge between two devices."""
    home = {op: job.devices[0] for job in jobs for op in job.ops}
    crossing = {edge: (home[u], home[v]) for edge, (u, v) in enumerate(workload.edges.tolist()) if home[u] != home[v]}
    ways = ways_between(workload)
    for chosen in itertools.product(*(ways.get(pair, ()) for pair in crossing.values())):
        yield dict(zip(crossing, chosen, strict=True))


def _schedules(workload: Workload, jobs: tuple[_Job, ...], routes: dict[int, Way]) -> Iterator[Schedule]:
    """Yield the schedule of every order; runs and transfers start as early as their predecessors in it allow."""
    job_of = {op: at for at, job in enumerate(jobs) for op in job.ops}
    edges = workload.edges.tolist()
    needs = [
        {(edge, job_of[u]) for edge, (u, v) in enumerate(edges) if v in job.ops and u not in job.ops} for job in jobs
    ]

    def orders(times: _Times) -> Iterator[_Times]:
        if len(times.jobs) == len(jobs):
            yield times
            return
        for at, job in enumerate(jobs):
            is_ready = all(edge in times.sent if edge in routes else giver in times.jobs for edge, giver in needs[at])
            if at not in times.jobs and is_ready:
                inputs = [times.sent[edge][1] if edge in routes else times.jobs[giver][1] for edge, giver in needs[at]]
                held = dict(zip(job.devices, job.hold_s, strict=True))
                earliest_s = max([*inputs, *(times.device_s[device] for device in job.devices)])
                for start_s in starts(times, earliest_s):
                    device_s = tuple(
                        start_s + held[device] if device in held else free for device, free in enumerate(times.device_s)
                    )
                    yield from orders(
                        _Times(
                            jobs=times.jobs | {at: (start_s, start_s + job.time_s)},
                            sent=times.sent,
                            device_s=device_s,
                            link_s=times.link_s,
                        )
                    )
        for edge, way in routes.items():
            giver = job_of[edges[edge][0]]
            if edge not in times.sent and giver in times.jobs:
                earliest_s = max([times.jobs[giver][1], *(times.link_s[link] for link in way.holds)])
                for start_s in starts(times, earliest_s):
                    end_s = start_s + way.transfer_s(float(workload.data_bytes[edge]))
                    link_s = tuple(end_s if link in way.holds else free for link, free in enumerate(times.link_s))
                    yield from orders(
                        _Times(
                            jobs=times.jobs,
                            sent=times.sent | {edge: (start_s, end_s)},
                            device_s=times.device_s,
                            link_s=link_s,
                        )
                    )

    def starts(times: _Times, earliest_s: float) -> list[float]:
        """Return the times at which an event may start: at once, or where memory is released at any later end."""
        if workload.working_bytes is None:
            return [earliest_s]
        ends_s = {end_s for _, end_s in (*times.jobs.values(), *times.sent.values())}
        # parts of a split end before their home
        ends_s |= {times.jobs[at][0] + hold_s for at in times.jobs for hold_s in jobs[at].hold_s}
        return [earliest_s, *sorted(end_s for end_s in ends_s if end_s > earliest_s)]

    nothing = _Times(jobs={}, sent={}, device_s=(0.0,) * workload.num_devices, link_s=(0.0,) * workload.num_held)
    for times in orders(nothing):
        yield Schedule(
            runs=tuple(
                Run(ops=job.ops, devices=job.devices, start_s=times.jobs[at][0], end_s=times.jobs[at][1])
                for at, job in enumerate(jobs)
            ),
            transfers=tuple(
                Transfer(edge=edge, links=way.links, start_s=times.sent[edge][0], end_s=times.sent[edge][1])
                for edge, way in routes.items()
            ),
        )
