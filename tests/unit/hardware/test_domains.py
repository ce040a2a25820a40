"""Domains of several hosts: which links groups of ranks cross, and what stays of a domain that loses hosts."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hardware.cluster import Cluster
from hardware.cluster_file import cluster_from_mapping
from hardware.dynamics import HostEvent, LinkEvent, Trace, cluster_at
from hardware.host_group import HostGroup, SlowPair
from hardware.io.errors import ConfigError
from hardware.link import Link, combine_links

INSIDE = Link(kind="nvlink4", bandwidth_bytes_per_s=9e11, latency_s=1e-6)
OUTSIDE = Link(kind="infiniband", bandwidth_bytes_per_s=5e10, latency_s=4e-6)


def racks(hosts: int, per_domain: int, devices: int = 2, sharers: int = 1) -> Cluster:
    """Hosts in domains; all devices of a host may share one adapter."""
    gb200 = cluster_from_mapping({"device": "GB200"}, Path()).devices[0]
    group = HostGroup(
        name="rack",
        device=gb200,
        hosts=hosts,
        devices_per_host=devices,
        intra_links=(INSIDE,),
        nic_links=(replace(OUTSIDE, sharers=sharers),),
        hosts_per_domain=per_domain,
    )
    return Cluster(name="rack", groups=(group,))


def domain_of_rank(sizes, devices):
    """The domain of every rank, from the number of hosts of each domain."""
    return [number for number, size in enumerate(sizes) for _ in range(size * devices)]


def groups_of(ranks, stride, size):
    """All groups {base + i * stride, i < size} of a list of ranks."""
    return [[ranks[base + i * stride] for i in range(size)] for base in range(len(ranks)) if base // stride % size == 0]


def oracle(groups, domain):
    """Sizes of the worst of some groups, and whether any crosses links inside domains, and between them."""
    parts = [
        [[domain[rank] for rank in group].count(one) for one in {domain[rank] for rank in group}] for group in groups
    ]
    members = list(itertools.chain(*parts))
    crosses_inside = any(count > 1 for count in members)
    crosses_outside = any(len(part) > 1 for part in parts)
    return [max(map(len, parts)), min(members), max(members)], crosses_inside, crosses_outside


def told(found, row):
    """The same of one entry of the answer, whose costs are zero where a link is not crossed."""
    kinds, at = found.kinds, found.row[row]
    sizes = [kinds.domains[at], kinds.members_per_domain[at], kinds.max_members_per_domain[at]]
    return sizes, kinds.intra.long_s_per_byte[at] > 0, kinds.inter.long_s_per_byte[at] > 0


def pairs_of(count):
    """All strides and sizes of groups that tile so many ranks, of more than one rank."""
    divisors = [one for one in range(1, count + 1) if count % one == 0]
    return [(stride, size) for stride in divisors for size in divisors[1:] if count % (stride * size) == 0]


SHAPES = [
    # hosts, most hosts of a domain, hosts of each domain
    (1, 3, (1,)),
    (3, 3, (3,)),
    (4, 3, (2, 2)),
    (6, 3, (3, 3)),
    (5, 3, (3, 2)),
    (7, 3, (3, 2, 2)),
    (8, 3, (2, 2, 2, 2)),
    (6, 1, (1,) * 6),
]


@pytest.mark.parametrize(("hosts", "most", "sizes"), SHAPES)
def test_groups_cross_the_links_that_their_members_need(hosts, most, sizes):
    """Every group of every stride and size: inside a domain by its links, between domains by adapters."""
    cluster = racks(hosts, most)
    domain = domain_of_rank(sizes, 2)
    pairs = pairs_of(cluster.num_devices)

    stride, size = np.array(pairs).T
    found = cluster.group_links(stride, size)

    assert cluster.rank_domain().tolist() == domain
    for row, (one_stride, one_size) in enumerate(pairs):
        groups = groups_of(range(cluster.num_devices), one_stride, one_size)
        assert told(found, row) == oracle(groups, domain), (one_stride, one_size)


@pytest.mark.parametrize(("hosts", "most", "sizes"), SHAPES)
def test_groups_inside_stages_and_between_them(hosts, most, sizes):
    """For all stages: groups of one stage, messages to the next stage, and those between the two ends."""
    cluster = racks(hosts, most)
    domain, ranks = domain_of_rank(sizes, 2), range(cluster.num_devices)
    for length in (one for one in range(1, len(ranks)) if len(ranks) % one == 0):
        stages = [ranks[first : first + length] for first in range(0, len(ranks), length)]
        ends = cluster.end_links(np.array([length]))
        between = cluster.stage_links(np.array([length]))
        pairs = pairs_of(length)

        assert told(ends, 0) == oracle(list(zip(stages[0], stages[-1], strict=True)), domain)
        for at, (one, other) in enumerate(itertools.pairwise(stages)):
            kind = between.kinds[between.of_boundary[len(stages)][at]]
            assert told(kind, 0) == oracle(list(zip(one, other, strict=True)), domain)
        for number, stage in enumerate(stages if pairs else ()):
            stride, size = np.array(pairs).T
            inside = cluster.links_of_stages(stride, size, length, [(number,)])
            for row, (one_stride, one_size) in enumerate(pairs):
                expected = oracle(groups_of(stage, one_stride, one_size), domain)
                assert told(replace(inside, row=inside.row[0]), row) == expected, (number, one_stride, one_size)


def test_a_domain_that_loses_a_host_keeps_the_others():
    """Whatever host is lost, the others stay in the domains in which they are, and so do hosts in another order."""
    cluster = racks(6, 3)
    for lost in range(6):
        left = [host for host in range(6) if host != lost]

        now = cluster_at(cluster, Trace(events=(HostEvent(time_s=1, host=lost, is_lost=True),)), 2)

        assert now.host_domain().tolist() == [host // 3 for host in left]
        assert cluster.reordered(left) == now
    for order in itertools.permutations(range(6), 4):
        numbers = {domain: number for number, domain in enumerate(dict.fromkeys(host // 3 for host in order))}
        reordered = cluster.reordered(order)
        assert reordered.host_domain().tolist() == [numbers[host // 3] for host in order]
        domain = reordered.rank_domain().tolist()
        pairs = pairs_of(8)
        stride, size = np.array(pairs).T
        found = reordered.group_links(stride, size)
        for row, pair in enumerate(pairs):
            assert told(found, row) == oracle(groups_of(range(8), *pair), domain)


def test_a_slow_adapter_splits_the_group_and_not_the_domain():
    """A host with a slow adapter still reaches its domain at full speed; groups that leave it are as slow as it is."""
    cluster = racks(6, 3)

    slow = cluster_at(cluster, Trace(events=(LinkEvent(time_s=1, link=(1,), share=0.5),)), 2)

    assert [group.hosts for group in slow.groups] == [1, 1, 4]
    assert slow.host_domain().tolist() == cluster.host_domain().tolist()
    for stride, size, factor in ((1, 6, 1.0), (6, 2, 2.0)):
        before, after = (each.group_links(np.array([stride]), np.array([size])).kinds for each in (cluster, slow))
        assert after.intra.long_s_per_byte[0] == before.intra.long_s_per_byte[0]
        assert after.inter.long_s_per_byte[0] == factor * before.inter.long_s_per_byte[0]


@pytest.mark.parametrize(("pair", "inside", "outside"), [((0, 1), 4.0, 1.0), ((0, 3), 1.0, 4.0)])
def test_a_slow_path_is_that_of_the_links_that_it_takes(pair, inside, outside):
    """Between two hosts of a domain it slows the links inside, between two domains the adapters."""
    cluster = racks(6, 3)
    slow = replace(cluster, slow_pairs=(SlowPair(first_host=pair[0], second_host=pair[1], share=0.25),))

    before, after = (each.group_links(np.array([1]), np.array([12])).kinds for each in (cluster, slow))

    assert after.intra.long_s_per_byte[0] == inside * before.intra.long_s_per_byte[0]
    assert after.pair.hop_s_per_byte[0] == inside * before.pair.hop_s_per_byte[0]
    assert after.inter.long_s_per_byte[0] == outside * before.inter.long_s_per_byte[0]


@pytest.mark.parametrize(("stride", "size", "senders"), [(4, 3, 2), (2, 6, 2), (1, 12, 1), (1, 4, 0)])
def test_the_devices_of_a_host_share_its_adapter(stride, size, senders):
    """Adapters belong to hosts: of two devices behind one, those count whose next member is in another domain."""
    cluster = racks(6, 2, sharers=2)
    own = combine_links(cluster.groups[0].nic_links).cost()

    kinds = cluster.group_links(np.array([stride]), np.array([size])).kinds

    assert kinds.hop.hop_s_per_byte[0] == pytest.approx(own.hop_s_per_byte * senders / 2)


def test_domains_are_few_and_of_equal_size_where_they_can_be():
    """Hosts fill as few domains as can be, or up to twice as many of equal size."""
    for hosts in range(1, 200):
        sizes = racks(hosts, 18).groups[0].domain_sizes
        fewest = math.ceil(hosts / 18)

        assert sum(sizes) == hosts
        assert max(sizes) <= 18
        assert len(sizes) == next((count for count in range(fewest, 2 * fewest + 1) if hosts % count == 0), fewest)
        assert max(sizes) - min(sizes) <= 1
    assert racks(64, 18).groups[0].domain_sizes == (16,) * 4


def test_racks_by_their_hosts_and_by_their_domains():
    """Four devices are a host of a rack, more are a part of it as before there were domains of several hosts."""

    def spelled(**keys):
        return cluster_from_mapping({"name": "gb200-nvl72", **keys}, Path())

    launched, as_before = spelled(hosts=64, devices_per_host=4), spelled(hosts=4, devices_per_host=64)

    assert (launched.num_hosts, launched.devices_per_host) == (64, 4)
    assert launched.rank_domain().tolist() == as_before.rank_domain().tolist() == as_before.rank_host().tolist()
    assert launched.devices_per_domain == as_before.devices_per_domain == 64
    assert spelled().num_devices == spelled(hosts=18, devices_per_host=4).devices_per_domain == 72
    assert spelled(hosts=4, devices_per_host=4, hosts_per_domain=1).devices_per_domain == 4
    assert spelled(hosts=64, hosts_per_domain=16) == spelled(hosts=64, devices_per_host=4, hosts_per_domain=16)
    with pytest.raises(ConfigError, match=r"hosts_per_domain = 19: .* a gb200-nvl72 domain has 72; use at most 18"):
        spelled(hosts=64, devices_per_host=4, hosts_per_domain=19)


def test_more_hosts_fill_the_domains_anew():
    """Another number of hosts is cut into domains of its own."""
    cluster = cluster_from_mapping({"name": "gb200-nvl72", "hosts": 1, "devices_per_host": 4}, Path())

    assert cluster.num_domains == 1
    assert cluster.with_hosts(18).devices_per_domain == 72
    assert cluster.with_hosts(64).num_domains == 4
    assert cluster.with_hosts(64).reordered(range(1, 64)).with_hosts(32).num_domains == 2
