"""Timeline of a step whose collectives run beside the compute, as XLA schedules them on GPUs.

A device has two streams: operators run one after the other on the first, and collectives on the second. A collective
starts as soon as its tensor is made, an operator as soon as all that it reads has arrived. Of several that could start,
the operator that stands first in the program does, and the collective that is needed first. A stream never waits while
it could work, as in the list scheduling of XLA's latency-hiding scheduler (openxla/xla, `xla/service/
latency_hiding_scheduler.h`), which minds memory besides. Neither stream slows the other. An operator of a loop is one
block of all its executions, and so is a collective. How well this agrees with XLA's schedules stands in
docs/sharding-plans.md.

Letters: t tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import CONSTANT, STATE, Graph, Use
from costmodels.sharding.plan import MoveTimes, Plan, PlanCost
from hardware.arrays import FloatArray, IntArray

COMPUTE, COLLECTIVES = 0, 1
"""The two streams of a device."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Times of a step with overlap.

    Attributes:
        step_time_s: Time of the step [s].
        moved_s: Time of the collectives that move each tensor [t] [s].
        exposed_s: Part of this during which no operator runs [t] [s].
        slack_s: Time between the end of a tensor's maker and the start of its first reader, or the end of the step
            [t] [s].
    """

    step_time_s: float
    moved_s: FloatArray
    exposed_s: FloatArray
    slack_s: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """An operator, or the collectives that bring a tensor from one layout to another.

    Attributes:
        stream: Stream that it runs on.
        seconds: Time that it takes [s].
        rank: Place in the program: that of the operator, or of the first operator that needs the tensor.
        after: Numbers of the tasks that must have ended.
        tensor: Tensor that a collective moves; -1 for an operator.
    """

    stream: int
    seconds: float
    rank: int
    after: tuple[int, ...]
    tensor: int = -1


def overlaps(graph: Graph, mesh: DeviceMesh) -> bool:
    """Return whether XLA overlaps a graph on the devices of a mesh: that of a JAX program, on accelerators."""
    return graph.is_fused and not any(device.is_processor for device in mesh.cluster.devices)


def timeline_of(plan: Plan, cost: PlanCost) -> Timeline:
    """Return the timeline of a step under a plan whose cost is known."""
    graph = plan.graph
    tasks = _tasks(plan, cost)
    begin_s, end_s = _schedule(tasks)
    step_time_s = float(end_s.max(initial=0.0))
    num_ops, num_tensors = len(graph.ops), len(graph.tensors)
    sent = tasks[num_ops:]
    moved = np.array([task.tensor for task in sent], dtype=np.int64)
    # The compute before a moment is the integral of a stream that works or waits.
    order = np.argsort(begin_s[:num_ops], kind="stable")
    edges_s = np.stack([begin_s[:num_ops][order], end_s[:num_ops][order]], axis=1).ravel()
    worked_s = np.repeat(np.cumsum(cost.compute_s[order]), 2)
    worked_s[::2] -= cost.compute_s[order]
    hidden_s = np.interp(end_s[num_ops:], edges_s, worked_s) - np.interp(begin_s[num_ops:], edges_s, worked_s)
    length_s = end_s[num_ops:] - begin_s[num_ops:]
    makers = [maker for maker, _ in graph.maker]
    needed_s = [
        min((float(begin_s[reader]) for reader in _readers(graph, uses)), default=step_time_s) for uses in graph.uses
    ]
    return Timeline(
        step_time_s=step_time_s,
        moved_s=_by_tensor(moved, length_s, num_tensors),
        exposed_s=_by_tensor(moved, np.maximum(length_s - hidden_s, 0.0), num_tensors),
        slack_s=np.maximum(np.array(needed_s) - end_s[makers], 0.0),
    )


def _by_tensor(moved: IntArray, seconds: FloatArray, num_tensors: int) -> FloatArray:
    """Return the sum for each tensor [t]."""
    found: FloatArray = np.zeros(num_tensors)
    np.add.at(found, moved, seconds)
    return found


def _readers(graph: Graph, uses: Sequence[Use]) -> list[int]:
    """Return the operators that read a tensor in the step in which it is made: a state reads it for the next one."""
    return [use.op for use in uses if not use.is_back and graph.ops[use.op].primitive != STATE]


def _tasks(plan: Plan, cost: PlanCost) -> list[_Task]:
    """Return the operators of a plan, which have their own numbers, and behind them its collectives."""
    graph = plan.graph
    after: list[set[int]] = [set() for _ in graph.ops]
    sent: list[_Task] = []
    move_s = MoveTimes(plan.mesh)

    def send(tensor: int, seconds: float, rank: int, before: int) -> int:
        """Add collectives that follow a task, and return what their readers have to wait for."""
        if not seconds:
            return before
        sent.append(_Task(stream=COLLECTIVES, seconds=seconds, rank=rank, after=(before,), tensor=tensor))
        return len(graph.ops) + len(sent) - 1

    for tensor, array in enumerate(graph.tensors):
        maker, slot = graph.maker[tensor]
        if graph.ops[maker].primitive == CONSTANT:
            continue
        lies, uses = plan.layout(tensor), graph.uses[tensor]
        # What nobody reads in this step is needed at its end.
        ranks = _readers(graph, uses)
        settle_s = graph.sums[tensor] * move_s[plan.written(maker, slot), lies, array.num_bytes]
        settled = send(tensor, settle_s, min(ranks, default=len(graph.ops)), maker)
        for reader in ranks:
            after[reader].add(settled)
        for copy in plan.copies(tensor):
            readers = _readers(graph, copy.uses)
            copy_s = copy.times * move_s[lies, copy.layout, array.num_bytes]
            moved = send(tensor, copy_s, min(readers, default=len(graph.ops)), settled)
            for reader in readers:
                after[reader].add(moved)
    ops = [
        _Task(stream=COMPUTE, seconds=seconds, rank=number, after=tuple(before))
        for number, (seconds, before) in enumerate(zip(cost.compute_s.tolist(), after, strict=True))
    ]
    return [*ops, *sent]


def _schedule(tasks: Sequence[_Task]) -> tuple[FloatArray, FloatArray]:
    """Return begin and end of each task when each stream always runs the first of the tasks that can start [s]."""
    begin_s, end_s = np.zeros(len(tasks)), np.zeros(len(tasks))
    waits_for = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(number)
    ready: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    running: list[tuple[float, int]] = []
    is_busy = [False, False]
    now_s = 0.0
    released = [number for number, count in enumerate(waits_for) if not count]
    while True:
        for number in released:
            heapq.heappush(ready[tasks[number].stream], (tasks[number].rank, number))
        for stream in (COMPUTE, COLLECTIVES):
            if ready[stream] and not is_busy[stream]:
                _, number = heapq.heappop(ready[stream])
                is_busy[stream] = True
                begin_s[number], end_s[number] = now_s, now_s + tasks[number].seconds
                heapq.heappush(running, (float(end_s[number]), number))
        if not running:
            return begin_s, end_s
        now_s, number = heapq.heappop(running)
        is_busy[tasks[number].stream] = False
        released = []
        for follower in followers[number]:
            waits_for[follower] -= 1
            if not waits_for[follower]:
                released.append(follower)
