from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.link import Link, combine_links, is_misspelt_kind, link_kind, link_spellings


def link(bandwidth, *, latency_s=1e-6, exclusive_group=None, mesh_peers=None, kind="test", efficiency=None):
    """A link with what a test does not care about filled in."""
    return Link(
        kind=kind,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=latency_s,
        exclusive_group=exclusive_group,
        mesh_peers=mesh_peers,
        efficiency=efficiency,
    )


links = st.builds(
    link,
    st.floats(1e6, 1e12),
    latency_s=st.floats(0, 1e-4),
    exclusive_group=st.sampled_from([None, "a", "b"]),
    mesh_peers=st.sampled_from([None, 1, 3, 7]),
    kind=st.sampled_from(["test", *link_spellings()]),
    efficiency=st.sampled_from([None, 0.3, 1.0]),
)


def test_the_best_of_each_group_adds_to_the_free_links():
    """Of links that exclude each other the widest counts, and free links add up; the widest gives the latency."""
    nvlink = link(450e9, exclusive_group="peer", kind="nvlink4", latency_s=3e-6)
    others = (link(64e9, exclusive_group="peer"), link(5e9, exclusive_group="b", latency_s=9e-6), link(1e9))

    best = combine_links((*others, nvlink))

    assert best.bandwidth_bytes_per_s == pytest.approx(456e9)
    assert (best.kind, best.latency_s) == ("nvlink4+test+test", 3e-6)


@pytest.mark.parametrize(("members", "share"), [(2, 1 / 7), (4, 3 / 7), (16, 1)])
def test_a_full_mesh_gives_small_groups_their_wires_only(members, share):
    """On a mesh with 7 peers, m devices use m - 1 of each device's 7 wires."""
    assert link(196e9, mesh_peers=7).among(members).bandwidth_bytes_per_s == pytest.approx(196e9 * share)


@given(st.lists(links, min_size=1, max_size=6), links, st.integers(2, 16))
def test_another_link_never_narrows_the_whole(parallel, extra, members):
    """Adding a link never lowers the bandwidth, and no set carries more than the sum of its links."""
    before = combine_links(tuple(parallel), members=members).bandwidth_bytes_per_s
    after = combine_links((*parallel, extra), members=members).bandwidth_bytes_per_s

    assert before * (1 - 1e-12) <= after
    assert after <= sum(one.bandwidth_bytes_per_s for one in (*parallel, extra)) * (1 + 1e-12)


@pytest.mark.parametrize("name", link_spellings())
def test_no_kind_carries_more_than_its_wires(name):
    """Every kind reaches a part of its nominal bandwidth, short messages a smaller part, and nothing is free."""
    kind = link_kind(name)

    assert 0 < kind.short_efficiency < kind.efficiency < 1
    assert 0 < kind.base_s <= kind.long_base_s
    assert kind.long_hops >= 1
    assert kind.tree_efficiency <= 1
    assert (kind.wide_efficiency or kind.efficiency) <= kind.efficiency <= kind.hop_efficiency < 1
    assert (kind.reduce_efficiency or 0) < kind.efficiency


def test_a_kind_has_spellings():
    """A study may spell a kind in its own way; one that nobody has described is `other`."""
    written = ("IB", "NVLink 4", "pcie5", "Omni_Path", "zip line")

    assert [*map(link_kind, written)] == [*map(link_kind, ("infiniband", "nvlink4", "pcie", "omni-path", "other"))]


def test_parallel_links_reach_what_each_reaches():
    """NVLink beside PCIe reaches the sum of what both reach alone, and waits like NVLink."""
    nvlink, pcie = link(450e9, kind="nvlink4"), link(64e9, kind="pcie5", latency_s=9e-6)

    both = combine_links((pcie, nvlink))

    assert 1 / both.cost().long_s_per_byte == pytest.approx(
        1 / nvlink.cost().long_s_per_byte + 1 / pcie.cost().long_s_per_byte
    )
    assert both.cost().long_base_s == nvlink.cost().long_base_s
    assert both.cost().short_hop_s == nvlink.latency_s


@given(links, st.floats(1.0, 10.0), st.integers(2, 16))
def test_a_wider_link_costs_no_more(one, times, members):
    """More bandwidth raises no field of what a link costs, and changes no latency."""
    narrow = replace(one, exclusive_group=None, mesh_peers=None)
    wider = replace(narrow, bandwidth_bytes_per_s=one.bandwidth_bytes_per_s * times)

    assert all(w <= n * (1 + 1e-12) for w, n in zip(wider.cost(members), narrow.cost(members), strict=True))
    assert wider.cost(members)[:4] == narrow.cost(members)[:4]


@pytest.mark.parametrize("kind", ["infinband", "InfiniBnd", "nvlnk", "etherent", "slingshott", "neuron-lnk"])
def test_misspelt_kinds_are_found(kind):
    """A slip of a letter in a kind of link is no kind of one's own."""
    assert is_misspelt_kind(kind)


@pytest.mark.parametrize(
    "kind", [*link_spellings(), "nvlink7", "PCIe-7", "my fabric", "photonic", "x", "NV Link 4", "ua"]
)
def test_other_kinds_are_ones_own(kind):
    """Known spellings, later generations, and names of one's own are no slips."""
    assert not is_misspelt_kind(kind)
