"""Prices of the work of each stage: how long everything in a simulated step takes.

Times are those of the devices and links of the stage's own hosts. Stages that are alike are priced once.

Letters: p stages, v virtual stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from costmodels.blocks.operator import Phase
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, KernelTime, collective_latency_s, kernel_s
from costmodels.operators.layer_operators import Collective
from costmodels.simulator.operator_prices import OperatorPrices
from costmodels.simulator.pass_program import (
    INSIDE,
    Program,
    link_between,
    piece_launches,
    piece_programs,
    split_weight_gradients,
)
from costmodels.simulator.stage_work import NO_MESSAGE, Message, StageWork
from costmodels.step.changed_layers import change_of, of_blocks
from costmodels.step.launches import beyond_device_s, hops_launch_s, issue_s
from costmodels.step.pipeline.passes import Kind
from costmodels.step.pipeline.schedules import chunk_of_layer, mtp_part
from costmodels.step.pipeline.transfers import hop_collectives, transfer_collectives
from costmodels.step.placement import Groups, local_parameters, place_replica
from costmodels.step.replicas import ReplicaKind
from costmodels.step.weights.kept_parts import KeptParts
from costmodels.step.weights.offload import host_rates, optimizer_step_s
from costmodels.step.weights.passes import accumulation_s, optimizer_pass_s
from costmodels.step.weights.products import update_products_s
from costmodels.step.weights.traffic import weight_collectives, weight_traffic
from hardware.arrays import FloatArray
from hardware.link import combine_links, detour


def stage_works(
    setting: Setting,
    config: ParallelConfig,
    kinds: tuple[ReplicaKind, ...],
    *,
    splits_backward: bool,
    prices: OperatorPrices,
    collective_time: CollectiveTime,
) -> tuple[tuple[StageWork, ...], ...]:
    """Compute the work of every stage in every kind of replicas [k][p].

    The cluster's hosts must be in the order of the ranks.
    """
    builder = _Builder(setting, config, splits_backward, prices, collective_time)
    return tuple(tuple(builder.stage(kind, stage) for stage in range(config.pp)) for kind in kinds)


def price_operators(
    setting: Setting, configs: Iterable[ParallelConfig], kernel_time: KernelTime = kernel_s
) -> OperatorPrices:
    """Price the operators of all stages of some configurations."""
    variants = [own for config in configs for own in _recompute_variants(config).values()]
    return OperatorPrices(setting.job, setting.runtime, variants, kernel_time)


def _recompute_variants(config: ParallelConfig) -> dict[bool, ParallelConfig]:
    """Return the configuration as it is and, if some layers are recomputed in full, with full recomputation."""
    full = {True: replace(config, recompute="full")} if any(config.recomputed) else {}
    return {False: config} | full


def virtual_stages(
    job: TrainingJob, runtime: RuntimeProfile, config: ParallelConfig
) -> tuple[tuple[tuple[int, bool], ...], ...]:
    """Return the pieces of each virtual stage [v], and whether each is a layer that is recomputed in full.

    The first layers of a virtual stage are the recomputed ones.
    """
    # The embedding opens the first virtual stage, and the head closes the last one.
    model, num_virtual = job.model, config.pp * config.vpp
    virtual_of_layer = chunk_of_layer(model, runtime, config.pp, config.vpp, config.assignment.layers)
    recomputed = config.recomputed
    found: list[list[tuple[int, bool]]] = [[] for _ in range(num_virtual)]
    for virtual, piece in zip(virtual_of_layer.tolist(), model.piece_of_layer.tolist(), strict=True):
        found[virtual].append((piece, len(found[virtual]) < recomputed[virtual]))
    of_part = [len(pieces) for pieces in found]
    if model.num_mtp_layers:
        found[mtp_part(of_part)] += [(len(model.pieces) - 3, False)] * model.num_mtp_layers
    found[0][:0] = [*((piece, False) for piece in model.tower_pieces), (len(model.pieces) - 2, False)]
    found[-1].append((len(model.pieces) - 1, False))
    return tuple(tuple(pieces) for pieces in found)


_Programs = Mapping[tuple[int, bool, Kind], Program]


class _Place(NamedTuple):
    """Prices that all stages in places of one kind have in common.

    Attributes:
        groups: Groups of the stage's ranks.
        device: Number of its slowest device.
        programs: Programs of all pieces on that device, by kind of pass.
        program_s: Time of each program [s].
        busy_s: Time for which each program keeps each link busy [s].
    """

    groups: Groups
    device: int
    programs: _Programs
    program_s: Mapping[tuple[int, bool, Kind], float]
    busy_s: Mapping[tuple[int, bool, Kind], Mapping[str, float]]


class _Builder:
    """Builder of the work of stages; equal stages are computed once."""

    def __init__(
        self,
        setting: Setting,
        config: ParallelConfig,
        splits_backward: bool,
        prices: OperatorPrices,
        collective_time: CollectiveTime,
    ) -> None:
        cluster = setting.cluster
        self.job, self.cluster, self.runtime, self.config = setting.job, cluster, setting.runtime, config
        self.splits_backward = splits_backward
        self.prices, self.collective_time = prices, collective_time
        self.grid = ConfigGrid.from_configs([config])
        # Ranks in Megatron's order: pp slowest, then dp, then the ranks of one replica of a stage.
        self.cells = np.arange(cluster.num_devices).reshape(config.pp, config.dp, -1)
        self.shares_adapters = any(link.sharers > 1 for group in cluster.groups for link in group.nic_links)
        self.group_ends = np.cumsum([group.hosts for group in cluster.groups])
        self.virtual = virtual_stages(setting.job, setting.runtime, config)
        self.launches = {
            again: piece_launches(setting.job.model, prices, own) for again, own in _recompute_variants(config).items()
        }
        self.found: dict[tuple[object, ...], StageWork] = {}
        self.places: dict[tuple[object, ...], _Place] = {}
        self.hops: dict[tuple[object, ...], Message] = {}

    def stage(self, kind: ReplicaKind, stage: int) -> StageWork:
        """Return the work of one stage in one kind of replicas."""
        # Programs depend on the place alone, and a hop on its links too; the work of a stage depends on its pieces as
        # well.
        where = self._place_key(kind, stage)
        chunks = self.virtual[stage :: self.config.pp]
        hops = tuple(self._hop_key(kind, stage, to) for to in (stage + 1, stage - 1))
        key = (where, chunks, hops)
        if key not in self.found:
            if where not in self.places:
                self.places[where] = self._price(kind, stage)
            place, own = self.places[where], stage if self.shares_adapters or self.cluster.switches else None
            for to, hop, phase in zip((stage + 1, stage - 1), hops, Phase, strict=True):
                # Where adapters or switches are shared, the whole stages at both ends count.
                if (where, hop, phase, own) not in self.hops:
                    self.hops[where, hop, phase, own] = self._hop(kind, stage, to, phase, place.groups)
            forward, backward = (self.hops[where, hop, phase, own] for hop, phase in zip(hops, Phase, strict=True))
            self.found[key] = self._work(kind, stage, chunks, place, forward, backward)
        # If adapters or switches are shared, otherwise equal stages differ by their hosts.
        if not (self.shares_adapters or self.cluster.switches):
            return self.found[key]
        host = self._host(kind, stage)
        switch = self.cluster.switches[host] if self.cluster.switches else 0
        return replace(self.found[key], host=host, switch=switch)

    def _place_key(self, kind: ReplicaKind, stage: int) -> tuple[object, ...]:
        """Return a key that is equal for places where a replica of a stage has equal devices and links."""
        cell, whole = self.cells[stage, kind.first], self.cells[stage].ravel()
        hosts, host_kinds = self.cluster.rank_host(), self.cluster.rank_host_kind()
        domains = self.cluster.rank_domain()
        # Places are equal if their hosts, kinds of hosts and numbers of ranks per host are equal, and so are their
        # domains, for the replica and for the whole stage, over which weights are reduced.
        spans_domains = bool((domains[self.cells[:, kind.first]] != domains[cell]).any())
        tells_hosts = bool(self.cluster.slow_pairs or self.cluster.switches)
        # With slow pairs of hosts or with switches, each host differs. Otherwise hosts are numbered from the stage's
        # first one.
        least, least_domain = (0, 0) if tells_hosts else (hosts[whole].min(), domains[whole].min())
        return (
            (hosts[cell] - least).tobytes(),
            host_kinds[cell].tobytes(),
            np.bincount(hosts[whole] - least).tobytes(),
            host_kinds[whole].tobytes(),
            (domains[cell] - least_domain).tobytes(),
            np.bincount(domains[whole] - least_domain).tobytes(),
            spans_domains,
        )

    def _hop_key(self, kind: ReplicaKind, stage: int, to: int) -> tuple[object, ...]:
        """Return a key that is equal for hops over equal links."""
        ends = self.cells[stage, kind.first], self.cells[to % self.config.pp, kind.first]
        hosts, host_kinds = self.cluster.rank_host(), self.cluster.rank_host_kind()
        domains = self.cluster.rank_domain()
        tells_hosts = self.cluster.slow_pairs or self.cluster.switches
        pairs = tells_hosts and (hosts[ends[0]].tobytes(), hosts[ends[1]].tobytes())
        return (bool((domains[ends[0]] != domains[ends[1]]).any()), *(host_kinds[end].tobytes() for end in ends), pairs)

    def _price(self, kind: ReplicaKind, stage: int) -> _Place:
        """Price the programs of a stage on its slowest device."""
        groups = place_replica(self.cluster, self.grid, stage, kind.first)
        overlap, priced = self.runtime.overlap_efficiency, []
        for number in kind.devices[stage]:
            programs = self._programs_on(number, groups)
            program_s = {key: sum(one.duration_s(overlap) for one in program) for key, program in programs.items()}
            busy_s = {key: _busy_s(program) for key, program in programs.items()}
            priced.append(_Place(groups, number, programs, program_s, busy_s))
        # The slowest kind of device sets the pace of a stage.
        return max(priced, key=lambda place: sum(place.program_s.values()))

    def _programs_on(self, device: int, groups: Groups) -> _Programs:
        """Return the programs of all pieces on one device, by kind of pass."""
        found: dict[tuple[int, bool, Kind], Program] = {}
        for again, config in _recompute_variants(self.config).items():
            programs = piece_programs(
                self.job,
                self.runtime,
                config,
                groups,
                self.cluster.devices[device],
                prices=self.prices,
                collective_time=self.collective_time,
            )
            for (piece, phase), program in programs.items():
                if phase == Phase.FORWARD:
                    found[piece, again, Kind.FORWARD] = program
                elif self.splits_backward:
                    # Zero-bubble schedules run the gradients of weights as a separate pass without communication.
                    backward, weights = split_weight_gradients(program)
                    found[piece, again, Kind.BACKWARD], found[piece, again, Kind.WEIGHTS] = backward, weights
                else:
                    found[piece, again, Kind.BACKWARD] = program
        return found

    def _work(
        self,
        kind: ReplicaKind,
        stage: int,
        chunks: tuple[tuple[tuple[int, bool], ...], ...],
        place: _Place,
        forward_hop: Message,
        backward_hop: Message,
    ) -> StageWork:
        job, runtime, grid = self.job, self.runtime, self.grid
        groups, device = place.groups, place.device
        pieces = [piece for chunk in chunks for piece, _ in chunk]
        # Parameters are counted twice: for the whole stage, which gives its traffic, and for each piece, which gives
        # its share of the stage's accumulation and messages.
        held = np.eye(len(job.model.pieces))[pieces].reshape(len(pieces), len(job.model.pieces))
        whole = held.sum(axis=0, keepdims=True)
        bandwidth = np.array([self.cluster.devices[device].memory_bandwidth_bytes_per_s])
        local = local_parameters(job, grid, whole)
        each = local_parameters(job, grid, held)
        parameters = (each.dense + each.expert)[:, 0]
        share = parameters / max(parameters.sum(), 1.0)
        rates = host_rates(self.cluster, self.cluster.devices[device])
        kept = KeptParts.of(job, grid, whole, local)
        products_s = update_products_s(
            job, runtime, self.cluster.devices[device], grid, whole, groups, self.collective_time
        )
        passes_s = optimizer_pass_s(job, runtime, grid, local, kept, bandwidth)
        accumulation = float(accumulation_s(runtime, grid, local, bandwidth)[0, 0]) * share
        traffic = weight_traffic(job, runtime, grid, groups, local, self.collective_time)
        traffic = traffic.changed(self._planned_once_s(whole))
        collectives = weight_collectives(job, runtime, grid, groups, local)
        # `traffic` gives the durations of the messages, `collectives` their links and latencies.
        gather = _message_of(collectives, "weights.all_gather")
        reduce = _message_of(
            collectives, "weights.all_reduce" if self.config.zero_stage == 0 else "weights.reduce_scatter"
        )
        work = StageWork(
            device=self.cluster.devices[device].name,
            chunks=chunks,
            programs=place.programs,
            program_s=place.program_s,
            busy_s=place.busy_s,
            overlap_efficiency=runtime.overlap_efficiency,
            stretch=1.0,
            accumulation_s=_by_chunk(accumulation, chunks),
            begins_s=self._begins_s(groups),
            forward_hop=forward_hop,
            backward_hop=backward_hop,
            each_gather=gather(float(traffic.each_gather[0, 0])),
            each_scatter=reduce(float(traffic.each_scatter[0, 0])),
            once_gather=gather(float(traffic.once_gather[0, 0])),
            once_reduce=reduce(float(traffic.once_reduce[0, 0])),
            once_tied=_message_of(collectives, "tied.all_reduce")(float(traffic.once_tied[0, 0])),
            once_more=reduce(float(traffic.once_more[0, 0])),
            one_layer_s=float(traffic.one_layer[0, 0]),
            weight_share=_by_chunk(share, chunks),
            optimizer_s=float(optimizer_step_s(job, runtime, grid, local, rates, passes_s, products_s)[0, 0]),
            **self._surroundings(kind, stage),
        )
        return replace(work, stretch=self._stretch(work, groups))

    def _planned_once_s(self, whole: FloatArray) -> FloatArray:
        """Return the time that a sharding plan adds to the stage's traffic of weights, once per step [s], [1, 1].

        `whole` counts the pieces of the stage [1, P].
        """
        change, model = change_of(self.runtime.layer_changes, self.grid), self.job.model
        if change is None:
            return np.zeros((1, 1))
        once_s = of_blocks(change, change.once_s, model.planned_names, other=0.0)
        return np.asarray((whole @ model.blocks_of_piece @ once_s)[:, None] / self.runtime.network_efficiency)

    def _host(self, kind: ReplicaKind, stage: int) -> int:
        return int(self.cluster.rank_host()[self.cells[stage, kind.first, 0]])

    def _surroundings(self, kind: ReplicaKind, stage: int) -> dict[str, Any]:
        """Return the fields of `StageWork` on resources that the stage may share with others."""
        group = self.cluster.groups[int(np.searchsorted(self.group_ends, self._host(kind, stage), side="right"))]
        # A host may have two kinds of internal links that exclude each other, such as NVLink and PCIe.
        way, aside = combine_links(group.intra_links), detour(group.intra_links)
        return {
            "shares_adapter": combine_links(group.nic_links).sharers > 1,
            "uplink_share": self.cluster.uplink_share(self.cells[stage].ravel()) if self.cluster.switches else 0.0,
            "detour": way.bandwidth_bytes_per_s / aside.bandwidth_bytes_per_s if aside else 0.0,
        }

    def _begins_s(self, groups: Groups) -> float:
        """Return the time for which each pass waits until its message begins, if messages overlap with compute [s]."""
        if self.config.pp == 1 or self.config.vpp == 1 or not self.runtime.overlaps_p2p:
            return 0.0
        return float(
            self.collective_time(transfer_collectives(self.job, self.runtime, self.grid, groups)["pp.start"])[0]
        )

    def _hop(self, kind: ReplicaKind, stage: int, to: int, phase: Phase, groups: Groups) -> Message:
        """Return the message that hands one micro-batch, or its gradients, from a stage to a neighbour.

        If devices share an adapter, the messages of all replicas leave at once.
        """
        if self.config.pp == 1:
            return NO_MESSAGE
        ends = np.stack([self.cells[stage], self.cells[to % self.config.pp]], axis=-1)
        # Each rank sends to its counterpart on the other stage.
        pairs = ends.reshape(-1, 2) if self.shares_adapters else ends[kind.first]
        between = replace(groups, pp=self.cluster.links_among([pairs], ends.ravel()))
        collectives = transfer_collectives(self.job, self.runtime, self.grid, between)
        seconds = latency_s = 0.0
        for name, count in hop_collectives(self.runtime, self.grid, phase):
            own_s = float(count[0] * self.collective_time(collectives[name])[0])
            seconds += own_s
            is_sent = name != "pp.all_gather"  # the gather uses other links than the message
            # A gather after the message runs inside the host. It leaves the message's link idle, so all its time counts
            # as latency.
            latency_s += min(float(collective_latency_s(collectives[name])[0]), own_s) if is_sent else own_s
        return Message(seconds=seconds, latency_s=latency_s, link=link_between(collectives["pp.send_recv"].group))

    def _stretch(self, work: StageWork, groups: Groups) -> float:
        """Return the ratio of a pass's whole time to its time on the device, the same for all passes of a stage."""
        if self.runtime.captured_graph:
            return 1.0
        # The stretch compares one micro-batch's launches with its device time over all passes and pieces.
        passes = [kind for kind in Kind if kind != Kind.WEIGHTS or self.splits_backward]
        positions = [(chunk, at) for chunk, pieces in enumerate(work.chunks) for at in range(len(pieces))]
        device_s = sum(work.device_s(chunk, at, kind) for chunk, at in positions for kind in passes)
        launches = [self.launches[again][:, piece].tolist() for chunk in work.chunks for piece, again in chunk]
        each_s = float(issue_s(self.runtime, self.grid, groups)[0])
        host_s = sum(kernels * self.runtime.launch_s + collectives * each_s for kernels, collectives in launches)
        host_s += float(hops_launch_s(self.runtime, self.config.pp, self.grid.vpp)[0])
        # Device and host time are combined as in the closed-form model.
        return 1.0 + float(beyond_device_s(np.array(device_s), np.array(host_s))) / device_s if device_s > 0 else 1.0


def _busy_s(program: Program) -> dict[str, float]:
    """Return the time for which a program keeps each link busy if nothing else uses it [s]."""
    found: dict[str, float] = {}
    for segment in program:
        for work in segment.traffic:
            found[work.link] = found.get(work.link, 0.0) + work.seconds
    return found


def _by_chunk(values: FloatArray, chunks: tuple[tuple[tuple[int, bool], ...], ...]) -> tuple[tuple[float, ...], ...]:
    ends = np.cumsum([len(chunk) for chunk in chunks])[:-1]
    return tuple(tuple(part.tolist()) for part in np.split(values, ends))


def _message_of(collectives: Mapping[str, Collective], site: str) -> Callable[[float], Message]:
    """Return a function from a duration to a message with the link and the latency of the site's collectives."""
    latency_s = sum(
        float(collective_latency_s(collectives[name]).ravel()[0])
        for name in (site, f"expert_{site}")
        if name in collectives and collectives[name].group.size[0] > 1
    )
    link = link_between(collectives[site].group) if site in collectives else INSIDE

    def message(seconds: float) -> Message:
        return Message(seconds=seconds, latency_s=min(latency_s, seconds), link=link)

    return message
