"""Hypothesis strategies for clusters and for events on them."""

import itertools
from dataclasses import replace

from hypothesis import strategies as st

from hardware.cluster import Cluster
from hardware.device import find_device
from hardware.dynamics import INTER, INTRA, HostEvent, LinkEvent, Trace
from hardware.host_group import HostGroup, SlowPair
from hardware.link import Link

SHARES = (0.1, 0.3, 0.5, 1.0)
KINDS = ("test", "nvlink4", "pcie3")

links = st.builds(
    Link,
    kind=st.sampled_from(KINDS),
    bandwidth_bytes_per_s=st.sampled_from([1e9, 2e9, 5e9, 1e11]),
    latency_s=st.sampled_from([1e-6, 2e-6, 5e-6]),
    exclusive_group=st.sampled_from([None, "a"]),
    mesh_peers=st.sampled_from([None, 3]),
)
host_groups = st.builds(
    HostGroup,
    name=st.just("test"),
    device=st.sampled_from([find_device("V100"), find_device("T4")]),
    hosts=st.integers(1, 4),
    devices_per_host=st.integers(1, 6),
    intra_links=st.lists(links, min_size=1, max_size=2).map(tuple),
    nic_links=st.lists(links, min_size=1, max_size=2).map(tuple),
    hosts_per_domain=st.sampled_from([1, 1, 2, 3]),
)
clusters = st.builds(
    Cluster,
    name=st.just("test"),
    groups=st.lists(host_groups, min_size=1, max_size=3).map(tuple),
    inter_group_links=st.lists(links, max_size=1).map(tuple),
)


@st.composite
def slowed_clusters(draw):
    """Draw a cluster with slow pairs, in which some groups share a network."""
    cluster = draw(clusters)
    pairs = list(itertools.combinations(range(cluster.num_hosts), 2))
    slow = draw(st.lists(st.sampled_from(pairs), max_size=3, unique=True)) if pairs else []
    steps = draw(st.lists(st.integers(0, 1), min_size=len(cluster.groups), max_size=len(cluster.groups)))
    return replace(
        cluster,
        slow_pairs=tuple(
            SlowPair(first_host=a, second_host=b, share=draw(st.sampled_from(SHARES))) for a, b in sorted(slow)
        ),
        networks=tuple(itertools.accumulate(steps)),
    )


@st.composite
def reordered_clusters(draw):
    """Draw some hosts of a cluster in any order, so that domains may lose hosts and be torn apart."""
    cluster = draw(slowed_clusters())
    order = draw(st.permutations(range(cluster.num_hosts)))
    return cluster.reordered(order[: draw(st.integers(1, cluster.num_hosts))])


@st.composite
def traces(draw, cluster):
    """Draw a trace with one event at a time, from 1 s on; at least one host is always present."""
    hosts = range(cluster.num_hosts)
    pairs = list(itertools.combinations(hosts, 2))
    kinds = {link.kind for group in cluster.groups for link in group.intra_links + group.nic_links}
    named = st.sampled_from([INTRA, INTER, *sorted(kinds), *[(host,) for host in hosts], *pairs])
    lost, events = set(), []
    for time_s in range(1, draw(st.integers(0, 8)) + 1):
        host = draw(st.sampled_from(hosts))
        if draw(st.booleans()):
            events.append(LinkEvent(time_s=time_s, link=draw(named), share=draw(st.sampled_from(SHARES))))
        elif host in lost or len(lost) < len(hosts) - 1:
            events.append(HostEvent(time_s=time_s, host=host, is_lost=host not in lost))
            lost ^= {host}
    return Trace(events=tuple(events))


@st.composite
def changing_clusters(draw):
    """Draw a cluster and a trace of events on it."""
    cluster = draw(clusters)
    return cluster, draw(traces(cluster))
