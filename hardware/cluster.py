"""Clusters of equal or unlike hosts.

A host is what a launcher starts, and what is lost or paid for. A domain is what fast links join: the devices of one
host, or of several hosts of a rack.

Letters in shapes: n ranks, g groups of ranks that are asked about.
"""

from __future__ import annotations

import functools
import itertools
import math
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
        domains: Number of the domain of every host. Empty means that neighbours of each group are a domain, as its
            `domain_sizes` say.
    """

    name: str
    groups: tuple[HostGroup, ...]
    inter_group_links: tuple[Link, ...] = ()
    slow_pairs: tuple[SlowPair, ...] = ()
    networks: tuple[int, ...] = ()
    switches: tuple[int, ...] = ()
    uplink_bytes_per_s: float | None = None
    domains: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.groups, "a cluster has hosts"
        assert all(pair.second_host < self.num_hosts for pair in self.slow_pairs), "a slow pair joins two of the hosts"
        assert len(self.networks) in (0, len(self.groups)), "each group is in a network"
        assert len(self.switches) in (0, self.num_hosts), "each host is under a switch"
        assert len(self.domains) in (0, self.num_hosts), "each host is in a domain"
        assert {*self.domains} == {*range(len({*self.domains}))}, "domains are numbered from 0 on"
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
    def devices_per_domain(self) -> int:
        """Number of neighbouring devices that always share a domain: those of the smallest host, or more.

        Groups of so many ranks, one after the other, fill each of several domains of hosts.
        """
        return max(self.devices_per_host, math.gcd(*np.bincount(self.rank_domain()).tolist()))

    @property
    def num_domains(self) -> int:
        """Number of domains."""
        return int(self.host_domain().max()) + 1

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

    def host_domain(self) -> IntArray:
        """Return the domain of every host, [hosts]: the number of the host itself where links end at the host."""
        if self.domains:
            return np.array(self.domains)
        sizes = [size for group in self.groups for size in group.domain_sizes]
        return np.repeat(np.arange(len(sizes)), sizes)

    def rank_domain(self) -> IntArray:
        """Return the domain of every rank, [n]."""
        return self.host_domain()[self.rank_host()]

    def rank_device_index(self) -> IntArray:
        """Return the index in `devices` of every rank's device, [n]."""
        devices = self.devices
        index = [devices.index(group.device) for group in self.groups]
        return np.repeat(index, [group.num_devices for group in self.groups])

    @property
    def host_kinds(self) -> tuple[int, ...]:
        """Kind of hosts of each group: number of the first group with the same devices and links."""
        kinds = [replace(group, name="", hosts=1) for group in self.groups]
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
        # slow pairs, networks, switches and domains follow their hosts to the new places
        place = {host: number for number, host in enumerate(hosts)}
        pairs = [
            (sorted((place[pair.first_host], place[pair.second_host])), pair.share)
            for pair in self.slow_pairs
            if pair.first_host in place and pair.second_host in place
        ]
        networks = self.networks or range(len(self.groups))
        groups = tuple(replace(self.groups[group], hosts=count) for group, count in runs)
        return replace(
            self,
            groups=groups,
            domains=told_domains(groups, self.host_domain()[list(hosts)].tolist()),
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
        return replace(self, groups=(replace(group, hosts=hosts),), switches=switches, domains=())

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
        """Find the links of given groups of ranks; a ring visits domain after domain, host after host.

        Args:
            entries: Ranks of the groups of each entry, all of one size [groups, size].
            at_work: All ranks that communicate at that time; others lend them their shares of adapters and uplinks.
        """
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
        if self.is_mixed or self.slow_pairs or self.switches or self.inter_group_links:
            return True
        return len({*np.bincount(self.rank_domain()).tolist()}) > 1

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


def told_domains(groups: Sequence[HostGroup], domains: Sequence[int]) -> tuple[int, ...]:
    """Number the domains of these groups' hosts in their order; empty where the groups alone tell them.

    Args:
        groups: Groups of hosts.
        domains: Domain of every host, by any numbers.
    """
    if all(group.hosts_per_domain == 1 for group in groups):
        return ()
    numbers: dict[int, int] = {}
    found = tuple(numbers.setdefault(domain, len(numbers)) for domain in domains)
    alone = Cluster(name="", groups=tuple(groups)).host_domain()
    return () if found == tuple(alone.tolist()) else found


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
        host_domain=cluster.host_domain(),
    )
