"""Electrical power of hosts in training: what devices draw while they compute, wait and idle, and the rest of a host.

A device at work is taken to draw its board's power limit, and less while it waits for other devices. The rest of a
host (processors, memory, network adapters, fans, power supplies) is a share of its devices' limits. Cooling and losses
of the building are not counted: multiply by the site's power usage effectiveness.

Sources: Latif et al., Empirical Measurements of AI Training Power Demand on a GPU-Accelerated Node (arXiv 2412.08602)
measured at most 8.4 kW on a host of eight H100 of 700 W, which is REST_OF_HOST. Newkirk et al. (arXiv 2506.14551) find
76% of its rated 10.2 kW, so 7.8 kW, in demanding training, which lies between a device that always computes and one
that waits a quarter of the time. Power falls while devices communicate (Choukse et al., arXiv 2508.14318); how far is
assumed.
"""

from __future__ import annotations

from hardware.cluster import Cluster
from hardware.device import power_limit_w
from hardware.host_group import HostGroup

WAITING = 0.5
"""Share of its limit that a device draws while it waits for others; assumed."""

REST_OF_HOST = 0.5
"""Power of the rest of a host at work, as a share of the limits of its devices (Latif et al.)."""

IDLE_HOST = 0.35
"""Power of a whole host that does nothing, as a share of the limits of its devices; assumed."""


def group_power_w(group: HostGroup, busy_share: float) -> float | None:
    """Return the power that the hosts of a group draw on average [W]; None where the device's limit is unknown.

    Args:
        group: Group of hosts at work.
        busy_share: Share of the time in which its devices compute; in the rest they wait.
    """
    limit_w = power_limit_w(group.device)
    if limit_w is None:
        return None
    return group.num_devices * limit_w * (busy_share + WAITING * (1 - busy_share) + REST_OF_HOST)


def cluster_power_w(cluster: Cluster, busy_share: float) -> float | None:
    """Return the power that a whole cluster draws on average [W]; None where the limit of a device is unknown."""
    return _sum([group_power_w(group, busy_share) for group in cluster.groups])


def idle_power_w(cluster: Cluster) -> float | None:
    """Return the power of a cluster whose hosts do nothing [W]; None where the limit of a device is unknown."""
    limits = [(group, power_limit_w(group.device)) for group in cluster.groups]
    return _sum([None if limit_w is None else group.num_devices * limit_w * IDLE_HOST for group, limit_w in limits])


def _sum(parts: list[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
