import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.cluster import Cluster
from hardware.cluster_file import cluster_from_mapping, cluster_names, find_cluster, read_described_cluster
from hardware.collectives import send_recv_s
from hardware.device import find_device
from hardware.group_links import GroupLinks
from hardware.host_group import SlowPair
from hardware.io.errors import ConfigError
from hardware.link import LinkCost, combine_links, link_kind
from tests.support.settings.random_clusters import clusters, reordered_clusters, slowed_clusters

NO_COST = [0.0] * len(LinkCost._fields)


def brute_force(cluster: Cluster, stride: int, size: int) -> tuple[list[int], list[list[float]]]:
    """The sizes and the three costs of GroupKinds, each the worst over all groups, from plain loops over ranks."""
    hosts_in_order = [
        (group, network)
        for group, network in zip(cluster.groups, cluster.networks or range(len(cluster.groups)), strict=True)
        for _ in range(group.hosts)
    ]
    domains = domains_of(cluster)
    place = [
        (group, (network, host, domains[host]))
        for host, (group, network) in enumerate(hosts_in_order)
        for _ in range(group.devices_per_host)
    ]
    spanned, counts, intra, pair, inter = [], [], [], [], []
    for base in range(cluster.num_devices):
        if base // stride % size:
            continue  # not the first member of its group
        members = [place[base + i * stride] for i in range(size)]
        in_domain = {at: [kind for kind, (_, _, own) in members if own == at] for _, (_, _, at) in members}
        spanned.append(len(in_domain))
        counts += [len(kinds) for kinds in in_domain.values()]
        slow = slow_shares(cluster, {host for _, (_, host, _) in members}, domains)
        for at, kinds in in_domain.items():
            if len(kinds) > 1:
                every = combine_links(kinds[0].intra_links, members=len(kinds)).cost(len(kinds))
                two = combine_links(kinds[0].intra_links, members=2).cost()
                intra += [slowed(every, share) for share in (1.0, *slow.get(at, []))]
                pair += [slowed(two, share) for share in (1.0, *slow.get(at, []))]
        if len(in_domain) > 1:
            links = [combine_links(kind.nic_links) for kind, _ in members]
            if len({network for _, (network, _, _) in members}) > 1 and cluster.inter_group_links:
                links.append(combine_links(cluster.inter_group_links))
            inter += [link.cost() for link in links]
            inter += slow_costs(cluster, members)
    worst = [[max(column) for column in zip(*costs, strict=True)] or NO_COST for costs in (intra, pair, inter)]
    return [size, max(spanned), min(counts), max(counts)], worst


def domains_of(cluster: Cluster) -> list[int]:
    """The domain of every host: the cluster's own numbers, or neighbours of each group in parts of equal size."""
    if cluster.domains:
        return list(cluster.domains)
    found: list[int] = []
    for group in cluster.groups:
        fewest = (group.hosts + group.hosts_per_domain - 1) // group.hosts_per_domain
        parts = [count for count in range(fewest, 2 * fewest + 1) if group.hosts % count == 0] or [fewest]
        least, larger = divmod(group.hosts, parts[0])
        for part in range(parts[0]):
            found += [found[-1] + 1 if found else 0] * (least + (part < larger))
    return found


def slowed(cost, share) -> list[float]:
    """The costs of a link with a share of its bandwidth."""
    return [one / share if "per_byte" in field else one for field, one in zip(cost._fields, cost, strict=True)]


def slow_shares(cluster, hosts, domains) -> dict[int, list[float]]:
    """Shares of the slow pairs inside each domain that have both of their hosts among these."""
    found: dict[int, list[float]] = {}
    for pair in cluster.slow_pairs:
        if {pair.first_host, pair.second_host} <= hosts and domains[pair.first_host] == domains[pair.second_host]:
            found.setdefault(domains[pair.first_host], []).append(pair.share)
    return found


def slow_costs(cluster, members) -> list[list[float]]:
    """What each slow pair among these hosts costs between domains."""
    at = {host: (combine_links(kind.nic_links).cost(), network, domain) for kind, (network, host, domain) in members}
    found = []
    for pair in cluster.slow_pairs:
        if at.keys() >= {pair.first_host, pair.second_host}:
            (nic, network, domain), (other_nic, other_network, other_domain) = at[pair.first_host], at[pair.second_host]
            if domain == other_domain:
                continue
            links = [nic, other_nic]
            if network != other_network and cluster.inter_group_links:
                links.append(combine_links(cluster.inter_group_links).cost())
            found.append(slowed(LinkCost(*map(max, zip(*links, strict=True))), pair.share))
    return found


def sizes_of(found: GroupLinks, row: int) -> list[int]:
    """The sizes of one entry."""
    kinds, at = found.kinds, found.row[row]
    return [kinds.size[at], kinds.domains[at], kinds.members_per_domain[at], kinds.max_members_per_domain[at]]


def costs_of(found: GroupLinks, row: int) -> list[list[float]]:
    """What the three links of one entry cost."""
    kinds, at = found.kinds, found.row[row]
    return [[getattr(link, field)[at] for field in LinkCost._fields] for link in (kinds.intra, kinds.pair, kinds.inter)]


def divisor_pairs(count):
    """All (stride, size) whose product divides `count`."""
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    return [(stride, size) for stride in divisors for size in divisors if count % (stride * size) == 0]


def ask(cluster, pairs) -> GroupLinks:
    """The links of many (stride, size) pairs."""
    stride, size = np.array(pairs).T
    return cluster.group_links(stride, size)


@given(st.one_of(clusters, slowed_clusters(), reordered_clusters()))
def test_group_links_agree_with_brute_force(cluster):
    """For every stride and size, on any hosts, networks and slow pairs, the fields are those of plain loops."""
    pairs = divisor_pairs(cluster.num_devices)

    found = ask(cluster, pairs)

    for row, (stride, size) in enumerate(pairs):
        sizes, costs = brute_force(cluster, stride, size)
        assert sizes_of(found, row) == sizes, (stride, size)
        assert costs_of(found, row) == costs, (stride, size)


def test_a_slow_pair_joins_two_of_the_hosts():
    """Who loses hosts and forgets to number the pairs anew is told so."""
    pair = SlowPair(first_host=1, second_host=3, share=0.5)

    with pytest.raises(AssertionError, match="joins two of the hosts"):
        replace(find_cluster("dgx-h100", 3), slow_pairs=(pair,))


@given(clusters)
@settings(max_examples=40)
def test_a_cluster_hashes_pickles_and_counts(cluster):
    """A cluster is a value: equal after pickling, hashable, its arrays as long as its devices are many."""
    copy = pickle.loads(pickle.dumps(cluster))  # noqa: S301 our own bytes

    assert copy == cluster
    assert hash(copy) == hash(cluster)
    assert len(cluster.rank_host()) == len(cluster.rank_device_index()) == cluster.num_devices
    assert cluster.rank_host().max() == cluster.num_hosts - 1
    assert cluster.memory_bytes == min(device.memory_bytes for device in cluster.devices)


def test_unlike_hosts_and_their_link():
    """A group over two kinds of hosts is bound by the slower NIC and by the link between the kinds."""
    mapping = {
        "groups": [{"device": "V100-SXM-32", "hosts": 1}, {"device": "RTX3090", "hosts": 1, "name": "desk"}],
        "inter_group_links": [{"kind": "ethernet", "bandwidth_gb_per_s": 0.5, "latency_us": 30}],
    }
    cluster = cluster_from_mapping(mapping, Path())

    found = ask(cluster, [(1, 8), (8, 2)])
    inside, across = costs_of(found, 0), costs_of(found, 1)

    assert [group.name for group in cluster.groups] == ["V100-SXM-32", "desk"]
    assert inside[0] == [max(pair) for pair in zip(*(g.intra_links[0].cost(8) for g in cluster.groups), strict=True)]
    assert inside[2] == across[0] == NO_COST
    assert across[2][LinkCost._fields.index("long_s_per_byte")] == cluster.inter_group_links[0].cost().long_s_per_byte
    assert across[2][LinkCost._fields.index("short_hop_s")] == pytest.approx(30e-6)


def test_take_gathers_rows():
    """`take` selects entries by index and by mask, and no question has no answer."""
    found = ask(find_cluster("dgx-h100", 2), [(1, 2), (1, 8), (8, 2)])
    empty = np.array([], dtype=np.int64)

    assert found.take(np.array([2, 0])).size.tolist() == [2, 2]
    assert found.take(np.array([2, 0])).domains.tolist() == [2, 1]
    assert sizes_of(found.take(found.domains > 1), 0) == [2, 2, 1, 1]
    assert find_cluster("dgx-h100").group_links(empty, empty).domains.tolist() == []


def test_groups_tile_the_ranks():
    """A stride and size whose product does not divide the ranks is our bug, not an answer."""
    with pytest.raises(AssertionError, match="divides 8 ranks"):
        ask(find_cluster("dgx-h100"), [(1, 3)])


def test_every_catalog_cluster_resolves():
    """Every name of the catalog, those in the docs among them, is a cluster with hosts times one host's devices."""
    documented = "ascend-910b dgx-a100 dgx-h100 dgx-h200 dgx-b200 gb200-nvl72 p5-h100 v100-pcie rtx4090d l20 tpu-v3"

    for name in {*documented.split(), *cluster_names()}:
        cluster = find_cluster(name, 3)
        assert cluster.name == name
        assert cluster.num_devices == 3 * cluster.devices_per_host
    assert find_cluster("gb200-nvl72").num_devices == 72
    assert find_cluster("ascend-a3").num_devices == find_cluster("atlas-900-a3").num_devices == 16
    assert find_cluster("p5-h100").groups[0].nic_links[0].bandwidth_bytes_per_s == 8 * 50e9 / 8


def test_a_device_makes_a_cluster():
    """Hosts of a device, or the devices of them that a job uses, have the catalog's links unless others are given."""
    mapping = {"device": "h100", "hosts": 2, "devices_per_host": 4}
    nic = {"kind": "roce", "bandwidth_gb_per_s": 12.5, "latency_us": 6, "exclusive_group": "nic"}

    plain = cluster_from_mapping(mapping, Path())
    part = cluster_from_mapping({"name": "DGX H100", "hosts": 2, "devices_per_host": 4}, Path())
    own_nic = cluster_from_mapping({**mapping, "nic_links": [nic, nic]}, Path())

    assert plain.num_devices == part.num_devices == 8
    assert plain.groups[0].nic_links == (find_device("H100").scale_out,)
    assert costs_of(ask(own_nic, [(4, 2)]), 0)[2] == list(own_nic.groups[0].nic_links[0].cost())
    assert own_nic.groups[0].nic_links[0].bandwidth_bytes_per_s == 12.5e9


def test_a_name_may_be_that_of_a_device():
    """Where no cluster has the name, it is that of a device, in any of its spellings."""
    named, device = (cluster_from_mapping({key: "H100 80GB", "hosts": 2}, Path()) for key in ("name", "device"))

    assert named == device
    assert named.name == "H100-SXM-80"


def test_a_user_may_know_what_a_link_reaches():
    """`efficiency` of a link in a study replaces the kind's; without it the kind's counts."""
    nic = {"kind": "ib", "bandwidth_gb_per_s": 25, "latency_us": 4}
    plain, own = (
        cluster_from_mapping({"device": "A100", "nic_links": [link]}, Path()).groups[0].nic_links[0]
        for link in (nic, nic | {"efficiency": 0.5})
    )

    assert plain.cost().long_s_per_byte == pytest.approx(1 / (25e9 * link_kind("infiniband").efficiency))
    assert own.cost().long_s_per_byte == pytest.approx(1 / (25e9 * 0.5))


def test_a_cluster_file_is_relative_to_the_study(tmp_path):
    """`file` is found beside the study, and mistakes in it name the file."""
    (tmp_path / "good.yaml").write_text("name: dgx-a100\nhosts: 2\n")
    (tmp_path / "bad.yaml").write_text("name: dgx-a100\nhosts: -2\n")
    (tmp_path / "loop.yaml").write_text("file: loop.yaml\n")

    assert cluster_from_mapping({"file": "good.yaml"}, tmp_path) == find_cluster("dgx-a100", 2)
    for name, message in (("bad.yaml", "hosts = -2"), ("loop.yaml", "can't name another file"), ("no.yaml", "no such")):
        with pytest.raises(ConfigError, match=message) as caught:
            cluster_from_mapping({"file": name}, tmp_path, file="study.yaml")
        assert str(caught.value).startswith(str(tmp_path / name))


def test_a_cluster_may_name_a_trace(tmp_path):
    """`trace` is relative to the file that names it, changes no cluster, and one beside `file` wins over one inside."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "traced.yaml").write_text("name: dgx-a100\ntrace: a.csv\n")
    inside, plain = {"file": "inner/traced.yaml"}, find_cluster("dgx-a100")

    for mapping, trace in (
        ({"name": "dgx-a100"}, None),
        ({"name": "dgx-a100", "trace": None}, None),
        ({"name": "dgx-a100", "trace": "a.csv"}, tmp_path / "a.csv"),
        (inside, tmp_path / "inner" / "a.csv"),
        (inside | {"trace": "b.csv"}, tmp_path / "b.csv"),
    ):
        described = read_described_cluster(mapping, tmp_path)
        assert (described.cluster, described.trace) == (plain, trace)
        assert cluster_from_mapping(mapping, tmp_path) == plain
    groups = {"groups": [{"name": "dgx-a100"}], "trace": "a.csv"}
    assert read_described_cluster(groups, tmp_path).trace == tmp_path / "a.csv"


LINK = {"kind": "ib", "bandwidth_gb_per_s": 25, "latency_us": 4}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"name": "dgx-h10", "hosts": 8}, "name = 'dgx-h10': is not a known cluster; did you mean 'dgx-h100'"),
        ({"name": "dgx-h100", "hosts": 0}, "hosts = 0: must be greater than or equal to 1"),
        ({"name": "dgx-h100", "hosts": True}, "hosts = True: must be a whole number"),
        ({"name": "dgx-h100", "devices_per_host": 9}, "devices_per_host = 9: a dgx-h100 host has 8 devices; use at"),
        ({"name": "dgx-h100", "hosts": 500_000}, "hosts: makes 4000000 devices; at most 1000000"),
        ({"device": "H10O"}, "device = 'H10O': is not a known device; did you mean"),
        ({"device": "H100", "node": 3}, "node = 3: unknown key; "),
        ({"device": "H100", "intra_links": []}, "intra_links"),
        ({"device": "H100", "nic_links": [LINK | {"bandwidth_gb_per_s": -3}]}, "nic_links.0.bandwidth_gb_per_s = -3"),
        ({"device": "H100", "nic_links": [LINK | {"latency_us": float("nan")}]}, "nic_links.0.latency_us"),
        ({"device": "H100", "nic_links": [LINK | {"efficiency": 80}]}, "nic_links.0.efficiency = 80"),
        ({"groups": [{"device": "V100"}, {"device": "T5"}]}, "groups.1.device = 'T5'"),
        ({"groups": []}, "groups"),
        ({"groups": [{"device": "V100"}], "hosts": 2}, "hosts = 2: unknown key"),
        ({"groups": [{"device": "V100", "trace": "a.csv"}]}, "groups.0.trace: unknown key"),
        ({"device": "V100", "trace": 3}, "trace = 3: must be text"),
        ({"file": 3}, "file = 3"),
        ({}, "needs `name`, `device`, `groups` or `file`"),
    ],
)
def test_a_mistake_is_one_message(mapping, message, tmp_path):
    """Each mistake is one ConfigError that names the file, the key, the value and the rule."""
    with pytest.raises(ConfigError) as caught:
        cluster_from_mapping(mapping, tmp_path, file="study.yaml")

    assert str(caught.value).startswith(f"study.yaml: {message}")


def shared_hosts(hosts: int) -> Cluster:
    """Hosts of four devices behind one adapter of 4 GB/s."""
    nic = {"kind": "test", "bandwidth_gb_per_s": 1, "latency_us": 1, "sharers": 4}
    return cluster_from_mapping({"device": "T4-16", "hosts": hosts, "nic_links": [nic]}, Path())


@pytest.mark.parametrize(("stride", "size", "sharers"), [(8, 2, 4), (2, 8, 2), (1, 16, 1), (1, 4, 0)])
def test_who_sends_alone_gets_the_whole_adapter(stride, size, sharers):
    """Of four devices behind an adapter only those whose next stage is on another host share it."""
    cluster = shared_hosts(4)
    kinds = ask(cluster, [(stride, size)]).kinds
    own = cluster.groups[0].nic_links[0].cost()

    assert kinds.hop.hop_s_per_byte[0] == pytest.approx(own.hop_s_per_byte * sharers / 4)
    assert kinds.hop.long_hop_s[0] == (own.long_hop_s if sharers else 0)
    assert kinds.inter.long_s_per_byte[0] == (own.long_s_per_byte if sharers else 0)


@pytest.mark.parametrize(("length", "hosts", "sharers"), [(1, 2, 1), (2, 2, 2), (8, 2, 4)])
def test_the_ends_of_a_pipeline(length, hosts, sharers):
    """The first and the last ranks are pairs on two hosts, which share the adapters with nobody else."""
    cluster = shared_hosts(4)

    found = cluster.end_links(np.array([length, cluster.num_devices]))

    assert sizes_of(found, 0) == [2, hosts, 1, 1]
    own = cluster.groups[0].nic_links[0].cost()
    assert found.kinds.inter.long_s_per_byte[found.row[0]] == pytest.approx(own.long_s_per_byte * sharers / 4)
    assert sizes_of(found, 1) == [1, 1, 1, 1]


def test_an_uplink_slows_groups_across_switches_alone():
    """Four devices of 3 GB/s behind 4 GB/s get a third of that each; groups under one switch do not notice."""
    nic = {"kind": "infiniband", "bandwidth_gb_per_s": 3.0, "latency_us": 4}
    described = {"device": "A100-SXM-80", "devices_per_host": 2, "hosts": 4, "nic_links": [nic]}
    free = cluster_from_mapping(described, Path())
    narrow = cluster_from_mapping(described | {"switch": {"hosts": 2, "uplink_gb_per_s": 4}}, Path())
    pairs, all_hosts = (np.array([2]), np.array([2])), (np.array([2]), np.array([4]))
    size = 1e10

    assert send_recv_s(size, narrow.group_links(*pairs))[0] == send_recv_s(size, free.group_links(*pairs))[0]
    assert narrow.group_links(*pairs).switches.tolist() == [1]
    slowed = send_recv_s(size, narrow.group_links(*all_hosts))[0] / send_recv_s(size, free.group_links(*all_hosts))[0]
    assert slowed == pytest.approx(4 * 3 / 4, rel=0.01)


def test_hosts_keep_their_switches_in_any_order():
    """Reordering and resizing move switches with their hosts."""
    switch = {"hosts": 2, "uplink_gb_per_s": 100}
    cluster = cluster_from_mapping({"name": "dgx-h100", "hosts": 4, "switch": switch}, Path())

    assert cluster.switches == (0, 0, 1, 1)
    assert cluster.reordered((0, 2, 1, 3)).switches == (0, 1, 0, 1)
    assert cluster.with_hosts(6).switches == (0, 0, 1, 1, 2, 2)
