import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.link import Link, combined


def link(bandwidth, *, latency_s=1e-6, exclusive_group=None, mesh_peers=None, kind="test"):
    """A link with what a test does not care about filled in."""
    return Link(
        kind=kind,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=latency_s,
        exclusive_group=exclusive_group,
        mesh_peers=mesh_peers,
    )


links = st.builds(
    link,
    st.floats(1e6, 1e12),
    latency_s=st.floats(0, 1e-4),
    exclusive_group=st.sampled_from([None, "a", "b"]),
    mesh_peers=st.sampled_from([None, 1, 3, 7]),
)


def test_independent_links_add_up():
    """Links without an exclusive group carry one transfer together."""
    assert combined((link(100e9), link(50e9))).bandwidth_bytes_per_s == pytest.approx(150e9)


def test_exclusive_links_do_not_add_up():
    """Of NVLink and PCIe, which exclude each other, only the wider one counts."""
    nvlink = link(450e9, exclusive_group="peer", kind="nvlink4")
    pcie = link(64e9, exclusive_group="peer", kind="pcie5")

    best = combined((pcie, nvlink))

    assert best.bandwidth_bytes_per_s == 450e9
    assert best.kind == "nvlink4"


def test_the_best_of_each_group_adds_to_the_free_links():
    """Two exclusive groups and one free link give the best of each group and the free link."""
    parallel = (link(10e9, exclusive_group="a"), link(20e9, exclusive_group="a"), link(5e9, exclusive_group="b"))

    assert combined((*parallel, link(1e9))).bandwidth_bytes_per_s == pytest.approx(26e9)


def test_a_short_message_takes_the_widest_link():
    """The latency of combined links is that of the widest one."""
    assert combined((link(1e9, latency_s=9e-6), link(2e9, latency_s=3e-6))).latency_s == 3e-6


@pytest.mark.parametrize(("members", "share"), [(2, 1 / 7), (4, 3 / 7), (8, 1), (16, 1)])
def test_a_full_mesh_gives_small_groups_their_wires_only(members, share):
    """On a mesh with 7 peers, m devices use m - 1 of each device's 7 wires."""
    assert link(196e9, mesh_peers=7).among(members).bandwidth_bytes_per_s == pytest.approx(196e9 * share)


@given(st.lists(links, min_size=1, max_size=6), links, st.integers(2, 16))
def test_another_link_never_narrows_the_whole(parallel, extra, members):
    """Adding a link never lowers the bandwidth, and no set carries more than the sum of its links."""
    before = combined(tuple(parallel), members=members).bandwidth_bytes_per_s
    after = combined((*parallel, extra), members=members).bandwidth_bytes_per_s

    assert before * (1 - 1e-12) <= after
    assert after <= sum(one.bandwidth_bytes_per_s for one in (*parallel, extra)) * (1 + 1e-12)
