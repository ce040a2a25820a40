"""Clusters of equal or unlike hosts.

Letters in shapes: n ranks, g groups of ranks that are asked about.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hardware.arrays import IntArray
from hardware.device import Device
from hardware.distinct import distinct_rows
from hardware.fabric import Fabric
from hardware.group_links import GroupLinks, StageLinks, WorstLinks, stack_links, worst_of
from hardware.host_group import HostGroup, SlowPair
from hardware.link import Link


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Groups of equal hosts. Ranks count the devices in this order: group by group, host by host, slot by slot.

    Attributes:
        name: Name of the cluster in reports.
        groups: Groups of equal hosts, in rank order.
        inter_group_links: Parallel links of one device to hosts of another group, on top of the NICs of both; empty
            where the NICs alone decide.
        slow_pairs: Pairs of hosts between which a path is slow. A group of ranks with members on both hosts is as slow
            between hosts, also where its collectives might go around that path (assumed).
        networks: Number of the network of each group; `inter_group_links` join different networks. Empty means that
            every group is a network of its own.
        switches: Number of the leaf switch of every host. Empty means that nothing between the hosts is narrower than
            their NICs.
        uplink_bytes_per_s: Bandwidth that all hosts under one leaf switch share towards others, in each direction
            [bytes/s]; None where there are no switches.
    """

    name: str
    groups: tuple[HostGroup, ...]
    inter_group_links: tuple[Link, ...] = ()
    slow_pairs: tuple[SlowPair, ...] = ()
    networks: tuple[int, ...] = ()
    switches: tuple[int, ...] = ()
    uplink_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        assert self.groups, "a cluster has hosts"
        assert all(pair.second_host < self.num_hosts for pair in self.slow_pairs), "a slow pair joins two of the hosts"
        assert len(self.networks) in (0, len(self.groups)), "each group is in a network"
        assert len(self.switches) in (0, self.num_hosts), "each host is under a switch"
        assert bool(self.switches) == (self.uplink_bytes_per_s is not None), "switches have uplinks"

    @property
    def num_devices(self) -> int:
        """Number of devices of all hosts."""
        return sum(group.num_devices for group in self.groups)

    @property
    def num_hosts(self) -> int:
        """Number of hosts of all groups."""
        return sum(group.hosts for group in self.groups)

    @property
    def devices_per_host(self) -> int:
        """Number of devices of the smallest host."""
        return min(group.devices_per_host for group in self.groups)

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest device [bytes]."""
        return min(group.device.memory_bytes for group in self.groups)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Unlike devices, each once, in rank order."""
        return tuple(dict.fromkeys(group.device for group in self.groups))

    @property
    def device_names(self) -> str:
        """Names of the unlike devices, joined by +."""
        return "+".join(device.name for device in self.devices)

    def rank_host(self) -> IntArray:
        """Return the host of every rank, [n], ascending."""
        devices_per_host = np.repeat(
            [group.devices_per_host for group in self.groups], [group.hosts for group in self.groups]
        )
        return np.repeat(np.arange(self.num_hosts), devices_per_host)

    def rank_device_index(self) -> IntArray:
        """Return the index in `devices` of every rank's device, [n]."""
        index = [self.devices.index(group.device) for group in self.groups]
        return np.repeat(index, [group.num_devices for group in self.groups])

    @property
    def host_kinds(self) -> tuple[int, ...]:
        """Kind of hosts of each group: number of the first group with the same devices and links."""
        kinds = [(group.device, group.devices_per_host, group.intra_links, group.nic_links) for group in self.groups]
        return tuple(kinds.index(kind) for kind in kinds)

    @property
    def is_mixed(self) -> bool:
        """Whether some hosts are unlike others."""
        return len(set(self.host_kinds)) > 1

    def rank_host_kind(self) -> IntArray:
        """Return the kind of every rank's host, by `host_kinds`, [n]."""
        return np.repeat(self.host_kinds, [group.num_devices for group in self.groups])

    def only(self, device: Device) -> Cluster:
        """Return the cluster of its hosts with one kind of device."""
        groups = tuple(group for group in self.groups if group.device == device)
        return Cluster(name=self.name, groups=groups)

    def reordered(self, hosts: Sequence[int]) -> Cluster:
        """Return the cluster of the listed hosts, in their order; hosts that are not listed are left out.

        Neighbours of one group stay a group.

        Args:
            hosts: Number of each host, in the new order; empty keeps all hosts in their order.
        """
        if not hosts:
            return self
        assert set(hosts) <= set(range(self.num_hosts)), "an order names hosts of the cluster"
        assert len(set(hosts)) == len(hosts), "an order names no host twice"
        group_of_host = np.repeat(np.arange(len(self.groups)), [group.hosts for group in self.groups])
        runs = [(group, len(list(run))) for group, run in itertools.groupby(group_of_host[list(hosts)].tolist())]
        # slow pairs, networks and switches follow their hosts to the new places
        place = {host: number for number, host in enumerate(hosts)}
        pairs = [
            (sorted((place[pair.first_host], place[pair.second_host])), pair.share)
            for pair in self.slow_pairs
            if pair.first_host in place and pair.second_host in place
        ]
        networks = self.networks or range(len(self.groups))
        return replace(
            self,
            groups=tuple(replace(self.groups[group], hosts=count) for group, count in runs),
            slow_pairs=tuple(SlowPair(first_host=a, second_host=b, share=share) for (a, b), share in pairs),
            networks=tuple(networks[group] for group, _ in runs) if self.inter_group_links else (),
            switches=tuple(self.switches[host] for host in hosts) if self.switches else (),
        )

    def with_hosts(self, hosts: int) -> Cluster:
        """Return a cluster of one group with another number of hosts; further hosts are under switches like its own."""
        (group,) = self.groups
        switches: tuple[int, ...] = ()
        if self.switches:
            under_one = self.switches.count(self.switches[0])
            switches = tuple(host // under_one for host in range(hosts))
        return replace(self, groups=(replace(group, hosts=hosts),), switches=switches)

    def group_links(self, stride: IntArray, size: IntArray) -> GroupLinks:
        """Find the links of the groups {base + i * stride, i < size} that tile all ranks.

        With Megatron-Core's rank order (tp fastest, then cp, dp, pp) the stride of a dimension is the product of
        the faster degrees. Each pair is computed from the ranks themselves, once, so degrees need not be powers of
        two nor groups aligned with hosts.

        Args:
            stride: Distance of neighbouring members in ranks, [g].
            size: Number of ranks in a group, [g].
        """
        stride, size = np.asarray(stride, dtype=np.int64), np.asarray(size, dtype=np.int64)
        assert stride.shape == size.shape, "stride and size belong together, entry by entry"
        assert stride.ndim == 1, f"stride and size are [g], but got {stride.ndim} dimensions"
        assert np.all(stride >= 1), "stride >= 1"
        assert np.all(size >= 1), "size >= 1"
        # few distinct pairs occur among tens of thousands of configurations
        first, row = distinct_rows([stride, size])
        pairs = list(zip(stride[first].tolist(), size[first].tolist(), strict=True))
        assert all(self.num_devices % (s * n) == 0 for s, n in pairs), f"stride * size divides {self.num_devices} ranks"
        fabric = _fabric(self)
        return stack_links([fabric.worst_links(s, n) for s, n in pairs], row)

    def links_among(self, entries: Sequence[IntArray], at_work: IntArray) -> GroupLinks:
        """Find the links of given groups of ranks; a ring visits host after host, whatever their order.

        Args:
            entries: Ranks of the groups of each entry, all of one size [groups, size].
            at_work: All ranks that communicate at that time; others lend them their shares of adapters and uplinks.
        """
        fabric = _fabric(self)
        return stack_links([fabric.links_among(ranks, at_work) for ranks in entries], np.arange(len(entries)))
        return _fabric(self).links_among(entries, at_work)

    def uplink_share(self, ranks: IntArray) -> float:
        """Return the share of the first rank's uplink that is taken while all of `ranks` send at once."""
        return _fabric(self).uplink_share(ranks)

    def end_links(self, length: IntArray) -> GroupLinks:
        """Find the links of pairs of ranks: each of the first `length` ranks with one of the last `length` [g].

        The first and the last stage of a pipeline, each `length` ranks long, communicate in such pairs. Where one stage
        is all of the ranks, no rank has a partner.
        """
        first, row = distinct_rows([np.asarray(length, dtype=np.int64)])
        lengths = np.asarray(length, dtype=np.int64)[first].tolist()
        assert all(self.num_devices % one == 0 for one in lengths), f"length divides {self.num_devices} ranks"
        fabric = _fabric(self)
        return stack_links([fabric.worst_end_links(one) for one in lengths], row)

    @property
    def has_unlike_links(self) -> bool:
        """Whether equal groups of ranks may cross unlike links, because of their places."""
        return self.is_mixed or bool(self.slow_pairs or self.switches or self.inter_group_links)

    def links_of_stages(
        self, stride: IntArray, size: IntArray, length: int, stages: Sequence[tuple[int, ...]]
    ) -> GroupLinks:
        """Find the links of groups inside some stages of a pipeline, the worst of each set of stages [c, g].

        Args:
            stride: Distance of neighbouring members in ranks [g].
            size: Number of ranks in a group [g].
            length: Number of ranks of every stage, which the groups tile.
            stages: Numbers of the stages of each set [c].
        """
        first, row = distinct_rows([np.asarray(stride, dtype=np.int64), np.asarray(size, dtype=np.int64)])
        fabric = _fabric(self)
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        found: list[WorstLinks] = []
        rows: dict[tuple[int, ...], list[int]] = {}
        inside = [
            fabric.links_of_stages(one_stride, one_size, length)
            for one_stride, one_size in zip(stride[first].tolist(), size[first].tolist(), strict=True)
        ]
        for members in dict.fromkeys(stages):
            rows[members] = []
            for at, (links, link_of_stage) in enumerate(inside):
                # few kinds of links occur among many stages
                key = at, tuple(sorted({link_of_stage[stage] for stage in members}))
                if key not in numbers:
                    numbers[key] = len(found)
                    found.append(worst_of([links[place] for place in key[1]]))
                rows[members].append(numbers[key])
        return stack_links(found, np.array([rows[members] for members in stages])[:, row])

    def stage_links(self, length: IntArray) -> StageLinks:
        """Find the links between neighbouring stages of pipelines whose stages are `length` ranks long [g]."""
        first, row = distinct_rows([np.asarray(length, dtype=np.int64)])
        lengths = np.asarray(length, dtype=np.int64)[first].tolist()
        assert all(self.num_devices % one == 0 for one in lengths), f"length divides {self.num_devices} ranks"
        fabric = _fabric(self)
        found = [fabric.stage_links(one) for one in lengths]
        most = max((len(links) for links, _ in found), default=1)
        # a pipeline with fewer kinds of boundaries repeats its first
        kinds = [stack_links([links[at if at < len(links) else 0] for links, _ in found], row) for at in range(most)]
        of_boundary = {self.num_devices // one: kind for one, (_, kind) in zip(lengths, found, strict=True)}
        return StageLinks(kinds=tuple(kinds), of_boundary=of_boundary)


@functools.lru_cache(maxsize=16)
def _fabric(cluster: Cluster) -> Fabric:
    """Return the links of a cluster as arrays; those of the last clusters are kept."""
    return Fabric(
        groups=cluster.groups,
        networks=cluster.networks,
        inter_group_links=cluster.inter_group_links,
        switches=cluster.switches,
        uplink_bytes_per_s=cluster.uplink_bytes_per_s,
        slow_pairs=cluster.slow_pairs,
def _fabric(cluster: Cluster) -> _Fabric:
    return _Fabric(cluster)


class _Fabric:
    """Links of a cluster as arrays, for many questions about groups of its ranks; each answer is kept."""

    def __init__(self, cluster: Cluster) -> None:
        groups = cluster.groups
        self.rank_host = cluster.rank_host()
        self.host_group = np.repeat(np.arange(len(groups)), [group.hosts for group in groups])
        self.host_network = np.array(cluster.networks or range(len(groups)))[self.host_group]
        # [host group, members on a host, field of LinkCost]; no link joins fewer than two members
        most = max(2, *(group.devices_per_host for group in groups))
        self.intra_cost = np.zeros((len(groups), most + 1, len(LinkCost._fields)))
        for row, group in enumerate(groups):
            for members in range(2, group.devices_per_host + 1):
                self.intra_cost[row, members] = combine_links(group.intra_links, members=members).cost(members)
        # parallel NICs of a device count as one link
        nics = [combine_links(group.nic_links) for group in groups]
        # between hosts only the NICs count, whatever the number of members [host group, field of LinkCost]
        self.nic_cost = np.array([nic.cost() for nic in nics])
        self.sharers = np.array([nic.sharers for nic in nics])
        self.nic_bandwidth = np.array([nic.bandwidth_bytes_per_s for nic in nics])
        self.devices = np.array([group.devices_per_host for group in groups])
        self.host_switch = np.array(cluster.switches or [0] * cluster.num_hosts)
        self.uplink = cluster.uplink_bytes_per_s or math.inf
        self.between_groups = combine_links(cluster.inter_group_links) if cluster.inter_group_links else None
        # number of neighbouring ranks that share a host, wherever they begin
        self.neighbours = math.gcd(*(group.devices_per_host for group in groups))
        self.pair_hosts, self.pair_cost = self._slow_pairs(cluster.slow_pairs)
        self.found: dict[tuple[int, int], _WorstLinks] = {}
        self.in_stages: dict[tuple[int, int, int], tuple[list[_WorstLinks], list[int]]] = {}
        self.between_stages: dict[int, tuple[list[_WorstLinks], IntArray]] = {}
        self.among: dict[tuple[object, ...], GroupLinks] = {}

    def _slow_pairs(self, pairs: tuple[SlowPair, ...]) -> tuple[IntArray, FloatArray]:
        """Return both hosts of every slow pair [2, pair], and the cost between them [pair, field of LinkCost]."""
        hosts = np.array([[pair.first_host, pair.second_host] for pair in pairs], dtype=np.int64).reshape(-1, 2).T
        # a pair is at least as slow as the slower of its NICs, and as the links between their networks
        cost = self.nic_cost[self.host_group[hosts]].max(axis=0)
        if self.between_groups is not None:
            crosses = self.host_network[hosts[0]] != self.host_network[hosts[1]]
            cost[crosses] = np.maximum(cost[crosses], self.between_groups.cost())
        # only times per byte grow with a smaller share; latencies stay
        shares = np.array([pair.share for pair in pairs])
        return hosts, np.where(_IS_PER_BYTE, cost / shares[:, None], cost)

    def worst_links(self, stride: int, size: int) -> _WorstLinks:
        """Return the five sizes of `GroupKinds` for one (stride, size), and the cost of its links [4, fields]."""
        if (stride, size) not in self.found:
            alike = math.gcd(stride, self.neighbours)  # groups that begin on these neighbours are on the same hosts
            hosts = self.rank_host[::alike].reshape(-1, size, stride // alike).swapaxes(1, 2).reshape(-1, size)
            self.found[stride, size] = self._worst_links(hosts, alike)
        return self.found[stride, size]

    def links_among(self, entries: Sequence[IntArray], at_work: IntArray) -> GroupLinks:
        """Return the links of `Cluster.links_among`."""
        busy = np.bincount(self.rank_host[at_work], minlength=len(self.host_group))
        hosts = [np.sort(self.rank_host[ranks], axis=1) for ranks in entries]
        key = (busy.tobytes(), *((one.shape, one.tobytes()) for one in hosts))
        if key not in self.among:
            found = [self._worst_links(one, 1, busy) for one in hosts]
            self.among[key] = _group_links(found, np.arange(len(found)))
        return self.among[key]

    def uplink_share(self, ranks: IntArray) -> float:
        """Return the share of `Cluster.uplink_share`."""
        busy = np.bincount(self.rank_host[ranks], minlength=len(self.host_group))
        under_switch = self.host_switch == self.host_switch[self.rank_host[ranks[0]]]
        return float(min(self._demand(busy)[under_switch].sum() / self.uplink, 1.0))

    def _demand(self, busy: IntArray) -> FloatArray:
        """Return the bandwidth of hosts with `busy` sending devices [bytes/s], [hosts]; adapters are used whole."""
        group = self.host_group
        # one sending device of a shared adapter may use all of its bandwidth
        devices = np.where(self.sharers[group] > 1, np.where(busy > 0, self.sharers[group], 0), busy)
        return np.asarray(devices * self.nic_bandwidth[group])

    def worst_end_links(self, length: int) -> _WorstLinks:
        """Return sizes and costs of pairs of the first and the last `length` ranks."""
        if (-length, 2) not in self.found:
            ranks = len(self.rank_host)
            alike = math.gcd(length, self.neighbours)
            ends = np.stack([self.rank_host[:length:alike], self.rank_host[ranks - length :: alike]], axis=1)
            sizes, costs = self._worst_links(ends if length < ranks else ends[:, :1], alike)
            costs[2] = costs[3]  # the ranks between them are silent
            self.found[-length, 2] = sizes, costs
        return self.found[-length, 2]

    def stage_links(self, length: int) -> tuple[list[_WorstLinks], IntArray]:
        """Return the kinds of links between neighbouring stages of `length` ranks, and the kind of each boundary.

        Each rank sends to its counterpart on the next stage, while the ranks of all other stages are silent.
        """
        if length not in self.between_stages:
            alike = math.gcd(length, self.neighbours)
            every = []
            for begin in range(0, len(self.rank_host) - length, length):
                stages = self.rank_host[begin : begin + 2 * length : alike]
                busy = alike * np.bincount(stages, minlength=len(self.host_group))
                every.append(self._worst_links(stages.reshape(2, -1).T, alike, busy))
            found, kinds = _kinds_of(every)
            self.between_stages[length] = (found or [self.worst_links(length, 1)], np.array(kinds, dtype=np.int64))
        return self.between_stages[length]

    def links_of_stages(self, stride: int, size: int, length: int) -> tuple[list[_WorstLinks], list[int]]:
        """Return kinds of links of one (stride, size) inside stages of `length` ranks, and the kind of each stage."""
        if (stride, size, length) not in self.in_stages:
            alike = math.gcd(stride, self.neighbours)
            every = []
            for begin in range(0, len(self.rank_host), length):
                hosts = self.rank_host[begin : begin + length : alike]
                groups = hosts.reshape(-1, size, stride // alike).swapaxes(1, 2).reshape(-1, size)
                every.append(self._worst_links(groups, alike))
            self.in_stages[stride, size, length] = _kinds_of(every)
        return self.in_stages[stride, size, length]

    def _worst_links(self, hosts: IntArray, alike: int, busy: IntArray | None = None) -> _WorstLinks:
        """Return sizes and costs of the worst group on these hosts.

        Args:
            hosts: Hosts of the members of each group, ascending [rows, size].
            alike: Number of groups that each row stands for.
            busy: Devices of each host that communicate at that time [hosts]; None where all do.
        """
        size = hosts.shape[1]
        costs = np.zeros((len(LINKS), len(LinkCost._fields)))
        if size == 1:
            return (1, 1, 1, 1, 1), costs
        # hosts ascend within a row, so members on one host stand side by side: a run
        starts_run = np.ones(hosts.shape, dtype=bool)
        starts_run[:, 1:] = hosts[:, 1:] != hosts[:, :-1]
        first = np.flatnonzero(starts_run)
        members = np.diff(first, append=hosts.size)
        kind = self.host_group[hosts.ravel()[first]]
        hosts_spanned = starts_run.sum(axis=1)
        # links inside a host matter to runs of several members, NICs to groups on several hosts
        local = members >= 2
        crossing = hosts_spanned[first // size] >= 2
        # few (kind of host, members) occur among many runs
        width = self.intra_cost.shape[1]
        inside = np.flatnonzero(np.bincount(kind[local] * width + members[local]))
        inside_kind, inside_members = np.divmod(inside, width)
        costs[0] = self.intra_cost[inside_kind, inside_members].max(axis=0, initial=0.0)
        costs[1] = self.intra_cost[inside_kind, 2].max(axis=0, initial=0.0)
        costs[2] = self.nic_cost[np.flatnonzero(np.bincount(kind[crossing]))].max(axis=0, initial=0.0)
        # silent devices leave their shares of an adapter to those that communicate
        if busy is not None and (self.sharers > 1).any():
            sharers = self.sharers[kind[crossing]]
            share = np.clip(busy[hosts.ravel()[first][crossing]], 1, sharers) / sharers
            costs[2] = self._nic_costs(kind[crossing], share)
        # messages to the next member leave the adapter's shares of silent devices to the others
        costs[3] = self._hop_cost(hosts, alike) if (self.sharers > 1).any() else costs[2]
        switches = 1
        if math.isfinite(self.uplink):
            # an uplink that all its hosts together overload slows down every byte between switches
            switch = np.sort(self.host_switch[hosts], axis=1)
            switches = 1 + int((switch[:, 1:] != switch[:, :-1]).sum(axis=1).max())
            if switches > 1:
                demand = self._demand(self.devices[self.host_group] if busy is None else busy)
                crowding = np.bincount(self.host_switch, weights=demand)[switch].max() / self.uplink
                costs[2:] *= np.where(_IS_PER_BYTE, max(crowding, 1.0), 1.0)
        if self.between_groups is not None:
            # a group over several networks is as slow as the links between them, if those are worse than its NICs
            networks = self.host_network[hosts]
            if np.any(networks != networks[:, :1]):
                costs[2:] = np.maximum(costs[2:], self.between_groups.cost())
        # a slow path counts for groups that have members on both of its hosts
        for pair, cost in zip(self.pair_hosts.T, self.pair_cost, strict=True):
            if np.any((hosts == pair[0]).any(axis=1) & (hosts == pair[1]).any(axis=1)):
                costs[2:] = np.maximum(costs[2:], cost)
        return (size, int(hosts_spanned.max()), int(members.min()), int(members.max()), switches), costs

    def _hop_cost(self, hosts: IntArray, alike: int) -> FloatArray:
        """Return the network's cost of messages from each member to the next, all at once [fields].

        A host's adapter is shared by the devices that send off the host, or by those that receive from others,
        whichever are more.
        """
        # members send to the next one of their row; count the senders and the receivers of each host
        leaves = hosts[:, :-1] != hosts[:, 1:]
        count = len(self.host_group)
        sent, received = (np.bincount(ends[leaves], minlength=count) for ends in (hosts[:, :-1], hosts[:, 1:]))
        busy = alike * np.maximum(sent, received)
        crossing = np.flatnonzero(busy)
        kind = self.host_group[crossing]
        return self._nic_costs(kind, np.minimum(busy[crossing] / self.sharers[kind], 1.0))

    def _nic_costs(self, kind: IntArray, share: FloatArray) -> FloatArray:
        """Return the worst cost of the NICs of host groups, each with a share of its time per byte [fields]."""
        return np.asarray((self.nic_cost[kind] * np.where(_IS_PER_BYTE, share[:, None], 1.0)).max(axis=0, initial=0.0))


class _LinkForm(DocumentedModel):
    """A link."""

    kind: str
    """Kind of link in the catalog, such as `nvlink`, `pcie` or `infiniband`; sets the efficiency of collectives."""

    bandwidth_gb_per_s: float = Field(gt=0, le=1e6)
    """Bandwidth per device and direction [GB/s]."""

    latency_us: float = Field(ge=0, le=1e6)
    """Latency of one message [µs]."""

    exclusive_group: str | None = None
    """Name of a set of links that cannot carry one transfer together."""

    mesh_peers: int | None = Field(default=None, ge=1)
    """Number of peers of a full mesh over which the bandwidth is divided by wire.

    Default: none, a switch: any group gets all of it
    """

    efficiency: float | None = Field(default=None, gt=0, le=1.5)
    """Share of the bandwidth that collectives reach.

    Default: the kind's
    """

    sharers: int = Field(default=1, ge=1, le=MAX_DEVICES)
    """Devices of a host that share one adapter, of which `bandwidth_gb_per_s` is the part of each."""

    def link(self) -> Link:
        return Link(
            sharers=self.sharers,
            kind=self.kind,
            bandwidth_bytes_per_s=self.bandwidth_gb_per_s * 1e9,
            latency_s=self.latency_us * 1e-6,
            exclusive_group=self.exclusive_group,
            mesh_peers=self.mesh_peers,
            efficiency=self.efficiency,
        )


class _GroupForm(DocumentedModel):
    """Group of equal hosts, one of `cluster.groups:`."""

    name: str | None = None
    """A cluster of the catalog; beside `device` only a label."""

    device: str | None = None
    """A device of the catalog.

    Default: that of `name`
    """

    hosts: int = Field(default=1, ge=1, le=MAX_DEVICES)
    """Number of hosts."""

    devices_per_host: int | None = Field(default=None, ge=1, le=MAX_DEVICES)
    """Devices of each host that the job may use.

    Default: the catalog's
    """

    intra_links: list[_LinkForm] | None = Field(default=None, min_length=1)
    """Parallel links of one device to the others of its host.

    Default: the catalog's
    """

    nic_links: list[_LinkForm] | None = Field(default=None, min_length=1)
    """Parallel links of one device to other hosts: its own share of the host's network.

    Default: the catalog's
    """


class _SwitchForm(DocumentedModel):
    """`cluster.switch:`."""

    hosts: int = Field(ge=1, le=MAX_DEVICES)
    """Neighbouring hosts under each leaf switch."""

    uplink_gb_per_s: float = Field(gt=0, le=1e9)
    """Bandwidth that these hosts share to the other switches, per direction [GB/s]."""


class _OneGroupForm(_GroupForm):
    """A cluster of equal hosts."""

    switch: _SwitchForm | None = None
    """Leaf switches."""

    trace: str | None = None
    """A CSV file that tells how the cluster changes over time; see [traces](../configs/traces/README.md)."""


class _GroupsForm(DocumentedModel):
    """A cluster of unlike groups of hosts."""

    name: str = "mixed"
    """Name of the cluster in reports."""

    groups: list[_GroupForm] = Field(min_length=1)
    """Groups of equal hosts, in the order of the ranks."""

    inter_group_links: list[_LinkForm] = Field(default_factory=list)
    """Parallel links of one device to hosts of other groups, on top of the NICs of both.

    Default: none, so that the NICs alone decide
    """

    switch: _SwitchForm | None = None
    """Leaf switches."""

    trace: str | None = None
    """A CSV file that tells how the cluster changes over time; see [traces](../configs/traces/README.md)."""


class _FileForm(DocumentedModel):
    """A cluster that a file describes."""

    file: str
    """A YAML file that holds one of the other forms, relative to this one."""

    trace: str | None = None
    """A CSV file that tells how the cluster changes over time; it wins over a trace that `file` names."""


CLUSTER_FORMS: tuple[type[DocumentedModel], ...] = (_OneGroupForm, _GroupsForm, _FileForm)
"""Forms in which a configuration may describe a cluster."""


class _CatalogEntry(StrictModel):
    device: str
    description: str
    devices_per_host: SourcedNumber | None = None
    intra_links: list[LinkEntry] | None = None
    nic_links: list[LinkEntry] | None = None


class _Catalog(StrictModel):
    sources: dict[str, str]
    clusters: dict[str, _CatalogEntry]


def cluster_names() -> tuple[str, ...]:
    """Return the catalog's names of clusters."""
    return tuple(_catalog().clusters)


def find_cluster(name: str, hosts: int = 1) -> Cluster:
    """Return the catalog's cluster of this name with a number of hosts.

    Raises:
        ConfigError: no cluster has this name, or there are no hosts.
    """
    return cluster_from_mapping({"name": name, "hosts": hosts}, Path())


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedCluster:
    """Cluster as a configuration describes it.

    Attributes:
        cluster: Nominal cluster, before any event of its trace.
        trace: Path of the file that tells how it changes over time, for `hardware.trace_file`; None without one.
    """

    cluster: Cluster
    trace: Path | None


def cluster_from_mapping(mapping: Mapping[str, Any], base_dir: Path, file: str | None = None) -> Cluster:
    """Return the nominal cluster of `read_described_cluster`, without its trace."""
    return read_described_cluster(mapping, base_dir, file).cluster


def read_described_cluster(mapping: Mapping[str, Any], base_dir: Path, file: str | None = None) -> DescribedCluster:
    """Read the cluster that a configuration describes.

    It names a cluster of the catalog (`{name: dgx-h100, hosts: 8}`), a device (`{device: H100-SXM-80, hosts: 8}`),
    unlike groups of both (`{groups: [...], inter_group_links: [...]}`), or a file that holds one of these
    (`{file: cluster.yaml}`). `devices_per_host`, `intra_links` and `nic_links` replace the catalog's values; beside
    `device`, `name` is only a label. `switch: {hosts: 4, uplink_gb_per_s: 200}` puts four neighbouring hosts under each
    leaf switch, whose uplink they share, in each direction. `trace` names a file; one beside `file` wins over one
    inside that file.

    Args:
        mapping: Keys and values of the configuration.
        base_dir: Folder that a relative `file` or `trace` is relative to.
        file: Name of the file that holds the mapping, for messages.

    Raises:
        ConfigError: a key or value can't work.
    """
    try:
        if "file" in mapping:
            outer = validate_mapping(_FileForm, mapping)
            path = base_dir / outer.file
            inner = read_mapping(path)
            if "file" in inner:
                raise ConfigError("a cluster file can't name another file", key="file", value=inner["file"]).in_file(
                    str(path)
                )
            described = read_described_cluster(inner, path.parent, str(path))
            return replace(described, trace=_resolve_path(base_dir, outer.trace) or described.trace)
        if "groups" in mapping:
            mixed = validate_mapping(_GroupsForm, mapping)
            cluster = _add_switches(_mixed_cluster(mixed), mixed.switch)
            return DescribedCluster(cluster=cluster, trace=_resolve_path(base_dir, mixed.trace))
        form = validate_mapping(_OneGroupForm, mapping)
        group = _host_group(form)
        _check_total((group,), key="hosts")
        cluster = _add_switches(Cluster(name=group.name, groups=(group,)), form.switch)
        return DescribedCluster(cluster=cluster, trace=_resolve_path(base_dir, form.trace))
    except ConfigError as error:
        raise (error.in_file(file) if file else error) from None


def _add_switches(cluster: Cluster, form: _SwitchForm | None) -> Cluster:
    """Put the neighbouring hosts of a cluster under leaf switches."""
    if form is None:
        return cluster
    switches = tuple(host // form.hosts for host in range(cluster.num_hosts))
    return replace(cluster, switches=switches, uplink_bytes_per_s=form.uplink_gb_per_s * 1e9)


def _resolve_path(base_dir: Path, name: str | None) -> Path | None:
    return None if name is None else base_dir / name


def _mixed_cluster(form: _GroupsForm) -> Cluster:
    groups = []
    for index, group in enumerate(form.groups):
        try:
            groups.append(_host_group(group))
        except ConfigError as error:
            raise error.under(f"groups.{index}") from None
    _check_total(tuple(groups), key="groups")
    links = tuple(link.link() for link in form.inter_group_links)
    return Cluster(name=form.name, groups=tuple(groups), inter_group_links=links)


def _host_group(form: _GroupForm) -> HostGroup:
    if form.device is not None:
        device = find_device(form.device)
        group = HostGroup(
            name=form.name or device.name,
            device=device,
            hosts=form.hosts,
            devices_per_host=form.devices_per_host or device.devices_per_host,
            intra_links=(device.scale_up,),
            nic_links=(device.scale_out,),
        )
    elif form.name is not None:
        group = _catalog_group(form.name, form.hosts, form.devices_per_host)
    else:
        raise ConfigError("needs `name`, `device`, `groups` or `file`", nearest=did_you_mean("", cluster_names()))
    intra_links = tuple(link.link() for link in form.intra_links or ()) or group.intra_links
    nic_links = tuple(link.link() for link in form.nic_links or ()) or group.nic_links
    return replace(group, intra_links=intra_links, nic_links=nic_links)


def _catalog_group(name: str, hosts: int, devices_per_host: int | None) -> HostGroup:
    known = {spelling_key(known): known for known in cluster_names()}.get(spelling_key(name))
    if known is None:
        raise ConfigError("is not a known cluster", key="name", value=name, nearest=did_you_mean(name, cluster_names()))
    entry = _catalog().clusters[known]
    device = find_device(entry.device)
    in_host = int(entry.devices_per_host.value) if entry.devices_per_host else device.devices_per_host
    if devices_per_host is not None and devices_per_host > in_host:
        raise ConfigError(
            f"a {known} host has {in_host} devices",
            key="devices_per_host",
            value=devices_per_host,
            nearest=f"use at most {in_host}, or describe the host with `device: {device.name}`",
        )
    return HostGroup(
        name=known,
        device=device,
        hosts=hosts,
        devices_per_host=devices_per_host or in_host,
        intra_links=tuple(link.link() for link in entry.intra_links or ()) or (device.scale_up,),
        nic_links=tuple(link.link() for link in entry.nic_links or ()) or (device.scale_out,),
    )
