"""Links between single devices of a cluster: the multi-edges between every two of them.

Source: "Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", section 3.1: every
pair of devices has links, several of which may carry one transfer unless they exclude each other. Two devices of a host
have one for each of the host's `intra_links`, and devices of different hosts one for each of the NIC links that both
have, as fast as the slower of the two sides, or of `inter_group_links` between networks.

The paper gives each pair links of its own. On a cluster a device has one adapter towards all others: its links of one
entry pass a port that sends and, at the other end, one that receives, each one transfer at a time. On a full mesh
(`mesh_peers`) every pair has a wire of its own.

A link carries one message between two devices at the share of its bandwidth that the cost model gives such a message
(`hop_efficiency` of its kind), after its latency and the time to start a send.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hardware.cluster import Cluster
from hardware.link import Link
from tuner.planners.scheduling.problem import DeviceLink

Stated = Sequence[tuple[tuple[int, int], Link, str | None]]
"""Links between two numbered devices, in both directions, with the name of their port at either device."""


def device_links(cluster: Cluster, stated: Stated = ()) -> tuple[DeviceLink, ...]:
    """Return the links between all devices of a cluster.

    Args:
        cluster: Cluster, whose devices are numbered in rank order.
        stated: Links that replace those of the cluster between their devices.
    """
    domain = cluster.rank_domain().tolist()
    group = np.repeat(range(len(cluster.groups)), [one.num_devices for one in cluster.groups]).tolist()
    own: dict[frozenset[int], list[tuple[Link, str | None]]] = {}
    for devices, link, port in stated:
        own.setdefault(frozenset(devices), []).append((link, port))
    found = []
    for source, target in itertools.permutations(range(cluster.num_devices), 2):
        pair = frozenset((source, target))
        links = own.get(pair) or list(_between(cluster, group[source], group[target], domain[source] == domain[target]))
        found += [
            DeviceLink(
                source=source,
                target=target,
                link=_of_one_message(link),
                ports=((source, f"{port} out"), (target, f"{port} in")) if port is not None else (),
            )
            for link, port in links
        ]
    return tuple(found)


def _between(cluster: Cluster, source: int, target: int, is_one_domain: bool) -> Iterator[tuple[Link, str | None]]:
    """Yield the cluster's links between a device of one group and a device of another, or of the same, with ports."""
    first, second = cluster.groups[source], cluster.groups[target]
    if is_one_domain:
        for at, link in enumerate(first.intra_links):
            yield link, None if link.mesh_peers else f"host link {at}"
        return
    narrower = [_slower(*both) for both in zip(first.nic_links, second.nic_links, strict=False)]
    networks = cluster.networks or range(len(cluster.groups))
    if cluster.inter_group_links and networks[source] != networks[target]:
        # what leaves a network passes its NICs first
        most = sum(link.bandwidth_bytes_per_s for link in narrower)
        for at, link in enumerate(cluster.inter_group_links):
            yield replace(link, bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s, most)), f"group link {at}"
        return
    for at, link in enumerate(narrower):
        yield link, f"nic {at}"


def _slower(one: Link, other: Link) -> Link:
    """Return the side that limits what passes both."""
    return min(one, other, key=lambda link: (1 / link.cost().hop_s_per_byte, -link.latency_s))


def _of_one_message(link: Link) -> Link:
    """Return a link with the bandwidth and latency of one long message between two devices."""
    cost = link.among(2).cost()
    return replace(
        link,
        mesh_peers=None,
        sharers=1,
        bandwidth_bytes_per_s=1 / cost.hop_s_per_byte,
        latency_s=cost.long_base_s + cost.long_hop_s,
    )
