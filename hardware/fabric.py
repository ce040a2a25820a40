"""Links of a cluster as arrays: which links the groups of ranks cross that are asked about.

Letters in shapes: n ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hardware.algorithms import LINKS
from hardware.arrays import FloatArray, IntArray
from hardware.group_links import GroupLinks, WorstLinks, distinct_links, stack_links
from hardware.host_group import HostGroup, SlowPair
from hardware.link import Link, LinkCost, combine_links

_IS_PER_BYTE = np.array([field.endswith("s_per_byte") for field in LinkCost._fields])


def _share_of(cost: FloatArray, share: float) -> FloatArray:
    """Return the costs of links with a share of their bandwidth [..., fields]; latencies stay."""
    return np.where(_IS_PER_BYTE, cost / share, cost)


class Fabric:
    """Links of a cluster as arrays, for many questions about groups of its ranks; each answer is kept.

    The arguments are the fields of `Cluster`, and `Cluster.host_domain`.
    """

    def __init__(
        self,
        *,
        groups: tuple[HostGroup, ...],
        networks: tuple[int, ...],
        inter_group_links: tuple[Link, ...],
        switches: tuple[int, ...],
        uplink_bytes_per_s: float | None,
        slow_pairs: tuple[SlowPair, ...],
        host_domain: IntArray,
    ) -> None:
        self.host_group = np.repeat(np.arange(len(groups)), [group.hosts for group in groups])
        self.host_domain = host_domain
        self.has_wide_domains = len(np.unique(host_domain)) < len(host_domain)
        self.devices = np.array([group.devices_per_host for group in groups])
        self.rank_host = np.repeat(np.arange(len(self.host_group)), self.devices[self.host_group])
        self.host_network = np.array(networks or range(len(groups)))[self.host_group]
        # [host group, members in a domain, field of LinkCost]; no link joins fewer than two members
        in_domain = np.bincount(host_domain, weights=self.devices[self.host_group]).astype(np.int64)
        self.intra_cost = np.zeros((len(groups), max(2, in_domain.max()) + 1, len(LinkCost._fields)))
        for row, group in enumerate(groups):
            for members in range(2, in_domain[host_domain[self.host_group == row]].max() + 1):
                self.intra_cost[row, members] = combine_links(group.intra_links, members=members).cost(members)
        # parallel NICs of a device count as one link
        nics = [combine_links(group.nic_links) for group in groups]
        # between domains only the NICs count, whatever the number of members [host group, field of LinkCost]
        self.nic_cost = np.array([nic.cost() for nic in nics])
        self.sharers = np.array([nic.sharers for nic in nics])
        self.nic_bandwidth = np.array([nic.bandwidth_bytes_per_s for nic in nics])
        self.host_switch = np.array(switches or [0] * len(self.host_group))
        self.uplink = uplink_bytes_per_s or math.inf
        self.between_groups = combine_links(inter_group_links) if inter_group_links else None
        # number of neighbouring ranks that share a host, wherever they begin
        self.neighbours = math.gcd(*(group.devices_per_host for group in groups))
        self.pairs = slow_pairs
        self.found: dict[tuple[int, int], WorstLinks] = {}
        self.in_stages: dict[tuple[int, int, int], tuple[list[WorstLinks], list[int]]] = {}
        self.between_stages: dict[int, tuple[list[WorstLinks], IntArray]] = {}
        self.among: dict[tuple[object, ...], GroupLinks] = {}

    def _is_inside(self, pair: SlowPair) -> bool:
        """Return whether both hosts are in one domain."""
        return bool(self.host_domain[pair.first_host] == self.host_domain[pair.second_host])

    def _pair_cost(self, pair: SlowPair) -> FloatArray:
        """Return the cost between two hosts of different domains with a slow path [fields]."""
        ends = self.host_group[[pair.first_host, pair.second_host]]
        # a pair is at least as slow as the slower of its NICs, and as the links between their networks
        cost = self.nic_cost[ends].max(axis=0)
        networks = self.host_network[[pair.first_host, pair.second_host]]
        if self.between_groups is not None and networks[0] != networks[1]:
            cost = np.maximum(cost, self.between_groups.cost())
        return _share_of(cost, pair.share)

    def worst_links(self, stride: int, size: int) -> WorstLinks:
        """Return the five sizes of `GroupKinds` for one (stride, size), and the cost of its links [4, fields]."""
        if (stride, size) not in self.found:
            alike = math.gcd(stride, self.neighbours)  # groups that begin on these neighbours are on the same hosts
            hosts = self.rank_host[::alike].reshape(-1, size, stride // alike).swapaxes(1, 2).reshape(-1, size)
            self.found[stride, size] = self._worst_links(hosts, alike)
        return self.found[stride, size]

    def links_among(self, entries: Sequence[IntArray], at_work: IntArray) -> GroupLinks:
        """Return the links of `Cluster.links_among`."""
        busy = np.bincount(self.rank_host[at_work], minlength=len(self.host_group))
        hosts = [self._by_domain(self.rank_host[ranks]) for ranks in entries]
        key = (busy.tobytes(), *((one.shape, one.tobytes()) for one in hosts))
        if key not in self.among:
            found = [self._worst_links(one, 1, busy) for one in hosts]
            self.among[key] = stack_links(found, np.arange(len(found)))
        return self.among[key]

    def _by_domain(self, hosts: IntArray) -> IntArray:
        """Sort the hosts of each row by their domains and numbers [rows, size]."""
        count = len(self.host_group)
        return np.asarray(np.sort(self.host_domain[hosts] * count + hosts, axis=1) % count)

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

    def worst_end_links(self, length: int) -> WorstLinks:
        """Return sizes and costs of pairs of the first and the last `length` ranks."""
        if (-length, 2) not in self.found:
            ranks = len(self.rank_host)
            alike = math.gcd(length, self.neighbours)
            ends = np.stack([self.rank_host[:length:alike], self.rank_host[ranks - length :: alike]], axis=1)
            sizes, costs = self._worst_links(ends if length < ranks else ends[:, :1], alike)
            costs[2] = costs[3]  # the ranks between them are silent
            self.found[-length, 2] = sizes, costs
        return self.found[-length, 2]

    def stage_links(self, length: int) -> tuple[list[WorstLinks], IntArray]:
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
            found, kinds = distinct_links(every)
            self.between_stages[length] = (found or [self.worst_links(length, 1)], np.array(kinds, dtype=np.int64))
        return self.between_stages[length]

    def links_of_stages(self, stride: int, size: int, length: int) -> tuple[list[WorstLinks], list[int]]:
        """Return kinds of links of one (stride, size) inside stages of `length` ranks, and the kind of each stage."""
        if (stride, size, length) not in self.in_stages:
            alike = math.gcd(stride, self.neighbours)
            every = []
            for begin in range(0, len(self.rank_host), length):
                hosts = self.rank_host[begin : begin + length : alike]
                groups = hosts.reshape(-1, size, stride // alike).swapaxes(1, 2).reshape(-1, size)
                every.append(self._worst_links(groups, alike))
            self.in_stages[stride, size, length] = distinct_links(every)
        return self.in_stages[stride, size, length]

    def _worst_links(self, hosts: IntArray, alike: int, busy: IntArray | None = None) -> WorstLinks:
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
        # neighbours on one host are a run; where hosts stand for domains, each run is all members in its domain
        starts_run = np.ones(hosts.shape, dtype=bool)
        starts_run[:, 1:] = hosts[:, 1:] != hosts[:, :-1]
        first = np.flatnonzero(starts_run)
        members = np.diff(first, append=hosts.size)
        row, host = first // size, hosts.ravel()[first]
        kind = self.host_group[host]
        in_domain = self._join_runs(row, host, members) if self.has_wide_domains else (row, host, kind, members)
        domain_row, domain, domain_kind, domain_members = in_domain
        domains_spanned = np.bincount(domain_row, minlength=len(hosts))
        # links inside a domain matter to several members there, NICs to groups over several domains
        local = domain_members >= 2
        crossing = domains_spanned[row] >= 2
        # few (kind of host, members) occur among many runs
        width = self.intra_cost.shape[1]
        inside = np.flatnonzero(np.bincount(domain_kind[local] * width + domain_members[local]))
        inside_kind, inside_members = np.divmod(inside, width)
        costs[0] = self.intra_cost[inside_kind, inside_members].max(axis=0, initial=0.0)
        costs[1] = self.intra_cost[inside_kind, 2].max(axis=0, initial=0.0)
        costs[2] = self.nic_cost[np.flatnonzero(np.bincount(kind[crossing]))].max(axis=0, initial=0.0)
        # silent devices leave their shares of an adapter to those that communicate
        if busy is not None and (self.sharers > 1).any():
            sharers = self.sharers[kind[crossing]]
            share = np.clip(busy[host[crossing]], 1, sharers) / sharers
            costs[2] = self._nic_costs(kind[crossing], share)
        # messages to the next member leave the adapter's shares of silent devices to the others
        costs[3] = self._hop_cost(hosts, alike) if (self.sharers > 1).any() else costs[2]
        switches = 1
        if math.isfinite(self.uplink):
            # an uplink that all its hosts together overload slows down every byte between switches
            senders = hosts[domains_spanned >= 2] if self.has_wide_domains else hosts
            switch = np.sort(self.host_switch[senders], axis=1)
            switches = 1 + int((switch[:, 1:] != switch[:, :-1]).sum(axis=1).max(initial=0))
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
        for pair in self.pairs:
            is_on_both = (hosts == pair.first_host).any(axis=1) & (hosts == pair.second_host).any(axis=1)
            if is_on_both.any() and self._is_inside(pair):
                slowed = is_on_both[domain_row] & (domain == self.host_domain[pair.first_host])
                kinds, numbers = domain_kind[slowed], domain_members[slowed]
                own = self.intra_cost[kinds, numbers].max(axis=0), self.intra_cost[kinds, 2].max(axis=0)
                costs[:2] = np.maximum(costs[:2], _share_of(np.array(own), pair.share))
            elif is_on_both.any():
                costs[2:] = np.maximum(costs[2:], self._pair_cost(pair))
        sizes = int(domains_spanned.max()), int(domain_members.min()), int(domain_members.max())
        return (size, *sizes, switches), costs

    def _join_runs(self, row: IntArray, host: IntArray, members: IntArray) -> tuple[IntArray, ...]:
        """Join the members on hosts of one domain: their row, domain, kind of host and number [runs in domains].

        The arguments are the rows, hosts and numbers of members of the runs on hosts.
        """
        count = int(self.host_domain.max()) + 1
        keys, first, number = np.unique(row * count + self.host_domain[host], return_index=True, return_inverse=True)
        joined = np.bincount(number, weights=members).astype(np.int64)
        # the links inside a domain are the same on all of its hosts
        return keys // count, keys % count, self.host_group[host[first]], joined

    def _hop_cost(self, hosts: IntArray, alike: int) -> FloatArray:
        """Return the network's cost of messages from each member to the next, all at once [fields].

        A host's adapter is shared by the devices that send to other domains, or by those that receive from them,
        whichever are more.
        """
        # members send to the next one of their row; count the senders and the receivers of each host
        domain = self.host_domain[hosts]
        leaves = domain[:, :-1] != domain[:, 1:]
        count = len(self.host_group)
        sent, received = (np.bincount(ends[leaves], minlength=count) for ends in (hosts[:, :-1], hosts[:, 1:]))
        busy = alike * np.maximum(sent, received)
        crossing = np.flatnonzero(busy)
        kind = self.host_group[crossing]
        return self._nic_costs(kind, np.minimum(busy[crossing] / self.sharers[kind], 1.0))

    def _nic_costs(self, kind: IntArray, share: FloatArray) -> FloatArray:
        """Return the worst cost of the NICs of host groups, each with a share of its time per byte [fields]."""
        return np.asarray((self.nic_cost[kind] * np.where(_IS_PER_BYTE, share[:, None], 1.0)).max(axis=0, initial=0.0))
