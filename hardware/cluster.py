"""Clusters: hosts of devices, unlike groups allowed, and which links a group of ranks crosses.

Letters in shapes: n ranks, g groups of ranks that are asked about.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hardware.algorithms import LINKS, CostArrays, CostLines, GroupKinds, cost_lines, joined_kinds, joined_lines
from hardware.arrays import FloatArray, IntArray
from hardware.device import CATALOG, Device, LinkEntry, find_device, spelling_key
from hardware.distinct import distinct_rows
from hardware.io.config_file import DocumentedModel, SourcedNumber, StrictModel, checked, read_mapping
from hardware.io.errors import ConfigError, did_you_mean
from hardware.link import Link, LinkCost, combined

MAX_DEVICES = 1_000_000

_WorstLinks = tuple[tuple[int, int, int, int, int], FloatArray]
_IS_PER_BYTE = np.array([field.endswith("s_per_byte") for field in LinkCost._fields])


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGroup:
    """Equal hosts.

    Attributes:
        name: What reports call it.
        device: The device that every slot of every host holds.
        hosts: Number of hosts.
        devices_per_host: Devices of each host that the job may use.
        intra_links: Parallel links of one device to the others of its host.
        nic_links: Parallel links of one device to other hosts: its own share of the host's network.
    """

    name: str
    device: Device
    hosts: int
    devices_per_host: int
    intra_links: tuple[Link, ...]
    nic_links: tuple[Link, ...]

    def __post_init__(self) -> None:
        assert self.hosts >= 1, f"a group has hosts, but got {self.hosts}"
        assert self.devices_per_host >= 1, f"a host has devices, but got {self.devices_per_host}"
        assert self.intra_links, "the devices of a host are linked"
        assert self.nic_links, "a device reaches other hosts"

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.devices_per_host


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowPair:
    """Two hosts between which a path is slower than the NICs of both.

    Attributes:
        first_host: Number of the one host, in rank order.
        second_host: Number of the other, which is the larger.
        share: What is left between them of the bandwidth that their NICs give.
    """

    first_host: int
    second_host: int
    share: float

    def __post_init__(self) -> None:
        assert 0 <= self.first_host < self.second_host, f"a pair ascends: {self.first_host}, {self.second_host}"
        assert 0 < self.share <= 1, f"a share is above 0 and at most 1, but got {self.share}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupLinks:
    """What groups of ranks communicate over, one entry for each of g groups.

    Entries of one (stride, size) are alike, and there are few such kinds: an entry is a row of them.

    Attributes:
        kinds: The kinds of groups [u].
        lines: What each collective takes on them.
        row: The kind of every entry, [g].
    """

    kinds: GroupKinds
    lines: CostLines
    row: IntArray

    @property
    def size(self) -> IntArray:
        """Ranks in a group, [g]."""
        return self.kinds.size.take(self.row)

    @property
    def hosts(self) -> IntArray:
        """Hosts that a group spans, at most, [g]."""
        return self.kinds.hosts.take(self.row)

    @property
    def switches(self) -> IntArray:
        """Leaf switches that a group spans, at most, [g]."""
        return self.kinds.switches.take(self.row)

    def take(self, index: NDArray[Any]) -> GroupLinks:
        """The entries that `index` (integers or a mask) selects, in its order."""
        return GroupLinks(kinds=self.kinds, lines=self.lines, row=self.row[index])

    def where(self, chosen: NDArray[np.bool_], other: GroupLinks) -> GroupLinks:
        """These entries, or those of `other` where they are chosen [g]."""
        kinds, lines = joined_kinds(self.kinds, other.kinds), joined_lines(self.lines, other.lines)
        row = np.where(chosen, other.row + len(self.kinds.size), self.row)
        return GroupLinks(kinds=kinds, lines=lines, row=row)

    def split(self, parts: int) -> list[GroupLinks]:
        """The entries in so many equal parts, one after the other."""
        return [GroupLinks(kinds=self.kinds, lines=self.lines, row=row) for row in np.split(self.row, parts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Groups of equal hosts. Ranks count the devices in this order: group by group, host by host, slot by slot.

    Attributes:
        name: What reports call it.
        groups: The groups of equal hosts.
        inter_group_links: Parallel links of one device to hosts of another group, on top of the NICs of both; none
            means that the NICs alone decide.
        slow_pairs: Hosts between which a path is slow. A group of ranks that has members on both is as slow between
            hosts, also where its collectives might go around that path (assumed).
        networks: The network of each group; `inter_group_links` join unlike networks. Empty means that every group is a
            network of its own.
        switches: The leaf switch of every host. Empty means that nothing between the hosts is narrower than their NICs.
        uplink_bytes_per_s: What all hosts under one leaf switch together send to others, and receive from them; None
            where there are no switches.
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
        """Devices of all hosts."""
        return sum(group.num_devices for group in self.groups)

    @property
    def num_hosts(self) -> int:
        """Hosts of all groups."""
        return sum(group.hosts for group in self.groups)

    @property
    def devices_per_host(self) -> int:
        """Devices of the smallest host."""
        return min(group.devices_per_host for group in self.groups)

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest device [bytes]."""
        return min(group.device.memory_bytes for group in self.groups)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The unlike devices, each once, in rank order."""
        return tuple(dict.fromkeys(group.device for group in self.groups))

    @property
    def device_names(self) -> str:
        """The names of the unlike devices, joined by +: of one kind its name alone."""
        return "+".join(device.name for device in self.devices)

    def rank_host(self) -> IntArray:
        """The host of every rank, [n], ascending."""
        devices_per_host = np.repeat(
            [group.devices_per_host for group in self.groups], [group.hosts for group in self.groups]
        )
        return np.repeat(np.arange(self.num_hosts), devices_per_host)

    def rank_device_index(self) -> IntArray:
        """The index in `devices` of every rank's device, [n]."""
        index = [self.devices.index(group.device) for group in self.groups]
        return np.repeat(index, [group.num_devices for group in self.groups])

    @property
    def host_kinds(self) -> tuple[int, ...]:
        """The first group with the same devices and links as each group."""
        kinds = [(group.device, group.devices_per_host, group.intra_links, group.nic_links) for group in self.groups]
        return tuple(kinds.index(kind) for kind in kinds)

    @property
    def is_mixed(self) -> bool:
        """Whether hosts are unlike."""
        return len(set(self.host_kinds)) > 1

    def rank_host_kind(self) -> IntArray:
        """The kind of every rank's host, by `host_kinds`, [n]."""
        return np.repeat(self.host_kinds, [group.num_devices for group in self.groups])

    def only(self, device: Device) -> Cluster:
        """Its hosts of one kind of device."""
        groups = tuple(group for group in self.groups if group.device == device)
        return Cluster(name=self.name, groups=groups)

    def reordered(self, hosts: Sequence[int]) -> Cluster:
        """The same hosts in another order, each given by its number; no order leaves the cluster as it is.

        Neighbours of one group stay a group.
        """
        if not hosts:
            return self
        assert sorted(hosts) == list(range(self.num_hosts)), "an order names every host once"
        group_of_host = np.repeat(np.arange(len(self.groups)), [group.hosts for group in self.groups])
        runs = [(group, len(list(run))) for group, run in itertools.groupby(group_of_host[list(hosts)].tolist())]
        place = {host: number for number, host in enumerate(hosts)}
        pairs = [(sorted((place[pair.first_host], place[pair.second_host])), pair.share) for pair in self.slow_pairs]
        networks = self.networks or range(len(self.groups))
        return replace(
            self,
            groups=tuple(replace(self.groups[group], hosts=count) for group, count in runs),
            slow_pairs=tuple(SlowPair(first_host=a, second_host=b, share=share) for (a, b), share in pairs),
            networks=tuple(networks[group] for group, _ in runs) if self.inter_group_links else (),
            switches=tuple(self.switches[host] for host in hosts) if self.switches else (),
        )

    def with_hosts(self, hosts: int) -> Cluster:
        """A cluster of one group with another number of hosts; those beyond it are under switches like its own."""
        (group,) = self.groups
        switches: tuple[int, ...] = ()
        if self.switches:
            under_one = self.switches.count(self.switches[0])
            switches = tuple(host // under_one for host in range(hosts))
        return replace(self, groups=(replace(group, hosts=hosts),), switches=switches)

    def group_links(self, stride: IntArray, size: IntArray) -> GroupLinks:
        """What the groups {base + i * stride, i < size} that tile all ranks communicate over.

        With Megatron-Core's rank order (tp fastest, then cp, dp, pp) the stride of a dimension is the product of
        the faster degrees. Each pair is computed from the ranks themselves, once, so degrees need not be powers of
        two nor groups aligned with hosts.

        Args:
            stride: Distance of neighbouring members in ranks, [g].
            size: Ranks in a group, [g].
        """
        stride, size = np.asarray(stride, dtype=np.int64), np.asarray(size, dtype=np.int64)
        assert stride.shape == size.shape, "stride and size belong together, entry by entry"
        assert stride.ndim == 1, f"stride and size are [g], but got {stride.ndim} dimensions"
        assert np.all(stride >= 1), "stride >= 1"
        assert np.all(size >= 1), "size >= 1"
        first, row = distinct_rows([stride, size])
        pairs = list(zip(stride[first].tolist(), size[first].tolist(), strict=True))
        assert all(self.num_devices % (s * n) == 0 for s, n in pairs), f"stride * size divides {self.num_devices} ranks"
        fabric = _fabric(self)
        return _group_links([fabric.worst_links(s, n) for s, n in pairs], row)

    def links_among(self, entries: Sequence[IntArray], at_work: IntArray) -> GroupLinks:
        """What given groups of ranks communicate over; a ring visits host after host, whatever their order.

        Args:
            entries: For each entry its groups, all of one size: the ranks of each [groups, size].
            at_work: All ranks that communicate at that time; others lend them their shares of adapters and uplinks.
        """
        fabric = _fabric(self)
        return _group_links([fabric.links_among(ranks, at_work) for ranks in entries], np.arange(len(entries)))

    def uplink_share(self, ranks: IntArray) -> float:
        """The part of its uplink that those under the first rank's leaf switch take, all of `ranks` sending at once."""
        return _fabric(self).uplink_share(ranks)

    def end_links(self, length: IntArray) -> GroupLinks:
        """What pairs of ranks communicate over, each of the first `length` ranks with one of the last so many [g].

        So do the first and the last stage of a pipeline, whose stages are `length` ranks long. Where one stage is all
        of the ranks, nobody has a partner.
        """
        first, row = distinct_rows([np.asarray(length, dtype=np.int64)])
        lengths = np.asarray(length, dtype=np.int64)[first].tolist()
        assert all(self.num_devices % one == 0 for one in lengths), f"length divides {self.num_devices} ranks"
        fabric = _fabric(self)
        return _group_links([fabric.worst_end_links(one) for one in lengths], row)


def _group_links(found: Sequence[_WorstLinks], row: IntArray) -> GroupLinks:
    """The answers as arrays, of which every entry is a `row`."""
    sizes = np.array([row for row, _ in found], dtype=np.int64).reshape(-1, 5)
    costs = np.array([row for _, row in found]).reshape(-1, len(LINKS), len(LinkCost._fields))
    links = [CostArrays(**dict(zip(LinkCost._fields, cost.T, strict=True))) for cost in costs.swapaxes(0, 1)]
    kinds = GroupKinds(
        size=sizes[:, 0],
        hosts=sizes[:, 1],
        members_per_host=sizes[:, 2],
        max_members_per_host=sizes[:, 3],
        switches=sizes[:, 4],
        **dict(zip(LINKS, links, strict=True)),
    )
    return GroupLinks(kinds=kinds, lines=cost_lines(kinds), row=row)


@functools.lru_cache(maxsize=16)
def _fabric(cluster: Cluster) -> _Fabric:
    return _Fabric(cluster)


class _Fabric:
    """The links of a cluster as arrays, for many questions about groups of its ranks; each answer is kept."""

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
                self.intra_cost[row, members] = combined(group.intra_links, members=members).cost(members)
        self.nic_cost = np.array([combined(group.nic_links).cost() for group in groups])
        nics = [combined(group.nic_links) for group in groups]
        self.sharers = np.array([nic.sharers for nic in nics])
        self.nic_bandwidth = np.array([nic.bandwidth_bytes_per_s for nic in nics])
        self.devices = np.array([group.devices_per_host for group in groups])
        self.host_switch = np.array(cluster.switches or [0] * cluster.num_hosts)
        self.uplink = cluster.uplink_bytes_per_s or math.inf
        self.between_groups = combined(cluster.inter_group_links) if cluster.inter_group_links else None
        # so many neighbouring ranks stand on one host, wherever they begin
        self.neighbours = math.gcd(*(group.devices_per_host for group in groups))
        self.pair_hosts, self.pair_cost = self._slow_pairs(cluster.slow_pairs)
        self.found: dict[tuple[int, int], _WorstLinks] = {}

    def _slow_pairs(self, pairs: tuple[SlowPair, ...]) -> tuple[IntArray, FloatArray]:
        """Both hosts of every slow pair [2, pair], and the cost between them [pair, field of LinkCost]."""
        hosts = np.array([[pair.first_host, pair.second_host] for pair in pairs], dtype=np.int64).reshape(-1, 2).T
        cost = self.nic_cost[self.host_group[hosts]].max(axis=0)
        if self.between_groups is not None:
            crosses = self.host_network[hosts[0]] != self.host_network[hosts[1]]
            cost[crosses] = np.maximum(cost[crosses], self.between_groups.cost())
        shares = np.array([pair.share for pair in pairs])
        per_byte = [field.endswith("_s_per_byte") for field in LinkCost._fields]
        return hosts, np.where(per_byte, cost / shares[:, None], cost)

    def worst_links(self, stride: int, size: int) -> _WorstLinks:
        """For one (stride, size) the five sizes of `GroupKinds`, and what its links cost [4, fields]."""
        if (stride, size) not in self.found:
            alike = math.gcd(stride, self.neighbours)  # groups that begin on so many neighbours are on the same hosts
            hosts = self.rank_host[::alike].reshape(-1, size, stride // alike).swapaxes(1, 2).reshape(-1, size)
            self.found[stride, size] = self._worst_links(hosts, alike)
        return self.found[stride, size]

    def links_among(self, ranks: IntArray, at_work: IntArray) -> _WorstLinks:
        """The same for given groups [groups, size], while only some ranks communicate."""
        busy = np.bincount(self.rank_host[at_work], minlength=len(self.host_group))
        return self._worst_links(np.sort(self.rank_host[ranks], axis=1), 1, busy)

    def uplink_share(self, ranks: IntArray) -> float:
        """What `Cluster.uplink_share` says."""
        busy = np.bincount(self.rank_host[ranks], minlength=len(self.host_group))
        crowding = (
            self._demand(busy)[self.host_switch == self.host_switch[self.rank_host[ranks[0]]]].sum() / self.uplink
        )
        return float(min(crowding, 1.0))

    def _demand(self, busy: IntArray) -> FloatArray:
        """What hosts send if so many of their devices do [bytes/s], [hosts]; the devices of an adapter all it has."""
        group = self.host_group
        devices = np.where(self.sharers[group] > 1, np.where(busy > 0, self.sharers[group], 0), busy)
        return np.asarray(devices * self.nic_bandwidth[group])

    def worst_end_links(self, length: int) -> _WorstLinks:
        """The same for pairs of the first and the last `length` ranks."""
        if (-length, 2) not in self.found:
            ranks = len(self.rank_host)
            alike = math.gcd(length, self.neighbours)
            ends = np.stack([self.rank_host[:length:alike], self.rank_host[ranks - length :: alike]], axis=1)
            sizes, costs = self._worst_links(ends if length < ranks else ends[:, :1], alike)
            costs[2] = costs[3]  # the ranks between them are silent
            self.found[-length, 2] = sizes, costs
        return self.found[-length, 2]

    def _worst_links(self, hosts: IntArray, alike: int, busy: IntArray | None = None) -> _WorstLinks:
        """The worst of groups on those hosts [rows, size]; each row stands for `alike` groups.

        `busy` devices of each host communicate at that time, all of them where it is None.
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
        local = members >= 2
        crossing = hosts_spanned[first // size] >= 2
        # few (kind of host, members) occur among many runs
        width = self.intra_cost.shape[1]
        inside = np.flatnonzero(np.bincount(kind[local] * width + members[local]))
        inside_kind, inside_members = np.divmod(inside, width)
        costs[0] = self.intra_cost[inside_kind, inside_members].max(axis=0, initial=0.0)
        costs[1] = self.intra_cost[inside_kind, 2].max(axis=0, initial=0.0)
        costs[2] = self.nic_cost[np.flatnonzero(np.bincount(kind[crossing]))].max(axis=0, initial=0.0)
        if busy is not None and (self.sharers > 1).any():
            runs = hosts.ravel()[first][crossing]
            costs[2] = self._nic_costs(
                kind[crossing], np.clip(busy[runs], 1, self.sharers[kind[crossing]]) / self.sharers[kind[crossing]]
            )
        costs[3] = self._hop_cost(hosts, alike) if (self.sharers > 1).any() else costs[2]
        switches = 1
        if math.isfinite(self.uplink):
            switch = np.sort(self.host_switch[hosts], axis=1)
            switches = 1 + int((switch[:, 1:] != switch[:, :-1]).sum(axis=1).max())
            if switches > 1:
                demand = self._demand(self.devices[self.host_group] if busy is None else busy)
                crowding = np.bincount(self.host_switch, weights=demand)[switch].max() / self.uplink
                costs[2:] *= np.where(_IS_PER_BYTE, max(crowding, 1.0), 1.0)
        if self.between_groups is not None:
            networks = self.host_network[hosts]
            if np.any(networks != networks[:, :1]):
                costs[2:] = np.maximum(costs[2:], self.between_groups.cost())
        for pair, cost in zip(self.pair_hosts.T, self.pair_cost, strict=True):
            if np.any((hosts == pair[0]).any(axis=1) & (hosts == pair[1]).any(axis=1)):
                costs[2:] = np.maximum(costs[2:], cost)
        return (size, int(hosts_spanned.max()), int(members.min()), int(members.max()), switches), costs

    def _hop_cost(self, hosts: IntArray, alike: int) -> FloatArray:
        """What the network costs messages from each member to the next, all at once [fields].

        A host's adapter is shared by as many of its devices as send off the host, or receive from others.
        """
        leaves = hosts[:, :-1] != hosts[:, 1:]
        count = len(self.host_group)
        sent, received = (np.bincount(ends[leaves], minlength=count) for ends in (hosts[:, :-1], hosts[:, 1:]))
        busy = alike * np.maximum(sent, received)
        crossing = np.flatnonzero(busy)
        kind = self.host_group[crossing]
        return self._nic_costs(kind, np.minimum(busy[crossing] / self.sharers[kind], 1.0))

    def _nic_costs(self, kind: IntArray, share: FloatArray) -> FloatArray:
        """The worst of NICs of those host groups, of whose time per byte a share is left [fields]."""
        return np.asarray((self.nic_cost[kind] * np.where(_IS_PER_BYTE, share[:, None], 1.0)).max(axis=0, initial=0.0))


class _LinkForm(DocumentedModel):
    """A link."""

    kind: str
    """A kind of link of the catalog, such as `nvlink`, `pcie` or `infiniband`: what collectives reach on it."""

    bandwidth_gb_per_s: float = Field(gt=0, le=1e6)
    """Per device and direction [GB/s]."""

    latency_us: float = Field(ge=0, le=1e6)
    """Of one message [µs]."""

    exclusive_group: str | None = None
    """Links of one such group cannot carry one transfer together."""

    mesh_peers: int | None = Field(default=None, ge=1)
    """On a full mesh, over how many peers the bandwidth is divided by wire.

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
    """Equal hosts, one of `cluster.groups:`."""

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
    """What they share to the other switches, per direction [GB/s]."""


class _OneGroupForm(_GroupForm):
    """A cluster of equal hosts."""

    switch: _SwitchForm | None = None
    """Leaf switches."""

    trace: str | None = None
    """A CSV file that tells how the cluster changes over time; see [traces](../configs/traces/README.md)."""


class _GroupsForm(DocumentedModel):
    """A cluster of unlike groups of hosts."""

    name: str = "mixed"
    """What reports call it."""

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
    """As in the file, over which it wins."""


CLUSTER_FORMS: tuple[type[DocumentedModel], ...] = (_OneGroupForm, _GroupsForm, _FileForm)
"""What a configuration may say of a cluster: one of these."""


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
    """The catalog's names."""
    return tuple(_catalog().clusters)


def find_cluster(name: str, hosts: int = 1) -> Cluster:
    """The catalog's cluster of this name with so many hosts.

    Raises:
        ConfigError: no cluster has this name, or there are no hosts.
    """
    return cluster_from_mapping({"name": name, "hosts": hosts}, Path())


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedCluster:
    """What a configuration says of a cluster.

    Attributes:
        cluster: The cluster while nothing has changed.
        trace: The file that tells how it changes over time; None where none is named. `hardware.trace_file` reads it.
    """

    cluster: Cluster
    trace: Path | None


def cluster_from_mapping(mapping: Mapping[str, Any], base_dir: Path, file: str | None = None) -> Cluster:
    """The cluster of `described_cluster`, while nothing has changed."""
    return described_cluster(mapping, base_dir, file).cluster


def described_cluster(mapping: Mapping[str, Any], base_dir: Path, file: str | None = None) -> DescribedCluster:
    """The cluster that a configuration describes.

    It names a cluster of the catalog (`{name: dgx-h100, hosts: 8}`), a device (`{device: H100-SXM-80, hosts: 8}`),
    unlike groups of both (`{groups: [...], inter_group_links: [...]}`), or a file that holds one of these
    (`{file: cluster.yaml}`). `devices_per_host`, `intra_links` and `nic_links` replace what the catalog says; beside
    `device`, `name` is only a label. `switch: {hosts: 4, uplink_gb_per_s: 200}` puts so many neighbouring hosts under
    each leaf switch, whose uplink they share, in each direction. `trace` names a file; one beside `file` wins over one
    inside that file.

    Args:
        mapping: The configuration.
        base_dir: What a relative `file` or `trace` is relative to.
        file: Where the mapping stands, for messages.

    Raises:
        ConfigError: a key or value can't work.
    """
    try:
        if "file" in mapping:
            outer = checked(_FileForm, mapping)
            path = base_dir / outer.file
            inner = read_mapping(path)
            if "file" in inner:
                raise ConfigError("a cluster file can't name another file", key="file", value=inner["file"]).in_file(
                    str(path)
                )
            described = described_cluster(inner, path.parent, str(path))
            return replace(described, trace=_beside(base_dir, outer.trace) or described.trace)
        if "groups" in mapping:
            mixed = checked(_GroupsForm, mapping)
            cluster = _under_switches(_mixed_cluster(mixed), mixed.switch)
            return DescribedCluster(cluster=cluster, trace=_beside(base_dir, mixed.trace))
        form = checked(_OneGroupForm, mapping)
        group = _host_group(form)
        _check_total((group,), key="hosts")
        cluster = _under_switches(Cluster(name=group.name, groups=(group,)), form.switch)
        return DescribedCluster(cluster=cluster, trace=_beside(base_dir, form.trace))
    except ConfigError as error:
        raise (error.in_file(file) if file else error) from None


def _under_switches(cluster: Cluster, form: _SwitchForm | None) -> Cluster:
    """The cluster with so many neighbouring hosts under each leaf switch."""
    if form is None:
        return cluster
    switches = tuple(host // form.hosts for host in range(cluster.num_hosts))
    return replace(cluster, switches=switches, uplink_bytes_per_s=form.uplink_gb_per_s * 1e9)


def _beside(base_dir: Path, name: str | None) -> Path | None:
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
    return HostGroup(
        name=group.name,
        device=group.device,
        hosts=group.hosts,
        devices_per_host=group.devices_per_host,
        intra_links=intra_links,
        nic_links=nic_links,
    )


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


def _check_total(groups: tuple[HostGroup, ...], key: str) -> None:
    total = sum(group.num_devices for group in groups)
    if total > MAX_DEVICES:
        raise ConfigError(f"makes {total} devices; at most {MAX_DEVICES} are supported", key=key)


@functools.cache
def _catalog() -> _Catalog:
    path = CATALOG / "clusters.yaml"
    return checked(_Catalog, read_mapping(path), file=str(path))
