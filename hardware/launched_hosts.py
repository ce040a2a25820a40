"""Hosts that a launcher starts, also where a study counts a rack that is one domain as one host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hardware.cluster import Cluster
from hardware.device import hosts_per_domain
from hardware.host_group import HostGroup


def launched(cluster: Cluster) -> Cluster:
    """Return the cluster by the hosts that operating systems see: a host of 64 GB200 is a domain of 16 hosts of 4."""
    groups = tuple(_split(group, _parts(group)) for group in cluster.groups)
    if groups == cluster.groups:
        return cluster
    hosts = [host for host, parts in enumerate(_parts_of_hosts(cluster)) for _ in range(parts)]
    switches = tuple(cluster.switches[host] for host in hosts) if cluster.switches else ()
    return replace(cluster, groups=groups, switches=switches, slow_pairs=(), domains=())


def launched_numbers(cluster: Cluster, hosts: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers, in the launched cluster, of the hosts that some hosts of the cluster are; none are all."""
    parts = _parts_of_hosts(cluster)
    first = [0]
    for count in parts:
        first.append(first[-1] + count)
    return tuple(
        number for host in (hosts or range(cluster.num_hosts)) for number in range(first[host], first[host + 1])
    )


def _parts_of_hosts(cluster: Cluster) -> list[int]:
    return [_parts(group) for group in cluster.groups for _ in range(group.hosts)]


def _parts(group: HostGroup) -> int:
    """Return the number of hosts that operating systems see in each host of a group."""
    of_one = group.device.devices_per_host // hosts_per_domain(group.device)
    is_rack = hosts_per_domain(group.device) > 1 and group.hosts_per_domain == 1
    return group.devices_per_host // of_one if is_rack and group.devices_per_host % of_one == 0 else 1


def _split(group: HostGroup, parts: int) -> HostGroup:
    if parts == 1:
        return group
    return replace(
        group, hosts=group.hosts * parts, devices_per_host=group.devices_per_host // parts, hosts_per_domain=parts
    )
