import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.cluster_file import cluster_from_mapping, find_cluster
from hardware.dynamics import INTER, INTRA, HostEvent, LinkEvent, Trace, cluster_at, intervals
from hardware.host_group import SlowPair
from hardware.link import LinkCost, combine_links
from tests.support.settings.random_clusters import changing_clusters


def links_have(time_s, link, share) -> LinkEvent:
    """From a time on, links have a share."""
    return LinkEvent(time_s=time_s, link=link, share=share)


def lost(time_s, host) -> HostEvent:
    """A host is lost."""
    return HostEvent(time_s=time_s, host=host, is_lost=True)


def back(time_s, host) -> HostEvent:
    """A host returns."""
    return HostEvent(time_s=time_s, host=host, is_lost=False)


def after(cluster, *events):
    """The cluster once all of this has happened."""
    return cluster_at(cluster, Trace(events=events), math.inf)


def each_host(cluster):
    """What every host of a cluster has: device, number of devices, links, and the network that it is in."""
    networks = cluster.networks or range(len(cluster.groups))
    return [
        (group.device, group.devices_per_host, group.intra_links, group.nic_links, network)
        for group, network in zip(cluster.groups, networks, strict=True)
        for _ in range(group.hosts)
    ]


# The cluster at a time


@given(changing_clusters())
@settings(max_examples=40)
def test_events_change_the_cluster_and_can_be_undone(changing):
    """Before the first event the cluster is as described, from the time of each on changed; once all is undone, it is
    the described one again, bit by bit.
    """
    cluster, trace = changing
    links = {event.link for event in trace.events if isinstance(event, LinkEvent)}
    hosts = {event.host for event in trace.events if isinstance(event, HostEvent)}
    undone = (*[links_have(99, link, 1.0) for link in links], *[back(99, host) for host in hosts])

    assert cluster_at(cluster, trace, 0.999) == cluster
    for count, event in enumerate(trace.events, start=1):
        assert cluster_at(cluster, trace, event.time_s) == after(cluster, *trace.events[:count])
    assert after(cluster, *trace.events, *undone) == cluster


@given(changing_clusters(), st.sampled_from([0.2, 0.6]))
@settings(max_examples=40)
def test_the_latest_share_of_a_link_replaces_earlier_ones(changing, share):
    """Shares of one link are of its nominal bandwidth: what was said before of the same link is forgotten."""
    cluster, trace = changing
    for link in {event.link for event in trace.events if isinstance(event, LinkEvent)}:
        others = [event for event in trace.events if not (isinstance(event, LinkEvent) and event.link == link)]

        latest = links_have(99, link, share)

        assert after(cluster, *trace.events, latest) == after(cluster, *others, latest)


@given(changing_clusters())
@settings(max_examples=40)
def test_hosts_keep_their_order_and_their_links(changing):
    """After any events the hosts that are there stand in the old order, each with what it has where none is lost."""
    cluster, trace = changing
    shares = [event for event in trace.events if isinstance(event, LinkEvent)]
    there = intervals(cluster, trace, 99)[-1].hosts

    changed, whole = after(cluster, *trace.events), after(cluster, *shares)

    assert [host[:4] for host in each_host(changed)] == [each_host(whole)[host][:4] for host in there]
    numbers = {host: number for number, host in enumerate(there)}
    assert changed.slow_pairs == tuple(
        SlowPair(first_host=numbers[pair.first_host], second_host=numbers[pair.second_host], share=pair.share)
        for pair in whole.slow_pairs
        if {pair.first_host, pair.second_host} <= numbers.keys()
    )


def test_unlike_hosts_split_their_group_and_no_further():
    """Hosts with equal NICs stay together, and neighbours of a lost host that are alike become neighbours."""
    cluster = find_cluster("dgx-h100", 6)
    slow = [links_have(1, (host,), 0.5) for host in (2, 3)]

    assert [group.hosts for group in after(cluster, *slow).groups] == [2, 2, 2]
    assert [group.hosts for group in after(cluster, *slow, lost(2, 2)).groups] == [2, 1, 2]
    assert [group.hosts for group in after(cluster, *slow, lost(2, 2), lost(2, 3)).groups] == [4]
    assert [group.hosts for group in after(cluster, *slow, links_have(2, (2,), 1.0)).groups] == [3, 1, 2]


ETHERNET = {"kind": "ethernet", "bandwidth_gb_per_s": 0.5, "latency_us": 30}


def two_kinds(hosts):
    """Hosts of two kinds, and a slow link between the kinds."""
    groups = [{"name": name, "hosts": hosts} for name in ("dgx-h100", "dgx-a100")]
    return cluster_from_mapping({"groups": groups, "inter_group_links": [ETHERNET]}, Path())


def test_links_between_groups_belong_to_inter():
    """`inter` and the kind of a link between groups change its bandwidth; one host's network does not."""
    for link, share in ((INTER, 0.5), ("Ethernet", 0.5), ((0,), 1), (INTRA, 1)):
        changed = after(two_kinds(1), links_have(1, link, 0.5))
        assert changed.inter_group_links[0].bandwidth_bytes_per_s == 0.5e9 * share


def test_another_link_works_where_the_widest_has_become_narrow():
    """Of links that exclude each other the widest works; once NVLink has less left than PCIe, that is PCIe."""
    nvlink = {"kind": "nvlink4", "bandwidth_gb_per_s": 400, "latency_us": 2, "exclusive_group": "fabric"}
    pcie = {"kind": "pcie", "bandwidth_gb_per_s": 50, "latency_us": 3, "exclusive_group": "fabric"}
    cluster = cluster_from_mapping({"device": "H100", "intra_links": [nvlink, pcie]}, Path())

    working = [
        combine_links(after(cluster, links_have(1, "NVLink-4", share)).groups[0].intra_links) for share in (0.2, 0.1)
    ]

    assert [link.kind for link in working] == ["nvlink4", "pcie"]
    assert working[0].bandwidth_bytes_per_s == pytest.approx(80e9)


@given(st.sampled_from([INTRA, INTER, "infiniband", (1,), (0, 2)]), st.floats(1e-6, 1))
def test_less_bandwidth_is_never_faster(link, share):
    """On hosts with one link each, a share makes no cost per byte smaller, and no other cost different."""
    cluster = find_cluster("dgx-h100", 4)
    stride, size = np.array([1, 1, 8, 16, 8]), np.array([8, 16, 2, 2, 4])

    before = cluster.group_links(stride, size).kinds
    now = after(cluster, links_have(1, link, share)).group_links(stride, size).kinds

    for name in ("intra", "pair", "inter"):
        for field in LinkCost._fields:
            old, new = getattr(getattr(before, name), field), getattr(getattr(now, name), field)
            assert np.all(new >= old * (1 - 1e-12)) if "per_byte" in field else np.array_equal(new, old)


# Intervals


@given(changing_clusters(), st.floats(0.5, 12))
@settings(max_examples=40)
def test_intervals_tile_the_time(changing, until_s):
    """Intervals follow each other from 0 to the end, neighbours differ, and each holds the cluster of all its times."""
    cluster, trace = changing

    found = intervals(cluster, trace, until_s)

    assert (found[0].from_s, found[-1].to_s) == (0, until_s)
    for interval, following in itertools.pairwise(found):
        assert interval.to_s == following.from_s
        assert (interval.cluster, interval.hosts) != (following.cluster, following.hosts)
    for interval in found:
        assert interval.from_s < interval.to_s
        assert interval.cluster.num_hosts == len(interval.hosts)
        for time_s in (interval.from_s, (interval.from_s + interval.to_s) / 2, np.nextafter(interval.to_s, 0)):
            assert cluster_at(cluster, trace, time_s) == interval.cluster


def test_an_interval_tells_what_began_it():
    """Events without an effect begin nothing; those of one time begin one interval together; later ones are cut off."""
    cluster = find_cluster("dgx-h100", 2)
    half = links_have(20, INTER, 0.5)
    events = (links_have(10, INTER, 1.0), half, lost(20, 1), links_have(30, (1,), 0.5), back(40, 1), lost(50, 0))

    found = intervals(cluster, Trace(events=events), 50)

    assert [(interval.from_s, interval.to_s) for interval in found] == [(0, 20), (20, 40), (40, 50)]
    assert [interval.hosts for interval in found] == [(0, 1), (0,), (0, 1)]
    assert [interval.events for interval in found] == [(), events[1:3], (events[4],)]
    has_all, has_half, is_lost, *_, is_back, _ = map(str, events)
    assert [has_all, has_half] == ["inter has 1 of its bandwidth", "inter has 0.5 of its bandwidth"]
    assert [is_lost, is_back] == ["h1 is lost", "h1 is back"]
    assert str(links_have(0, (0, 3), 1 / 3)) == "h0-h3 has 0.3333 of its bandwidth"


def test_other_hosts_are_another_interval():
    """Where one of two equal hosts takes the other's place, the cluster is equal, and yet the job has to move.

    Without events the described cluster is there all the time, and an event at 0 leaves no time before it.
    """
    cluster = find_cluster("dgx-h100", 2)
    events = (lost(10, 0), back(20, 0), lost(20, 1))

    found = intervals(cluster, Trace(events=events), math.inf)
    (whole,) = intervals(cluster, Trace(events=()), 7.0)
    (changed,) = intervals(cluster, Trace(events=(links_have(0, INTER, 0.5),)), 7.0)

    assert [interval.hosts for interval in found] == [(0, 1), (1,), (0,)]
    assert found[1].cluster == found[2].cluster
    assert (whole.from_s, whole.to_s, whole.cluster, whole.events) == (0, 7, cluster, ())
    assert changed.cluster == after(cluster, links_have(0, INTER, 0.5)) != cluster


# What cannot be

SLOW = SlowPair(first_host=0, second_host=1, share=0.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: links_have(0, INTER, 0.0), "a share is above 0 and at most 1"),
        (lambda: links_have(0, (2, 2), 0.5), "two hosts ascend"),
        (lambda: links_have(0, (0, 1, 2), 0.5), "of one host or of two"),
        (lambda: Trace(events=(lost(2, 0), back(1, 0))), "events ascend in time"),
        (lambda: Trace(events=(lost(math.nan, 0),)), "an event has a time"),
        (lambda: after(find_cluster("dgx-h100", 1), lost(0, 0)), "some host is always there"),
        (lambda: after(find_cluster("dgx-h100", 2), links_have(0, (0, 2), 0.5)), "names some of 2 hosts"),
        (lambda: intervals(find_cluster("dgx-h100", 2), Trace(events=()), 0.0), "time goes on"),
        (lambda: after(replace(find_cluster("dgx-h100", 2), slow_pairs=(SLOW,))), "begins with the nominal cluster"),
    ],
)
def test_what_no_trace_file_can_say_is_our_bug(make, words):
    """Events that a file could not hold, or of another cluster, are assertions."""
    with pytest.raises(AssertionError, match=words):
        make()
