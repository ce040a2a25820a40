"""Links between the single devices of a cluster."""

from dataclasses import replace

import pytest

from hardware.cluster_file import find_cluster
from hardware.link import Link
from tuner.place.operators.device_links import device_links
from tuner.planners.scheduling.problem import ports_of, ways_over

SLOW, FAST = (find_cluster(name).groups[0] for name in ("v100-pcie", "dgx-h100"))


def cluster(*groups, **changes):
    """Return a cluster of two devices of each of these groups of hosts."""
    return replace(
        find_cluster("dgx-h100"),
        groups=tuple(replace(group, name=str(at), devices_per_host=2) for at, group in enumerate(groups)),
        **changes,
    )


def between(links, source, target):
    """Return the links from one device to another."""
    return [link for link in links if (link.source, link.target) == (source, target)]


def test_a_link_between_unlike_hosts_is_that_of_the_slower_one():
    """Between an H100 and a V100 data travel as between two V100, in both directions; inside hosts each has its own."""
    mixed = device_links(cluster(FAST, SLOW))
    (across,), (back,) = between(mixed, 0, 2), between(mixed, 3, 1)
    (alike,) = between(device_links(cluster(SLOW, SLOW)), 0, 2)
    (fast,), (slow,) = between(mixed, 0, 1), between(mixed, 2, 3)

    assert across.link == back.link == alike.link
    assert fast.link.bandwidth_bytes_per_s > slow.link.bandwidth_bytes_per_s > across.link.bandwidth_bytes_per_s


def test_devices_send_through_one_adapter_and_receive_through_one():
    """All links of a device to other hosts pass its sending port and the receivers' ports, others than inside hosts."""
    links = device_links(cluster(SLOW, SLOW))
    to_both = [one.ports for target in (2, 3) for one in between(links, 0, target)]

    assert to_both == [((0, "nic 0 out"), (2, "nic 0 in")), ((0, "nic 0 out"), (3, "nic 0 in"))]
    assert between(links, 0, 1)[0].ports == ((0, "host link 0 out"), (1, "host link 0 in"))
    assert len(ports_of(links)) == 4 * 2 * 2


def test_a_mesh_has_a_wire_for_each_pair_with_its_part_of_the_bandwidth():
    """On a full mesh of three peers, a pair has a third of the bandwidth and no port that others pass."""
    wire = replace(SLOW.intra_links[0], mesh_peers=3)
    mesh = replace(SLOW, intra_links=(wire,))
    (alone,), (switched,) = (between(device_links(cluster(group)), 0, 1) for group in (mesh, SLOW))

    assert alone.ports == ()
    assert alone.link.bandwidth_bytes_per_s == pytest.approx(switched.link.bandwidth_bytes_per_s / 3)


def test_links_between_groups_are_no_wider_than_the_adapters():
    """A link between groups replaces the adapters', limited by what they carry."""
    wide = Link(kind="ethernet", bandwidth_bytes_per_s=1e12, latency_s=1e-5)
    narrow = replace(wide, bandwidth_bytes_per_s=1e8)
    links = device_links(cluster(SLOW, FAST, inter_group_links=(wide, narrow)))
    first, second = between(links, 0, 2)
    most = sum(link.bandwidth_bytes_per_s for link in SLOW.nic_links)

    assert 0 < first.link.bandwidth_bytes_per_s <= most
    assert second.link.bandwidth_bytes_per_s <= 1e8
    assert [one.ports[0] for one in (first, second)] == [(0, "group link 0 out"), (0, "group link 1 out")]


def test_stated_links_have_the_port_that_they_name():
    """A stated link with a port shares it with the other links of its devices of that name; else it is a wire."""
    link = Link(kind="pcie", bandwidth_bytes_per_s=1e9, latency_s=1e-6, exclusive_group="a")
    links = device_links(cluster(SLOW), [((1, 0), link, "bridge"), ((0, 1), link, None)])
    ways = ways_over(links)

    assert [one.ports for one in between(links, 0, 1)] == [((0, "bridge out"), (1, "bridge in")), ()]
    assert [way.links for way in ways[1, 0]] == [(2,), (3,)]
