"""Candidates that leave hosts idle, for clusters on which some hosts only slow down the rest.

A stage is as fast as its slowest device, a collective as its slowest link, and few even layouts divide 56 devices. A
layout on fewer hosts may therefore be faster. Sets of hosts are many, so few of them are searched:

- all hosts of some of the kinds, for every selection of kinds;
- the k most useful hosts, where hosts are counted by the speed of their devices and then by that of their network, or
  by their network first. k runs over all numbers of hosts if they are few, and else over the numbers that have many
  divisors. Of equally useful hosts in domains, equally many of few domains are taken.

Hosts of one kind are interchangeable otherwise, so those with the smallest numbers represent them.

A set is searched only if its devices at their peak could do the step's work faster than the best layout on all hosts.
The fastest layouts on each set are compared by the closed form, and the best few become candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.step.step_time import model_flops_utilisation
from hardware.cluster import Cluster
from hardware.host_choice import choose_hosts
from tuner.space.dimensions import divisors

IDLE_HOSTS = "idle_hosts"
"""Part of the uneven work that lets hosts idle, beside the parts of `Assignment`."""

MOST_SIZES = 8
"""Most numbers of hosts of one order that are tried."""
MOST_KINDS = 4
"""Most kinds of hosts of which every selection is tried: 14 sets."""
MOST_SETS = 8
"""Most sets of hosts whose layouts are enumerated: those with the most computing power."""
MOST_PLANNED_SETS = 3
"""Most of these sets for whose fastest layouts uneven work is planned."""
MOST_PLANNED_ON_SET = 60
"""Most configurations of one set of hosts for which uneven work is planned: those fastest with even work."""
MOST_KEPT = 15
"""Most candidates that leave hosts idle, so that others are among the leaders of a ranking too."""
FARTHEST = 1.1
"""Factor over the fastest candidate on all hosts; layouts on fewer hosts that are predicted slower are no candidates.
"""

Hosts = tuple[int, ...]
"""Numbers of hosts of the cluster."""


def setting_on_hosts(setting: Setting, config: ParallelConfig) -> Setting:
    """Return the setting of a configuration that leaves hosts idle, on the cluster of its hosts; else the same one."""
    hosts = config.assignment.hosts
    if not is_on_fewer(setting.cluster, hosts) or max(hosts) >= setting.cluster.num_hosts:
        return setting
    return replace(setting, cluster=setting.cluster.reordered(hosts))


def is_on_fewer(cluster: Cluster, hosts: Sequence[int]) -> bool:
    """Return whether a list of hosts leaves some of the cluster's hosts out; an empty list names all of them."""
    return 0 < len(hosts) < cluster.num_hosts


def leaves_hosts_idle(cluster: Cluster, grid: ConfigGrid) -> NDArray[np.bool_]:
    """Return whether each configuration leaves hosts of the cluster idle [n]."""
    is_fewer = np.array([is_on_fewer(cluster, one.hosts) for one in grid.assignments], dtype=np.bool_)
    return is_fewer[grid.assignment]


def host_sets(setting: Setting) -> tuple[Hosts, ...]:
    """Return the sets of hosts whose layouts are worth a look, with ascending numbers, the most powerful first.

    No set holds all hosts.
    """
    cluster = setting.cluster
    kinds = _hosts_of_kinds(cluster)
    found: list[Hosts] = []
    if len(kinds) <= MOST_KINDS:
        for count in range(len(kinds) - 1, 0, -1):
            found += [tuple(itertools.chain(*some)) for some in itertools.combinations(kinds.values(), count)]
    domains = cluster.host_domain().tolist()
    for order, rank in _orders(setting):
        found += [choose_hosts(order, rank, domains, count) for count in _sizes(order, cluster)]
    power = _host_power(setting)
    sets = dict.fromkeys(tuple(sorted(hosts)) for hosts in found)
    # the sort is stable, so that sets of equal power keep their order
    return tuple(sorted(sets, key=lambda hosts: -sum(power[host] for host in hosts)))


def on_hosts(grid: ConfigGrid, hosts: Hosts) -> ConfigGrid:
    """Return configurations on the cluster of some hosts as configurations of the whole cluster, by its numbers."""
    # an empty order is that of the hosts themselves
    numbered = tuple(
        replace(one, hosts=tuple(hosts[place] for place in one.hosts or range(len(hosts)))) for one in grid.assignments
    )
    configs = [replace(grid.config(at), assignment=numbered[code]) for at, code in enumerate(grid.assignment.tolist())]
    return ConfigGrid.from_configs(configs, grid.opened)


def at_peak_s(setting: Setting) -> float:
    """Return the step time if all devices of the setting's cluster computed at their peak, without waiting [s]."""
    return float(model_flops_utilisation(setting.job, setting.cluster, np.ones(1))[0])


def _hosts_of_kinds(cluster: Cluster) -> dict[int, list[int]]:
    """Return the numbers of the hosts of each kind, by `Cluster.host_kinds`."""
    found: dict[int, list[int]] = {}
    number = itertools.count()
    for group, kind in zip(cluster.groups, cluster.host_kinds, strict=True):
        found.setdefault(kind, []).extend(itertools.islice(number, group.hosts))
    return found


def _host_power(setting: Setting) -> list[float]:
    """Return the peak of the devices of each host together [FLOP/s]."""
    precision = setting.job.precision
    return [
        group.devices_per_host * group.device.peak_flop_per_s(precision)
        for group in setting.cluster.groups
        for _ in range(group.hosts)
    ]


def _orders(setting: Setting) -> tuple[tuple[Hosts, list[tuple[float, float]]], ...]:
    """Return the hosts in two orders, the most useful first, with what orders them: device and network, or network."""
    speed, network = [], []
    for group in setting.cluster.groups:
        speed += [group.device.peak_flop_per_s(setting.job.precision)] * group.hosts
        network += [sum(link.bandwidth_bytes_per_s for link in group.nic_links)] * group.hosts
    found: dict[Hosts, list[tuple[float, float]]] = {}
    for one, other in ((speed, network), (network, speed)):
        rank = [(-first, -second) for first, second in zip(one, other, strict=True)]
        found.setdefault(tuple(sorted(range(setting.cluster.num_hosts), key=rank.__getitem__)), rank)
    return tuple(found.items())


def _sizes(order: Hosts, cluster: Cluster) -> list[int]:
    """Return the numbers of hosts of an order to try, ascending: those whose devices have the most divisors."""
    of_host = [group.devices_per_host for group in cluster.groups for _ in range(group.hosts)]
    devices = list(itertools.accumulate(of_host[host] for host in order))
    sizes = range(1, len(order))
    # of equally many divisors the larger number of hosts
    best = sorted(sizes, key=lambda size: (-len(divisors(devices[size - 1])), -size))
    return sorted(best[:MOST_SIZES])
