"""Timeline of a step whose collectives run beside the compute, as XLA schedules them on GPUs.

A device has two streams: operators run one after the other on the first, and collectives on the second. A collective
starts as soon as its tensor is made, an operator as soon as all that it reads has arrived. Of several that could start,
the operator that stands first in the program does, and the collective that is needed first. A stream never waits while
it could work, as in the list scheduling of XLA's latency-hiding scheduler (openxla/xla, `xla/service/
latency_hiding_scheduler.h`), which minds memory besides. Neither stream slows the other. An operator of a loop is one
block of all its executions, and so is a collective. How well this agrees with XLA's schedules stands in
docs/research/planners.md.

Letters: t tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.blocks.operator import OpKind
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import CONSTANT, STATE, Graph, Use
from costmodels.sharding.joining import FIRST, joining_of, joint_messages, packing_s
from costmodels.sharding.layouts import Layout, Move, moves
from costmodels.sharding.loop_sums import sums_under
from costmodels.sharding.plan import Plan, PlanCost
from hardware.arrays import FloatArray, IntArray

COMPUTE, COLLECTIVES = 0, 1
"""The two streams of a device."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Times of a step with overlap.

    Attributes:
        step_time_s: Time of the step [s].
        moved_s: Time of the collectives that move each tensor, and of packing it into joint ones [t] [s].
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
        parts: Tensors that a collective moves, each with its part of the time; empty for an operator.
    """

    stream: int
    seconds: float
    rank: int
    after: tuple[int, ...]
    parts: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Send:
    """A collective of a plan.

    Attributes:
        tensor: Tensor that it moves.
        move: Kind, axes and message of the collective.
        times: Number of executions in a step.
        rank: First operator that needs the tensor so.
        follows: Number of the operator or collective that it follows.
    """

    tensor: int
    move: Move
    times: int
    rank: int
    follows: int


def overlaps(graph: Graph, mesh: DeviceMesh) -> bool:
    """Return whether XLA overlaps a graph on the devices of a mesh: that of a JAX program, on accelerators."""
    return graph.is_fused and not mesh.has_processors


def timeline_of(plan: Plan, cost: PlanCost) -> Timeline:
    """Return the timeline of a step under a plan whose cost is known."""
    graph = plan.graph
    program = _Program(plan)
    tasks = program.tasks(cost.compute_s.tolist())
    begin_s, end_s = _schedule(tasks)
    step_time_s = float(end_s.max(initial=0.0))
    num_ops, num_tensors = len(graph.ops), len(graph.tensors)
    sent = tasks[num_ops:]
    # The compute before a moment is the integral of a stream that works or waits.
    order = np.argsort(begin_s[:num_ops], kind="stable")
    edges_s = np.stack([begin_s[:num_ops][order], end_s[:num_ops][order]], axis=1).ravel()
    work_s = (end_s - begin_s)[:num_ops][order]
    worked_s = np.repeat(np.cumsum(work_s), 2)
    worked_s[::2] -= work_s
    hidden_s = np.interp(end_s[num_ops:], edges_s, worked_s) - np.interp(begin_s[num_ops:], edges_s, worked_s)
    length_s = end_s[num_ops:] - begin_s[num_ops:]
    exposed_s = np.maximum(length_s - hidden_s, 0.0)
    # Each tensor has its part of a joint collective, and of what is exposed of it. Packing hides nowhere.
    parts = [(*part, number) for number, task in enumerate(sent) for part in task.parts]
    moved = np.array([one[0] for one in (*parts, *program.packing)], dtype=np.int64)
    packed_s = [seconds for _, _, seconds in program.packing]
    moved_s = np.array([*(seconds for _, seconds, _ in parts), *packed_s])
    shown_s = np.array([*(seconds * exposed_s[number] / length_s[number] for _, seconds, number in parts), *packed_s])
    makers = [maker for maker, _ in graph.maker]
    needed_s = [
        min((float(begin_s[reader]) for reader in _readers(graph, uses)), default=step_time_s) for uses in graph.uses
    ]
    return Timeline(
        step_time_s=step_time_s,
        moved_s=_by_tensor(moved, moved_s, num_tensors),
        exposed_s=_by_tensor(moved, shown_s, num_tensors),
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


class _Program:
    """Operators and collectives of a plan, and what each has to wait for.

    A number below that of operators is an operator's, and others are those of collectives behind them.

    Attributes:
        packing: Tensors that are packed into joint messages or turned, the first operator that needs each, and the time
            that it takes [s].
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.graph
        self.after: list[list[int]] = [[] for _ in self.graph.ops]
        self.sends: list[_Send] = []
        self.sent_by: list[list[int]] = [[] for _ in self.graph.ops]
        self._moves: dict[tuple[Layout, Layout, float], tuple[Move, ...]] = {}
        for tensor in range(len(self.graph.tensors)):
            self._add(tensor)
        self._joining = joining_of(self.graph, plan.mesh)
        self._groups = joint_messages(self._keys(), *self._sizes_and_ranks(), self._places())
        self.packing = [
            (each.tensor, each.rank, each.times * packing_s(each.move.kind, each.move.message_bytes, plan.mesh))
            for group in self._groups
            for each in (self.sends[one] for one in group)
            if len(group) > 1 and self._joining.is_packed
        ]
        self.packing += [
            (each.tensor, each.rank, each.times * each.move.turning_s(plan.mesh))
            for each in self.sends
            if each.move.turns and self._joining.is_packed
        ]

    def _add(self, tensor: int) -> None:
        """Add the collectives of a tensor."""
        graph, plan = self.graph, self.plan
        maker, slot = graph.maker[tensor]
        if graph.ops[maker].primitive == CONSTANT:
            return
        # What nobody reads in this step is needed at its end.
        end = len(graph.ops)
        readers = _readers(graph, graph.uses[tensor])
        lies = plan.layout(tensor)
        written = plan.written(maker, slot)
        times = sums_under(graph, plan.mesh, tensor, written, lies)
        settled = self._send(tensor, written, lies, times, min(readers, default=end))
        for reader in readers:
            self.after[reader].append(settled)
        for copy in plan.copies(tensor):
            readers = _readers(graph, copy.uses)
            moved = self._send(tensor, lies, copy.layout, copy.times, min(readers, default=end), settled)
            for reader in readers:
                self.after[reader].append(moved)

    def _send(
        self, tensor: int, before: Layout, after: Layout, times: int, rank: int, follows: int | None = None
    ) -> int:
        """Add the collectives of a change of layout, and return what its readers have to wait for."""
        num_bytes = self.graph.tensors[tensor].num_bytes
        maker, _ = self.graph.maker[tensor]
        last = maker if follows is None else follows
        key = (before, after, num_bytes)
        if key not in self._moves:
            changes = moves(before, after, num_bytes, self.plan.mesh.sizes)
            self._moves[key] = tuple(move for move in changes if move.seconds(self.plan.mesh))
        for move in self._moves[key]:
            self.sends.append(_Send(tensor=tensor, move=move, times=times, rank=rank, follows=last))
            last = len(self.graph.ops) + len(self.sends) - 1
            self.sent_by[maker].append(last)
        return last

    def tasks(self, compute_s: Sequence[float]) -> list[_Task]:
        """Return the operators, which have their own numbers, and behind them the collectives, some of them joint."""
        num_ops, mesh = len(self.graph.ops), self.plan.mesh
        groups = self._groups
        now = list(range(num_ops + len(self.sends)))
        for number, group in enumerate(groups):
            for one in group:
                now[num_ops + one] = num_ops + number
        work_s = list(compute_s)
        for tensor, reader, seconds in self.packing:
            # Packed where it is made, and unpacked where it is read first.
            maker, _ = self.graph.maker[tensor]
            work_s[maker] += seconds / 2
            work_s[reader if reader < num_ops else maker] += seconds / 2
        found = [
            _Task(stream=COMPUTE, seconds=seconds, rank=number, after=tuple({now[each] for each in self.after[number]}))
            for number, seconds in enumerate(work_s)
        ]
        known: dict[tuple[OpKind, tuple[int, ...], float], float] = {}
        for group in groups:
            sends = [self.sends[one] for one in group]
            message_bytes = sum(each.move.message_bytes for each in sends)
            key = (sends[0].move.kind, sends[0].move.axes, message_bytes)
            if key not in known:
                known[key] = mesh.seconds(key[0], message_bytes, key[1])
            seconds = sends[0].times * known[key]
            parts = tuple((each.tensor, seconds * each.move.message_bytes / message_bytes) for each in sends)
            found.append(
                _Task(
                    stream=COLLECTIVES,
                    seconds=seconds,
                    rank=min(each.rank for each in sends),
                    after=tuple({now[each.follows] for each in sends}),
                    parts=parts,
                )
            )
        return found

    def _keys(self) -> list[Hashable]:
        """Return what equals in collectives that are joined, for each of them; None where nothing is joined."""
        kinds = self._joining.kinds
        return [
            (each.move.kind, each.move.axes, self.graph.tensors[each.tensor].element_bytes, each.times)
            if each.move.kind in kinds
            else None
            for each in self.sends
        ]

    def _sizes_and_ranks(self) -> tuple[list[float], list[int]]:
        """Return the bytes of the result of each collective, and the operator that makes its tensor."""
        sizes = []
        for each in self.sends:
            is_cut = each.move.kind is OpKind.REDUCE_SCATTER
            sizes.append(each.move.message_bytes / (self.plan.mesh.size_along(each.move.axes) if is_cut else 1))
        return sizes, [self.graph.maker[each.tensor][0] for each in self.sends]

    def _places(self) -> list[int]:
        """Return the place of each collective in the order of dependences: FIRST, or minus those that follow it."""
        num_ops = len(self.graph.ops)
        depth, height = ([0] * (num_ops + len(self.sends)) for _ in range(2))
        for number, before in enumerate(self.after):
            depth[number] = max((depth[each] + (each >= num_ops) for each in before), default=0)
            for sent in self.sent_by[number]:
                follows = self.sends[sent - num_ops].follows
                depth[sent] = depth[follows] + (follows >= num_ops)
        for number in reversed(range(num_ops)):
            for sent in reversed(self.sent_by[number]):
                follows = self.sends[sent - num_ops].follows
                height[follows] = max(height[follows], height[sent] + 1)
            for each in self.after[number]:
                height[each] = max(height[each], height[number])
        return [-high if deep else FIRST for deep, high in zip(depth[num_ops:], height[num_ops:], strict=True)]


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
