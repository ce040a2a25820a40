"""Memory of the devices over time, where it is released.

A workload that releases memory (`Workload.working_bytes`) has three kinds of it on a device:

- An operator's own memory (`memory_bytes`), which stays from beginning to end, as weights do.
- What it takes only while it runs (`working_bytes`), of which each part of a split has an equal share.
- Data of an edge. At their producer they live from its start to the end of their consumer, or of their transfer to it.
  On another device they live from the start of that transfer to the end of their consumer.

A consumer or transfer that is not yet in a partial schedule ends at infinity. So whatever is added later only ends such
loans, and an addition that fits now still fits then.

A run or transfer that has no room waits for the end of a loan. It may also wait for one although it has room: what
stays from beginning to end of an operator that is added later takes room in the past as well, so a lower peak can be
worth a later start. All starts are therefore tried of which each has a lower peak on some device than any before it.

Schedules that are built in the order of their starts then hold the best one: let every addition start as early as the
memory allows that the best one leaves to loans. Built so with the same decisions, none starts later than there, because
what came before it has started and ended no later, and so has released no less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tuner.planners.scheduling.problem import Schedule, Workload

WORK = -1
"""In place of an edge: memory that an operator takes while it runs."""


class Loan(NamedTuple):
    """Memory of a device that is taken for a time.

    Attributes:
        edge: Number of the edge whose data it holds, or WORK.
        start_s: Begin [s].
        end_s: End [s]; inf if what ends it has not been added.
        num_bytes: Size.
    """

    edge: int
    start_s: float
    end_s: float
    num_bytes: float


Loans = tuple[Loan, ...]
"""Loans of one device."""


def peak_bytes(loans: Sequence[Loan]) -> float:
    """Return the most memory that loans take at any time; a loan that ends makes room for one that begins then."""
    changes = sorted(change for one in loans for change in ((one.start_s, one.num_bytes), (one.end_s, -one.num_bytes)))
    now = most = 0.0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def ended(loans: Loans, edges: Sequence[int], end_s: float) -> Loans:
    """Return loans of which those of some edges end at a time."""
    return tuple(one._replace(end_s=end_s) if one.edge in edges else one for one in loans)


def loans_of(workload: Workload, schedule: Schedule) -> tuple[Loans, ...]:
    """Return the loans of every device in a schedule of a workload that releases memory [D]."""
    assert workload.working_bytes is not None, "memory is released"
    found: tuple[list[Loan], ...] = tuple([] for _ in range(workload.num_devices))
    run_of = {op: run for run in schedule.runs for op in run.ops}
    sent = {transfer.edge: transfer for transfer in schedule.transfers}
    split_of = {(split.op, split.parts): split for split in workload.splits}
    part_s = {key: split.part_s for key, split in split_of.items()}
    for run in schedule.runs:
        working = float(sum(workload.working_bytes[op] for op in run.ops))
        split = split_of[run.ops[0], len(run.devices)] if len(run.devices) > 1 else None
        shares = (working,) if split is None else split.working_shares(working)
        for device, share in zip(run.devices, shares, strict=True):
            at_home = split is None or device == run.devices[0]
            end_s = run.end_s if at_home else run.start_s + part_s[run.ops[0], len(run.devices)][device]
            found[device].append(Loan(WORK, run.start_s, end_s, share))
    for edge, ((u, v), size) in enumerate(zip(workload.edges.tolist(), workload.data_bytes.tolist(), strict=True)):
        giver, taker = run_of[u], run_of[v]
        if giver is taker:
            continue
        if edge not in sent:
            found[giver.devices[0]].append(Loan(edge, giver.start_s, taker.end_s, size))
        else:
            found[giver.devices[0]].append(Loan(edge, giver.start_s, sent[edge].end_s, size))
            found[taker.devices[0]].append(Loan(edge, sent[edge].start_s, taker.end_s, size))
    return tuple(map(tuple, found))


class Fit(NamedTuple):
    """A start at which an addition fits.

    Attributes:
        start_s: The start [s].
        could_s: Earliest start with peaks that are no higher, had no addition with a later start come before it [s].
        loans: Loans of the devices that it changes.
    """

    start_s: float
    could_s: float
    loans: dict[int, Loans]


def fits(
    could_s: float,
    last_s: float,
    loans: Sequence[Loans],
    room_bytes: Mapping[int, float],
    after: Callable[[float], dict[int, Loans]],
) -> Iterator[Fit]:
    """Yield the starts of an addition that must be tried, the earliest first.

    Args:
        could_s: Time before which it can't start [s].
        last_s: Start of the addition before it, before which it may not start [s].
        loans: Loans of every device so far [D].
        room_bytes: Memory for loans on each device that the addition changes.
        after: Function of the start that returns the loans of these devices with the addition.
    """
    ends_s = {one.end_s for device in room_bytes for one in loans[device] if could_s < one.end_s < math.inf}
    tried: list[tuple[float, list[float]]] = []
    lowest: list[list[float]] = []
    for start_s in sorted({could_s, max(could_s, last_s), *ends_s}):
        found = after(start_s)
        peaks = [peak_bytes(found[device]) for device in room_bytes]
        if any(peak > room for peak, room in zip(peaks, room_bytes.values(), strict=True)):
            continue
        tried.append((start_s, peaks))
        if start_s >= last_s and not any(_is_no_higher(other, peaks) for other in lowest):
            lowest.append(peaks)
            earliest_s = next(other_s for other_s, other in tried if _is_no_higher(other, peaks))
            yield Fit(start_s, earliest_s, found)


def _is_no_higher(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
