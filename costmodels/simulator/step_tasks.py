"""Tasks of one optimizer step: every pass, transfer and collective, what it waits for and what it takes.

Tasks of one stream wait for each other in the order of the stream. Streams are the passes of a stage, and its
collectives over weights, which all replicas of the stage have in common.

Letters: t tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.simulator.events import NOTHING, Demand, Route, TaskGraph
from costmodels.simulator.pass_program import ACROSS, BETWEEN, INSIDE, LINKS
from costmodels.simulator.stage_work import Message, StageWork
from costmodels.step.pipeline.passes import Kind, PassOrder
from hardware.arrays import IntArray
from hardware.sharing import Uses

ALL = -1
"""Kind of replicas of tasks that all of them do together."""

OUT, IN = 0, 1
_DETOUR = "detour"
_NOTHING = Demand((Route(0.0),))
"""Demand of tasks that only wait for others."""


class _PassTasks(NamedTuple):
    """First and last task of each pass [n], and the task that runs on its stage before."""

    begin: IntArray
    end: IntArray
    before: IntArray


class Role(StrEnum):
    """Role of a task in a step."""

    PASS = "pass"  # noqa: S105 # of a micro-batch
    HOP = "hop"
    GATHER = "gather"
    REDUCE = "reduce"
    TIED = "tied"
    OPTIMIZER = "optimizer"
    BARRIER = "barrier"


class Label(NamedTuple):
    """Description of a task.

    Attributes:
        role: Role of the task.
        replicas: Number of the kind of replicas; ALL for a reduction.
        stage: Number of the stage that computes or sends.
        kind: Kind of a pass as a `passes.Kind`; of a hop the kind of the sending pass.
        micro_batch: Micro-batch of a pass or hop.
        virtual: Virtual stage of a pass, of a hop's sender, or of the pieces that are gathered or reduced.
        piece: Position of the piece in its virtual stage if a task is one piece, -1 if it is all of them.
    """

    role: Role
    replicas: int
    stage: int
    kind: int = -1
    micro_batch: int = -1
    virtual: int = -1
    piece: int = -1


class StepTasks:
    """All tasks of a step, as its runtime orders them.

    Tasks that differ by their micro-batch only share a label and a demand.
    """

    def __init__(
        self,
        runtime: RuntimeProfile,
        config: ParallelConfig,
        stages: tuple[tuple[StageWork, ...], ...],
        orders: Sequence[PassOrder],
    ) -> None:
        self.runtime, self.config, self.stages = runtime, config, stages
        self.graph = TaskGraph()
        self.like: list[Label] = []
        """Label of each task but for its micro-batch, shared by tasks that are alike."""
        self.micro_batch: list[int] = []
        """Micro-batch of each task; -1 for those that concern all of them."""
        self.num_kinds, self.pp = len(stages), config.pp
        self.resources: dict[tuple[str, int, int, int], int] = {}
        self.messages: dict[tuple[object, ...], Demand] = {}
        """Demands of messages; equal messages share one object."""
        self.passes: dict[tuple[object, ...], Demand] = {}
        """Demands of passes of a stage; passes of equal pieces share one object."""
        self.gradients_kind = stages[0][0].gradients_kind
        self.computed: dict[tuple[int, int, int], list[int]] = {}
        """Tasks of all kinds of replicas that end the gradients of a piece, by stage, chunk and position."""
        self.shared = [self._shared_links(stage) for stage in range(self.pp)]
        gathers = [self._add_gathers(stage) for stage in range(self.pp)]
        for kind, order in enumerate(orders):
            self._add_hops(kind, order, self._add_passes(kind, order, gathers))
        reductions = [self._add_reductions(stage) for stage in range(self.pp)]
        self._add_closing([*reductions, self._add_tied(reductions)])

    def label(self, task: int) -> Label:
        """Return the description of a task."""
        like, micro_batch = self.like[task], self.micro_batch[task]
        return like._replace(micro_batch=micro_batch) if micro_batch >= 0 else like

    def _add(self, label: Label, demand: Demand, after: Iterable[int]) -> int:
        self.micro_batch.append(label.micro_batch)
        self.like.append(label)
        return self.graph.add_like(demand, after)

    def _add_alike(self, alike: Sequence[tuple[Label, Demand]], micro_batches: IntArray) -> IntArray:
        """Add tasks that wait for nothing yet, from what they have in common with others; return their numbers."""
        self.like.extend([label for label, _ in alike])
        self.micro_batch.extend(micro_batches.tolist())
        return self.graph.add_all([demand for _, demand in alike])

    def _device(self, kind: int, stage: int) -> int:
        return kind * self.pp + stage

    def _resource(self, name: str, first: int, second: int, way: int) -> int:
        return self.resources.setdefault((name, first, second, way), len(self.resources))

    def _uses(self, ends: Iterable[tuple[int, int, int]], link: str) -> Uses:
        """Return the shares of its links that a message takes; each end is a kind of replicas, a stage, and a way.

        The devices of a stage send at the same time, and together take all of an adapter that they share.
        """
        found: dict[int, float] = {}
        for kind, stage, way in ends:
            work = self.stages[kind][stage]
            if link in (INSIDE, _DETOUR):
                found[self._resource(link, kind, stage, way)] = 1.0
                continue
            # Devices with adapters of their own do not compete. Uplinks of switches are shared by all hosts below.
            nic = ("adapter", work.host, 0, way) if work.shares_adapter else ("nic", kind, stage, way)
            found[self._resource(*nic)] = 1.0
            if link == ACROSS:
                uplink = self._resource("uplink", work.switch, 0, way)
                found[uplink] = max(found.get(uplink, 0.0), work.uplink_share)
        return tuple(found.items())

    def _message(
        self, message: Message, ends: tuple[tuple[int, int, int], ...], devices: tuple[int, ...] = ()
    ) -> Demand:
        """Return what a message takes: its own links, or inside a host those that they exclude."""
        key = (message, ends, devices)
        if key not in self.messages:
            seconds = message.seconds - message.latency_s
            # The excluded links are a second route that takes longer.
            aside = max(self.stages[kind][stage].detour for kind, stage, _ in ends)
            routes = [Route(seconds, self._uses(ends, message.link))]
            if message.link == INSIDE and aside > 0:
                routes.append(Route(aside * seconds, self._uses(ends, _DETOUR)))
            self.messages[key] = Demand(tuple(routes), message.latency_s, devices)
        return self.messages[key]

    def _add_collective(self, label: Label, messages: Sequence[Message], after: Iterable[int]) -> int:
        """Add a collective over weights of a stage by all kinds of replicas; the slowest sets the time."""
        slowest = max(messages, key=lambda message: message.seconds)
        ends = tuple((kind, label.stage, way) for kind in range(self.num_kinds) for way in (OUT, IN))
        devices = tuple(self._device(kind, label.stage) for kind in range(self.num_kinds))
        return self._add(label, self._message(slowest, ends, devices), after)

    def _shared_links(self, stage: int) -> tuple[str, ...]:
        """Return the links of a stage on which other traffic may be under way while a pass runs."""
        found: set[str] = set()
        for work in self._works_of(stage):
            beside = [work.forward_hop, work.backward_hop, work.each_gather, work.each_scatter]
            beside += [work.once_gather] if self.runtime.overlaps_weight_gather else []
            beside += [work.once_reduce] if self.runtime.overlaps_gradients else []
            found |= {message.link for message in beside if message.seconds > 0}
            # Other stages may be on the same adapter or uplink.
            found |= {BETWEEN} if work.shares_adapter or work.uplink_share else set()
        return tuple(link for link in LINKS if link in found or (link != INSIDE and found - {INSIDE}))

    def _works_of(self, stage: int) -> list[StageWork]:
        return [works[stage] for works in self.stages]

    def _add_gathers(self, stage: int) -> dict[tuple[int, int], int]:
        """Add the gathers of the weights at the step's begin; return the task of each piece, by chunk and position."""
        works = self._works_of(stage)
        found: dict[tuple[int, int], int] = {}
        last = NOTHING
        if self.runtime.overlaps_weight_gather and max(work.once_gather.seconds for work in works) > 0:
            # Pieces are gathered in the order in which the forward passes need them, on one stream.
            for chunk, pieces in enumerate(works[0].chunks):
                for at in range(len(pieces)):
                    label = Label(Role.GATHER, ALL, stage, virtual=chunk * self.pp + stage, piece=at)
                    share = works[0].weight_share[chunk][at]
                    last = self._add_collective(label, [work.once_gather.scaled(share) for work in works], [last])
                    found[chunk, at] = last
        return found

    def _add_passes(self, kind: int, order: PassOrder, gathers: Sequence[Mapping[tuple[int, int], int]]) -> _PassTasks:
        """Add all passes of one kind of replicas, stage by stage."""
        tasks = _PassTasks(*(np.full(len(order.stage), NOTHING) for _ in range(3)))
        for stage in range(self.pp):
            work = self.stages[kind][stage]
            last = NOTHING
            if work.one_layer_s > 0:
                label = Label(Role.GATHER, kind, stage)
                last = self._add(label, Demand((Route(work.one_layer_s),)), [])
            rows = np.flatnonzero(order.stage == stage)
            code = order.kind[rows] * self.config.vpp + order.chunk[rows]
            codes, first = np.unique(code, return_index=True)
            of_code = codes // self.config.vpp
            # The first forward pass of a chunk waits for its gathered weights. Its last pass with gradients lets them
            # leave.
            is_first, is_last = (np.zeros(len(rows), dtype=np.bool_) for _ in range(2))
            is_first[first[of_code == Kind.FORWARD]] = bool(gathers[stage])
            is_last[len(rows) - 1 - np.unique(code[::-1], return_index=True)[1][of_code == self.gradients_kind]] = True
            is_apart = is_first | is_last
            for number in set(of_code.tolist()):
                if self._sharded_traffic(work, Kind(number)):
                    is_apart |= order.kind[rows] == number
            done = 0
            for at in [*np.flatnonzero(is_apart).tolist(), len(rows)]:
                last = self._add_whole_passes(kind, order, rows[done:at], last, tasks)
                if at < len(rows):
                    row, done = rows[at], at + 1
                    tasks.begin[row], tasks.before[row] = len(self.graph), last
                    needs = gathers[stage] if is_first[at] else {}
                    last = self._add_pass(kind, order, int(row), last, needs, is_last=bool(is_last[at]))
                    tasks.end[row] = last
        return tasks

    def _add_whole_passes(self, kind: int, order: PassOrder, rows: IntArray, last: int, tasks: _PassTasks) -> int:
        """Add passes of one stage that are one task each, after its `last` task; return the task that ends them."""
        if not len(rows):
            return last
        stage = int(order.stage[rows[0]])
        passes = list(zip(order.kind[rows].tolist(), order.chunk[rows].tolist(), strict=True))
        alike = {}
        for number, chunk in dict.fromkeys(passes):
            pieces = self.stages[kind][stage].order(chunk, Kind(number))
            label = Label(Role.PASS, kind, stage, Kind(number), virtual=chunk * self.pp + stage)
            alike[number, chunk] = label, self._pass(label, pieces, begins=True)
        added = self._add_alike([alike[one] for one in passes], order.micro_batch[rows])
        before = np.concatenate([[last], added[:-1]])
        self.graph.wait_all(added, before)
        tasks.begin[rows], tasks.end[rows], tasks.before[rows] = added, added, before
        return int(added[-1])

    def _add_pass(
        self, kind: int, order: PassOrder, row: int, last: int, needs: Mapping[tuple[int, int], int], *, is_last: bool
    ) -> int:
        """Add one pass after the stage's `last` task: one task, or one for each piece whose weights need something.

        Return the task that ends it.
        """
        stage, pass_kind, chunk = int(order.stage[row]), Kind(int(order.kind[row])), int(order.chunk[row])
        label = Label(Role.PASS, kind, stage, pass_kind, int(order.micro_batch[row]), chunk * self.pp + stage)
        positions = list(self.stages[kind][stage].order(chunk, pass_kind))
        # A pass is split into pieces only if gathers or reductions concern single pieces.
        is_whole = not positions or (not needs and not (is_last and self._reduces(stage)))
        end, after = last, [last]
        for pieces in [positions] if is_whole else [[at] for at in positions]:
            demand = self._pass(label, pieces, begins=pieces[:1] == positions[:1])
            own = label if is_whole else label._replace(piece=pieces[0])
            after = [end, *(needs[chunk, at] for at in pieces if (chunk, at) in needs)]
            end = self._add(own, demand, after)
            if is_last:
                for at in pieces:
                    self.computed.setdefault((stage, chunk, at), []).append(end)
        return self._add_sharded_traffic(label, end, after)

    def _pass(self, label: Label, pieces: Sequence[int], *, begins: bool) -> Demand:
        """Return what some pieces of one pass take, and the wait for its message's begin if they begin the pass.

        The pass's collectives alternate with kernels many times during other traffic on their links, so the pass takes
        its mean share of these. At that share both slow down as they do if each collective in turn shares the link.
        """
        kind, stage, pass_kind, chunk = label.replicas, label.stage, Kind(label.kind), label.virtual // self.pp
        work = self.stages[kind][stage]
        content = tuple([(work.chunks[chunk][at], work.accumulation_s[chunk][at]) for at in pieces])
        key = (kind, stage, pass_kind, content, begins)
        if key not in self.passes:
            seconds = work.begins_s * begins + sum(work.piece_s(chunk, at, pass_kind) for at in pieces)
            uses: dict[int, float] = {}
            for link in self.shared[stage]:
                # The pass's mean share of a link is the share of its time in which its own collectives keep it busy.
                busy_s = sum(work.traffic_s(chunk, at, pass_kind, link) for at in pieces)
                if busy_s > 0:
                    for resource, amount in self._uses([(kind, stage, OUT), (kind, stage, IN)], link):
                        uses[resource] = uses.get(resource, 0.0) + amount * busy_s / seconds
            route = Route(seconds, tuple(uses.items()))
            self.passes[key] = Demand((route,), devices=(self._device(kind, stage),))
        return self.passes[key]

    def _add_sharded_traffic(self, of: Label, end: int, after: Sequence[int]) -> int:
        """Add the traffic that ZeRO sends with every pass, beside it or after it; return the task that ends both.

        Args:
            of: Label of the pass.
            end: Task that ends it.
            after: Tasks that this task waits for in its stage.
        """
        work, pass_kind = self.stages[of.replicas][of.stage], Kind(of.kind)
        if not self._sharded_traffic(work, pass_kind):
            return end
        # A chunk's message is its share of the stage's weights.
        share = sum(work.weight_share[of.virtual // self.pp])
        message = work.each_gather.scaled(share)
        if pass_kind == self.gradients_kind:
            scatter = work.each_scatter.scaled(share)
            seconds, latency_s = message.seconds + scatter.seconds, message.latency_s + scatter.latency_s
            message = replace(message, seconds=seconds, latency_s=latency_s)
        label = Label(Role.GATHER, of.replicas, of.stage, virtual=of.virtual)
        ends = tuple((of.replicas, of.stage, way) for way in (OUT, IN))
        demand = self._message(message, ends, (self._device(of.replicas, of.stage),))
        if not self.runtime.overlaps_weight_gather:
            return self._add(label, demand, [end])
        # Beside the pass, the message waits for the same tasks as the pass does. A barrier ends when both have ended.
        beside = self._add(label, demand, after)
        return self._add(Label(Role.BARRIER, of.replicas, of.stage), _NOTHING, [end, beside])

    def _sharded_traffic(self, work: StageWork, pass_kind: Kind) -> bool:
        """Return whether ZeRO sends weights or gradients with every pass of a kind."""
        scatters = pass_kind == self.gradients_kind and work.each_scatter.seconds > 0
        return work.each_gather.seconds > 0 or scatters

    def _reduces(self, stage: int) -> bool:
        """Return whether gradients leave piece by piece beside the last backward pass."""
        return self.runtime.overlaps_gradients and self.stages[0][stage].once_reduce.seconds > 0

    def _add_hops(self, kind: int, order: PassOrder, passes: _PassTasks) -> None:
        """Add the messages between stages; every pass of another stage waits for its message.

        If messages do not run beside compute, they set out when the receiver is free for them.
        """
        num_virtual = self.pp * self.config.vpp
        if num_virtual == 1:
            return
        virtual = order.chunk * self.pp + order.stage
        row_of = np.zeros((len(Kind), num_virtual, order.num_micro_batches), dtype=np.int64)
        row_of[order.kind, virtual, order.micro_batch] = np.arange(len(virtual))
        # The first virtual stage receives nothing forward. The last one begins its backward pass after its own forward
        # pass, and gradients of weights follow those of inputs.
        sender = np.where(order.kind == Kind.FORWARD, virtual - 1, virtual + 1)
        sender = np.where(order.kind == Kind.WEIGHTS, virtual, sender)
        is_turn = sender == num_virtual
        sender = np.where(is_turn, virtual, sender)
        of_kind = np.select([is_turn, order.kind == Kind.WEIGHTS], [Kind.FORWARD, Kind.BACKWARD], order.kind)
        sent = np.where(sender >= 0, passes.end[row_of[of_kind, sender, order.micro_batch]], NOTHING)
        is_hop = (sender >= 0) & (sender != virtual) & (self.pp > 1)
        self.graph.wait_all(passes.begin[~is_hop], sent[~is_hop])
        hops = list(zip(order.kind[is_hop].tolist(), sender[is_hop].tolist(), strict=True))
        alike = {(number, virtual): self._hop(kind, number, virtual) for number, virtual in dict.fromkeys(hops)}
        added = self._add_alike([alike[one] for one in hops], order.micro_batch[is_hop])
        self.graph.wait_all(added, sent[is_hop])
        self.graph.wait_all(passes.begin[is_hop], added)
        # without chunks a stage has nothing to do until its message has come
        if not self.runtime.overlaps_p2p or self.config.vpp == 1:
            self.graph.wait_all(added, passes.before[is_hop])

    def _hop(self, kind: int, number: int, sender: int) -> tuple[Label, Demand]:
        """Return the label and the demand of the messages from one virtual stage, by the kind of pass."""
        work, stage = self.stages[kind][sender % self.pp], sender % self.pp
        is_forward = number == Kind.FORWARD
        to = (sender + (1 if is_forward else -1)) % self.pp
        message = work.forward_hop if is_forward else work.backward_hop
        demand = self._message(message, ((kind, stage, OUT), (kind, to, IN)))
        return Label(Role.HOP, kind, stage, number, virtual=sender), demand

    def _add_reductions(self, stage: int) -> list[int]:
        """Add the reduction of a stage's gradients and a sharding plan's traffic; return the tasks that end it."""
        ends, works = self._add_reduction(stage), self._works_of(stage)
        if not max(work.once_more.seconds for work in works) > 0:
            return ends
        return [self._add_collective(Label(Role.REDUCE, ALL, stage), [work.once_more for work in works], ends)]

    def _add_reduction(self, stage: int) -> list[int]:
        """Add the reduction of a stage's gradients, piece by piece if it overlaps; return the tasks that end it."""
        works = self._works_of(stage)
        # Pieces in the order in which their gradients are ready.
        ready = [(key, tasks) for key, tasks in self.computed.items() if key[0] == stage]
        passes = [task for _, tasks in ready for task in tasks]
        if not max(work.once_reduce.seconds for work in works) > 0:
            return passes
        if not self._reduces(stage):
            return [self._add_collective(Label(Role.REDUCE, ALL, stage), [work.once_reduce for work in works], passes)]
        last = NOTHING
        for (_, chunk, at), tasks in ready:
            label = Label(Role.REDUCE, ALL, stage, virtual=chunk * self.pp + stage, piece=at)
            share = works[0].weight_share[chunk][at]
            last = self._add_collective(label, [work.once_reduce.scaled(share) for work in works], [last, *tasks])
        return [last, *passes]

    def _add_tied(self, reductions: Sequence[list[int]]) -> list[int]:
        """Add the exchange of the gradients of a tied table, of which the first and the last stage have copies.

        It waits for all other gradients of both stages. The stages in between reduce theirs meanwhile.
        """
        first, last = self._works_of(0), self._works_of(self.pp - 1)
        if self.pp == 1 or not max(work.once_tied.seconds for work in first) > 0:
            return []
        after = [*reductions[0], *reductions[-1]]
        label = Label(Role.TIED, ALL, self.pp - 1)
        slowest = max((work.once_tied for work in (*first, *last)), key=lambda message: message.seconds)
        stages, ways = (0, self.pp - 1), (OUT, IN)
        ends = tuple((kind, stage, way) for kind in range(self.num_kinds) for stage in stages for way in ways)
        return [self._add(label, self._message(slowest, ends), after)]

    def _add_closing(self, reductions: Sequence[list[int]]) -> None:
        """Add the optimizer's steps, which wait for all gradients' norm, and the gathers that no pass waits for."""
        # Gradient clipping needs the norm of all gradients, so no stage may step before the last one has reduced.
        reduced = [task for tasks in reductions for task in tasks]
        norm = self._add(Label(Role.BARRIER, ALL, 0), _NOTHING, reduced)
        for stage in range(self.pp):
            works = self._works_of(stage)
            # A runtime that does not overlap the gather gathers all weights right after the optimizer's step.
            stepped = [
                self._add(Label(Role.OPTIMIZER, kind, stage), Demand((Route(work.optimizer_s),)), [norm])
                for kind, work in enumerate(works)
            ]
            if not self.runtime.overlaps_weight_gather and max(work.once_gather.seconds for work in works) > 0:
                self._add_collective(Label(Role.GATHER, ALL, stage), [work.once_gather for work in works], stepped)
