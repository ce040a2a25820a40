"""Event simulation of one optimizer step: every pass, transfer and collective of one configuration on one cluster.

This is the finer of the two fidelities. It shares the kernels and the collectives with `step_time.py`, and nothing
else. The terms that the closed form adds up run here on the compute and communication streams of devices (see
events.py), so that unlike stages, unlike devices among the replicas and transfers that share links have their real
cost. Replicas that are alike are simulated once.

A step: sharded weights are gathered, piece by piece, before the first micro-batch needs them. The passes run in the
order of their schedule and hand on their results. Gradients leave piece by piece while the last micro-batch runs
backward, those of all replicas of a stage together. Then the gradients of a tied table go between the first and the
last stage. When the last gradient has arrived, the optimizer steps everywhere.

Letters: p stages, v virtual stages, k kinds of replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.operators.kernels import CollectiveTime, KernelTime, collective_s, kernel_s
from costmodels.simulator.events import NOTHING, Route, TaskGraph, Timeline, run
from costmodels.simulator.pass_program import ACROSS, BETWEEN, INSIDE, LINKS
from costmodels.simulator.stage_work import Message, StageWork, stage_works
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.layer_residuals import layer_residual
from costmodels.step.memory import MemoryEstimate
from costmodels.step.overheads import overhead_s
from costmodels.step.passes import Kind, PassOrder, pass_order
from costmodels.step.replicas import ReplicaKind, replica_kinds
from costmodels.step.stage_degrees import widest_variant
from hardware.sharing import Uses

ALL = -1
"""Kind of replicas of tasks that all of them do together."""

OUT, IN = 0, 1
_DETOUR = "detour"


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Simulation:
    """Result of one simulated step.

    Attributes:
        step_time_s: Wall clock of the step [s].
        breakdown_s: Parts of the step time by BREAKDOWN, on the critical path [s]; they sum to it.
        replicas: Kinds of replicas; the timeline has one replica of each.
        stages: Work of each stage of each kind [k][p].
        labels: Description of each task.
        timeline: Times at which the tasks ran, before overheads.
    """

    step_time_s: float
    breakdown_s: dict[str, float]
    replicas: tuple[ReplicaKind, ...]
    stages: tuple[tuple[StageWork, ...], ...]
    labels: tuple[Label, ...]
    timeline: Timeline


def simulate_step(
    setting: Setting,
    config: ParallelConfig,
    *,
    schedule: str = "1f1b",
    kernel_time: KernelTime = kernel_s,
    collective_time: CollectiveTime = collective_s,
    memory: MemoryEstimate | None = None,
) -> Simulation:
    """Simulate one step.

    Args:
        setting: Job, cluster and runtime. The configuration's dp*mbs divides the job's global batch.
        config: Configuration to simulate; it occupies all devices of the cluster.
        schedule: One of `passes.SCHEDULES`.
        kernel_time: Model of a kernel's time.
        collective_time: Model of a collective's time.
        memory: Memory of the configuration, if it is known: a configuration that does not quite fit runs slowly.

    Raises:
        ValueError: the schedule does not support these degrees.
    """
    grid = ConfigGrid.from_configs([config])
    setting = replace(setting, cluster=setting.cluster.reordered(config.assignment.hosts))
    cluster, runtime = setting.cluster, setting.runtime
    # Replicas may get unequal numbers of micro-batches; each kind has an order of its own.
    even = setting.job.global_batch_size // (config.dp * config.mbs)
    micro_batches = np.array(config.assignment.micro_batches or (even,) * config.dp, dtype=np.int64)
    # If stages have tensor degrees of their own, replicas are those of the stages with the largest.
    widest = widest_variant(config)
    micro_batches = micro_batches[: widest.dp]
    kinds = replica_kinds(cluster, widest, micro_batches)
    orders = [pass_order(schedule, config.pp, config.vpp, kind.micro_batches) for kind in kinds]
    stages = stage_works(
        setting,
        config,
        kinds,
        splits_backward=orders[0].splits_backward,
        kernel_time=kernel_time,
        collective_time=collective_time,
    )
    writer = _Writer(runtime, widest, stages, orders)
    timeline = run(writer.graph, [1.0] * len(writer.resources), runtime.overlap_efficiency)
    breakdown = _breakdown(timeline, writer, stages, orders)
    # A pipeline spans several hosts if any of its ranks changes hosts from stage to stage.
    hosts = cluster.rank_host().reshape(config.pp, -1)
    spans = np.array([1 + int((hosts != hosts[0]).any())])
    passes_s = np.array([timeline.makespan_s])
    breakdown["overhead"] = float(overhead_s(setting, grid, spans, memory, passes_s)[0])
    unexplained = 1.0
    if runtime.residuals:
        unexplained = float(np.exp(layer_residual(runtime.residuals, cluster.device_names, setting.job, grid))[0])
    breakdown = {part: seconds * unexplained for part, seconds in breakdown.items()}
    return Simulation(
        step_time_s=sum(breakdown.values()),
        breakdown_s=breakdown,
        replicas=kinds,
        stages=stages,
        labels=tuple(writer.labels),
        timeline=timeline,
    )


class _Writer:
    """Writer that turns a step into tasks.

    Tasks of one stream wait for each other in the order of the stream. Streams are the passes of a stage, and its
    collectives over weights, which all replicas of the stage have in common.
    """

    def __init__(
        self,
        runtime: RuntimeProfile,
        config: ParallelConfig,
        stages: tuple[tuple[StageWork, ...], ...],
        orders: Sequence[PassOrder],
    ) -> None:
        self.runtime, self.config, self.stages, self.orders = runtime, config, stages, orders
        self.graph, self.labels = TaskGraph(), list[Label]()
        self.num_kinds, self.pp = len(stages), config.pp
        self.resources: dict[tuple[str, int, int, int], int] = {}
        self.ways: dict[tuple[Message, tuple[tuple[int, int, int], ...]], tuple[Route, ...]] = {}
        """Routes of messages; equal messages share one object."""
        self.gradients_kind = stages[0][0].gradients_kind
        self.ends: dict[tuple[int, int, int, int], int] = {}
        """Last task of a pass, by kind of replicas, kind of pass, micro-batch and virtual stage."""
        self.begins: dict[tuple[int, int, int, int], int] = {}
        self.routes: dict[tuple[int, int, Kind, int, int, float], Route] = {}
        """Routes of some pieces of one pass; they are alike for all micro-batches."""
        self.before: dict[int, int] = {}
        """Task that runs on a stage before the first task of a pass."""
        self.computed: dict[tuple[int, int, int], list[int]] = {}
        """Tasks of all kinds of replicas that end the gradients of a piece, by stage, chunk and position."""
        self.shared = [self._shared_links(stage) for stage in range(self.pp)]
        gathers = [self._add_gathers(stage) for stage in range(self.pp)]
        for kind, order in enumerate(orders):
            self._add_passes(kind, order, gathers)
            self._add_hops(kind)
        reductions = [self._add_reductions(stage) for stage in range(self.pp)]
        self._add_closing([*reductions, self._add_tied(reductions)])

    def _add(self, label: Label, *routes: Route, **rest: Any) -> int:
        self.labels.append(label)
        return self.graph.add(*routes, **rest)

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

    def _routes(self, message: Message, ends: Sequence[tuple[int, int, int]]) -> tuple[Route, ...]:
        """Return the links that a message may take: its own, or inside a host those that they exclude."""
        key = (message, tuple(ends))
        if key not in self.ways:
            seconds = message.seconds - message.latency_s
            # The excluded links are a second route that takes longer.
            aside = max(self.stages[kind][stage].detour for kind, stage, _ in ends)
            routes = [Route(seconds, self._uses(ends, message.link))]
            if message.link == INSIDE and aside > 0:
                routes.append(Route(aside * seconds, self._uses(ends, _DETOUR)))
            self.ways[key] = tuple(routes)
        return self.ways[key]

    def _add_message(
        self,
        label: Label,
        message: Message,
        ends: Sequence[tuple[int, int, int]],
        after: Iterable[int],
        devices: tuple[int, ...] = (),
    ) -> int:
        routes = self._routes(message, ends)
        return self._add(label, *routes, latency_s=message.latency_s, devices=devices, after=after)

    def _add_collective(self, label: Label, messages: Sequence[Message], after: Iterable[int]) -> int:
        """Add a collective over weights of a stage by all kinds of replicas; the slowest sets the time."""
        slowest = max(messages, key=lambda message: message.seconds)
        ends = [(kind, label.stage, way) for kind in range(self.num_kinds) for way in (OUT, IN)]
        devices = tuple(self._device(kind, label.stage) for kind in range(self.num_kinds))
        return self._add_message(label, slowest, ends, after, devices)

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

    def _add_passes(self, kind: int, order: PassOrder, gathers: Sequence[Mapping[tuple[int, int], int]]) -> None:
        """Add all passes of one kind of replicas, stage by stage."""
        for stage in range(self.pp):
            work = self.stages[kind][stage]
            last = NOTHING
            if work.one_layer_s > 0:
                label = Label(Role.GATHER, kind, stage)
                last = self._add(label, Route(work.one_layer_s))
            seen: set[tuple[int, int]] = set()
            # Passes of each chunk whose gradients are still to come.
            remaining = dict.fromkeys(range(self.config.vpp), order.num_micro_batches)
            rows = np.flatnonzero(order.stage == stage)
            for number, micro_batch, chunk in zip(
                order.kind[rows].tolist(), order.micro_batch[rows].tolist(), order.chunk[rows].tolist(), strict=True
            ):
                pass_kind = Kind(number)
                # The first forward pass of a chunk waits for its gathered weights. Its last pass with gradients lets
                # them leave.
                is_first = pass_kind == Kind.FORWARD and (stage, chunk) not in seen
                if is_first:
                    seen.add((stage, chunk))
                if pass_kind == self.gradients_kind:
                    remaining[chunk] -= 1
                is_last = pass_kind == self.gradients_kind and not remaining[chunk]
                needs = gathers[stage] if is_first else {}
                last = self._add_pass(kind, stage, pass_kind, micro_batch, chunk, last, needs, is_last=is_last)

    def _add_pass(
        self,
        kind: int,
        stage: int,
        pass_kind: Kind,
        micro_batch: int,
        chunk: int,
        last: int,
        needs: Mapping[tuple[int, int], int],
        *,
        is_last: bool,
    ) -> int:
        """Add one pass after the stage's `last` task: one task, or one for each piece whose weights need something."""
        work = self.stages[kind][stage]
        virtual = chunk * self.pp + stage
        label = Label(Role.PASS, kind, stage, pass_kind, micro_batch, virtual)
        key = (kind, pass_kind, micro_batch, virtual)
        devices = (self._device(kind, stage),)
        order = list(work.order(chunk, pass_kind))
        # A pass is split into pieces only if gathers or reductions concern single pieces.
        is_whole = not order or (not needs and not (is_last and self._reduces(stage)))
        begins_s = work.begins_s
        self.begins[key] = len(self.graph)
        self.before[len(self.graph)] = last
        end = last
        for pieces in [order] if is_whole else [[at] for at in order]:
            route = self._pass_route(kind, stage, pass_kind, chunk, pieces, begins_s)
            begins_s = 0.0
            own = label if is_whole else label._replace(piece=pieces[0])
            after = [end, *(needs[chunk, at] for at in pieces if (chunk, at) in needs)]
            end = self._add(own, route, after=after, devices=devices)
            if is_last:
                for at in pieces:
                    self.computed.setdefault((stage, chunk, at), []).append(end)
        end = self._add_sharded_traffic(kind, stage, pass_kind, chunk, end, devices)
        self.ends[key] = end
        return end

    def _pass_route(
        self, kind: int, stage: int, pass_kind: Kind, chunk: int, pieces: Sequence[int], begins_s: float
    ) -> Route:
        """Return the route of some pieces of one pass; the results are remembered.

        The pass's collectives alternate with kernels many times during other traffic on their links, so the pass takes
        its mean share of these. At that share both slow down as they do if each collective in turn shares the link.
        """
        key = (kind, stage, pass_kind, chunk, pieces[0] if len(pieces) == 1 else -1, begins_s)
        if key in self.routes:
            return self.routes[key]
        work = self.stages[kind][stage]
        seconds = begins_s + sum(work.piece_s(chunk, at, pass_kind) for at in pieces)
        uses: dict[int, float] = {}
        for link in self.shared[stage]:
            # The pass's mean share of a link is the share of its time in which its own collectives keep it busy.
            busy_s = sum(work.traffic_s(chunk, at, pass_kind, link) for at in pieces)
            if busy_s > 0:
                for resource, amount in self._uses([(kind, stage, OUT), (kind, stage, IN)], link):
                    uses[resource] = uses.get(resource, 0.0) + amount * busy_s / seconds
        self.routes[key] = Route(seconds, tuple(uses.items()))
        return self.routes[key]

    def _add_sharded_traffic(
        self, kind: int, stage: int, pass_kind: Kind, chunk: int, end: int, devices: tuple[int, ...]
    ) -> int:
        """Add the traffic that ZeRO sends with every pass, beside it or after it; return the task that ends both."""
        work = self.stages[kind][stage]
        if not (work.each_gather.seconds or (pass_kind == self.gradients_kind and work.each_scatter.seconds)):
            return end
        # A chunk's message is its share of the stage's weights.
        share = sum(work.weight_share[chunk])
        message = work.each_gather.scaled(share)
        if pass_kind == self.gradients_kind:
            after = work.each_scatter.scaled(share)
            seconds, latency_s = message.seconds + after.seconds, message.latency_s + after.latency_s
            message = replace(message, seconds=seconds, latency_s=latency_s)
        ends = [(kind, stage, way) for way in (OUT, IN)]
        label = Label(Role.GATHER, kind, stage, virtual=chunk * self.pp + stage)
        if not self.runtime.overlaps_weight_gather:
            return self._add_message(label, message, ends, [end], devices)
        # Beside the pass, the message waits for the same tasks as the pass does. A barrier ends when both have ended.
        beside = self._add_message(label, message, ends, list(self.graph.after[end]), devices)
        return self._add(Label(Role.BARRIER, kind, stage), Route(0.0), after=[end, beside])

    def _reduces(self, stage: int) -> bool:
        """Return whether gradients leave piece by piece beside the last backward pass."""
        return self.runtime.overlaps_gradients and self.stages[0][stage].once_reduce.seconds > 0

    def _add_hops(self, kind: int) -> None:
        """Add the messages between stages; every pass of another stage waits for its message.

        If messages do not run beside compute, they set out when the receiver is free for them.
        """
        num_virtual = self.pp * self.config.vpp
        if num_virtual == 1:
            return
        # without chunks a stage has nothing to do until its message has come
        waits = not self.runtime.overlaps_p2p or self.config.vpp == 1
        for (replicas, number, micro_batch, virtual), begin in list(self.begins.items()):
            if replicas != kind:
                continue
            pass_kind = Kind(number)
            if pass_kind == Kind.WEIGHTS:
                self.graph.wait(begin, self.ends[kind, Kind.BACKWARD, micro_batch, virtual])
                continue
            is_forward = pass_kind == Kind.FORWARD
            # The first virtual stage receives nothing forward. The last one begins its backward pass after its own
            # forward pass.
            sender = virtual - 1 if is_forward else virtual + 1
            if sender < 0:
                continue
            if sender == num_virtual:
                self.graph.wait(begin, self.ends[kind, Kind.FORWARD, micro_batch, virtual])
                continue
            stage, to = sender % self.pp, virtual % self.pp
            sent = self.ends[kind, number, micro_batch, sender]
            if stage == to:
                self.graph.wait(begin, sent)
                continue
            work = self.stages[kind][stage]
            message = work.forward_hop if is_forward else work.backward_hop
            after = [sent, self.before[begin]] if waits else [sent]
            label = Label(Role.HOP, kind, stage, number, micro_batch, sender)
            self.graph.wait(begin, self._add_message(label, message, ((kind, stage, OUT), (kind, to, IN)), after))

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
        ends = [(kind, stage, way) for kind in range(self.num_kinds) for stage in (0, self.pp - 1) for way in (OUT, IN)]
        return [self._add_message(label, slowest, ends, after)]

    def _add_closing(self, reductions: Sequence[list[int]]) -> None:
        """Add the optimizer's steps, which wait for all gradients' norm, and the gathers that no pass waits for."""
        # Gradient clipping needs the norm of all gradients, so no stage may step before the last one has reduced.
        reduced = [task for tasks in reductions for task in tasks]
        norm = self._add(Label(Role.BARRIER, ALL, 0), Route(0.0), after=reduced)
        for stage in range(self.pp):
            works = self._works_of(stage)
            # A runtime that does not overlap the gather gathers all weights right after the optimizer's step.
            stepped = [
                self._add(Label(Role.OPTIMIZER, kind, stage), Route(work.optimizer_s), after=[norm])
                for kind, work in enumerate(works)
            ]
            if not self.runtime.overlaps_weight_gather and max(work.once_gather.seconds for work in works) > 0:
                self._add_collective(Label(Role.GATHER, ALL, stage), [work.once_gather for work in works], stepped)


def _breakdown(
    timeline: Timeline, writer: _Writer, stages: tuple[tuple[StageWork, ...], ...], orders: Sequence[PassOrder]
) -> dict[str, float]:
    """Break the critical path down by BREAKDOWN.

    Passes on it beyond those of the busiest stage count as bubble. The time by which passes are slowed down counts as
    traffic of the weights beside them.
    """
    seconds = dict.fromkeys(BREAKDOWN, 0.0)
    on_path = dict.fromkeys(Role, 0.0)
    slowed_s = previous_s = 0.0
    for task in timeline.critical_path():
        role, end_s = writer.labels[task].role, float(timeline.end_s[task])
        # Tasks of the critical path follow each other without a gap, so each counts from the end of the one before.
        on_path[role] += end_s - previous_s
        if role == Role.PASS:
            # A pass takes longer than its own work if it shares links with the traffic of weights.
            slowed_s += end_s - previous_s - writer.graph.routes[task][0].work_s
        previous_s = end_s
    on_path[Role.PASS] -= slowed_s
    seconds["pp"] = on_path[Role.HOP] + on_path[Role.TIED]
    seconds["dp"] = on_path[Role.GATHER] + on_path[Role.REDUCE] + slowed_s
    seconds["optimizer"] = on_path[Role.OPTIMIZER]
    # The passes on the path are divided into the parts of the busiest stage's work; the rest is bubble.
    busiest, busiest_s = {"compute": 0.0}, 0.0
    for works, order in zip(stages, orders, strict=True):
        for work in works:
            parts = {part: order.num_micro_batches * own for part, own in work.parts_s().items()}
            if sum(parts.values()) > busiest_s:
                busiest, busiest_s = parts, sum(parts.values())
    # The path may hold less than the busiest stage's passes, when other tasks took their place on it.
    passes_s = on_path[Role.PASS]
    share = min(passes_s / busiest_s, 1.0) if busiest_s > 0 else 0.0
    for part, own in busiest.items():
        seconds[part] += share * own
    seconds["bubble"] = max(passes_s - busiest_s, 0.0)
    return seconds
