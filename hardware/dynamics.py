"""Clusters that change over time: bandwidth that comes and goes, hosts that are lost and return.

"Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", section 2.2, models a cluster
as a sequence of graphs G(0), G(1), ...; here it is one nominal cluster and the events that change it. Between two
events it is an ordinary `Cluster`, so that predictions and plans need to know nothing of time.

Events add up as follows:
- Of several events on one link the latest counts; the share is always that of the nominal bandwidth.
- Where links of several names overlap, their shares are multiplied: with `inter` at 0.5, `infiniband` at 0.5 and `h3`
  at 0.5, the InfiniBand NICs of host 3 have an eighth. The share of a pair multiplies the bandwidth of the slower NIC.
- A host keeps the shares of its links while it is lost. The shares of its pairs wait with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from hardware.cluster import Cluster, told_domains
from hardware.host_group import HostGroup, SlowPair
from hardware.link import Link, spelling_key

INTRA = "intra"
INTER = "inter"
_Shares = Mapping[str | tuple[int, ...], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEvent:
    """Event from which on links have a share of their nominal bandwidth.

    Attributes:
        time_s: Time of the event [s].
        link: Links that change: INTRA for all links inside domains; INTER for all NICs and all links between groups; a
            kind of link for all links of this kind; (a,) for the NICs of host a; (a, b) with a < b for the path between
            two hosts.
        share: Bandwidth of these links over their nominal one, above 0 and at most 1.
    """

    time_s: float
    link: str | tuple[int, ...]
    share: float

    def __post_init__(self) -> None:
        assert 0 < self.share <= 1, f"a share is above 0 and at most 1, but got {self.share}"
        if not isinstance(self.link, str):
            assert len(self.link) in (1, 2), f"a link is of one host or of two, but got {self.link}"
            assert list(self.link) == sorted({*self.link}), f"two hosts ascend, but got {self.link}"

    def __str__(self) -> str:
        link = self.link if isinstance(self.link, str) else "-".join(f"h{host}" for host in self.link)
        return f"{link} has {self.share:.4g} of its bandwidth"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEvent:
    """Event at which a host is lost or returns.

    Attributes:
        time_s: Time of the event [s].
        host: Number of the host, in rank order.
        is_lost: Whether the host is lost; otherwise it returns.
    """

    time_s: float
    host: int
    is_lost: bool

    def __str__(self) -> str:
        return f"h{self.host} is {'lost' if self.is_lost else 'back'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Events of a cluster in the order of time; before the first event the cluster is nominal.

    Attributes:
        events: Events in ascending time; those of one time happen at once.
    """

    events: tuple[LinkEvent | HostEvent, ...]

    def __post_init__(self) -> None:
        times_s = [event.time_s for event in self.events]
        assert all(math.isfinite(time_s) and time_s >= 0 for time_s in times_s), "an event has a time"
        assert times_s == sorted(times_s), "events ascend in time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Interval of time in which nothing changes.

    Attributes:
        from_s: Begin of the interval [s].
        to_s: End of the interval [s].
        cluster: State of the cluster during the interval.
        hosts: Numbers of its hosts in the nominal cluster, in rank order: host i of `cluster` is hosts[i].
        events: Events at the begin of the interval.
    """

    from_s: float
    to_s: float
    cluster: Cluster
    hosts: tuple[int, ...]
    events: tuple[LinkEvent | HostEvent, ...]


@dataclass(kw_only=True, slots=True)
class _State:
    """Differences from the nominal cluster: shares other than 1, and the hosts that are lost."""

    shares: dict[str | tuple[int, ...], float] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    def apply(self, event: LinkEvent | HostEvent) -> None:
        if isinstance(event, HostEvent):
            (self.lost.add if event.is_lost else self.lost.discard)(event.host)
            return
        link = spelling_key(event.link) if isinstance(event.link, str) else event.link
        self.shares[link] = event.share
        if event.share == 1.0:
            del self.shares[link]


def cluster_at(cluster: Cluster, trace: Trace, time_s: float) -> Cluster:
    """Return the cluster at `time_s`, after all events until then, that moment included.

    Hosts that are lost are missing, and the others are numbered anew in their old order. Where the NICs of some hosts
    of a group have become slower, the group is split.

    Args:
        cluster: Nominal cluster that the trace was read for.
        trace: Events of the cluster, which never lose its last host.
        time_s: Time from 0 on [s].
    """
    state = _State()
    for event in itertools.takewhile(lambda event: event.time_s <= time_s, trace.events):
        state.apply(event)
    return _apply_state(cluster, state)


def lost_hosts(trace: Trace, time_s: float) -> tuple[int, ...]:
    """List the hosts that are lost at `time_s`, ascending."""
    lost: set[int] = set()
    for event in trace.events:
        if event.time_s <= time_s and isinstance(event, HostEvent):
            (lost.add if event.is_lost else lost.discard)(event.host)
    return tuple(sorted(lost))


def hosts_alone(cluster: Cluster, hosts: Collection[int]) -> Cluster:
    """Return the cluster that some of its hosts form, at least one."""
    lost = [host for host in range(cluster.num_hosts) if host not in hosts]
    return cluster_at(
        cluster, Trace(events=tuple(HostEvent(time_s=0.0, host=host, is_lost=True) for host in lost)), 0.0
    )


def intervals(cluster: Cluster, trace: Trace, until_s: float) -> tuple[Interval, ...]:
    """Return all intervals from 0 to `until_s` in which nothing changes; two neighbours differ in cluster or hosts.

    Args:
        cluster: Nominal cluster that the trace was read for.
        trace: Events of the cluster; those at `until_s` or later are left out.
        until_s: End of the last interval, above 0 [s].
    """
    assert until_s > 0, f"time goes on, but got until_s={until_s}"
    found: list[Interval] = []
    for stretch in itertools.takewhile(lambda stretch: stretch.from_s < until_s, _split_time(cluster, trace)):
        if found and (found[-1].cluster, found[-1].hosts) == (stretch.cluster, stretch.hosts):
            continue
        if found:
            found[-1] = replace(found[-1], to_s=stretch.from_s)
        found.append(replace(stretch, to_s=until_s))
    return tuple(found)


def _split_time(cluster: Cluster, trace: Trace) -> Iterator[Interval]:
    """Yield an interval from 0 and from the time of every later event, each without an end."""
    state = _State()
    hosts = tuple(range(cluster.num_hosts))
    if not trace.events or trace.events[0].time_s > 0:
        yield Interval(from_s=0.0, to_s=math.inf, cluster=cluster, hosts=hosts, events=())
    for time_s, at_once in itertools.groupby(trace.events, key=lambda event: event.time_s):
        events = tuple(at_once)
        for event in events:
            state.apply(event)
        there = tuple(host for host in hosts if host not in state.lost)
        yield Interval(from_s=time_s, to_s=math.inf, cluster=_apply_state(cluster, state), hosts=there, events=events)


def _apply_state(cluster: Cluster, state: _State) -> Cluster:
    assert not cluster.slow_pairs, "a trace begins with the nominal cluster"
    assert not cluster.networks, "a trace begins with the nominal cluster"
    shares, number = state.shares, itertools.count()
    parts: list[HostGroup] = []
    networks: list[int] = []
    number_now: dict[int, int] = {}  # hosts are numbered anew without the lost ones
    for network, group in enumerate(cluster.groups):
        hosts = [host for host in itertools.islice(number, group.hosts) if host not in state.lost]
        number_now.update(zip(hosts, itertools.count(len(number_now))))
        intra_links = _scale_links(group.intra_links, shares, shares.get(INTRA, 1.0))
        # neighbours whose NICs have the same share stay one group
        for nic_share, alike in itertools.groupby(hosts, key=lambda host: shares.get((host,), 1.0)):
            nic_links = _scale_links(group.nic_links, shares, shares.get(INTER, 1.0) * nic_share)
            parts.append(replace(group, hosts=len(list(alike)), intra_links=intra_links, nic_links=nic_links))
            networks.append(network)
    assert parts, "some host is always there"
    num_hosts = next(number)
    named = {host for link in shares if not isinstance(link, str) for host in link} | state.lost
    assert max(named, default=0) < num_hosts, f"a trace names some of {num_hosts} hosts, but got {max(named)}"
    # a group whose NICs became unlike is several groups now
    is_split = len(set(networks)) < len(networks)
    return replace(
        cluster,
        groups=tuple(parts),
        domains=told_domains(parts, cluster.host_domain()[list(number_now)].tolist()),
        inter_group_links=_scale_links(cluster.inter_group_links, shares, shares.get(INTER, 1.0)),
        slow_pairs=tuple(
            SlowPair(first_host=number_now[link[0]], second_host=number_now[link[1]], share=share)
            for link, share in sorted((link, share) for link, share in shares.items() if not isinstance(link, str))
            if len(link) == 2 and number_now.keys() >= {*link}
        ),
        # the parts of a group still reach each other as before
        networks=tuple(networks) if is_split and cluster.inter_group_links else (),
        switches=tuple(cluster.switches[host] for host in number_now) if cluster.switches else (),
    )


def _scale_links(links: tuple[Link, ...], shares: _Shares, share: float) -> tuple[Link, ...]:
    """Multiply the bandwidths of links by `share` and by the shares of their kinds."""
    return tuple(
        replace(
            link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * share * shares.get(spelling_key(link.kind), 1.0)
        )
        for link in links
    )
