import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.cluster import GroupLinks, cluster_names, find_cluster
from hardware.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    ring_exchange_s,
    send_recv_s,
)

COLLECTIVES = (all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s, send_recv_s, ring_exchange_s)
MB = 1e6


def group_of(name: str, *, hosts: int, stride: int, size: int) -> GroupLinks:
    """The links of one kind of group on a catalog cluster."""
    return find_cluster(name, hosts).group_links(np.array([stride]), np.array([size]))


@st.composite
def groups(draw):
    """One group of a catalog cluster."""
    cluster = find_cluster(draw(st.sampled_from(cluster_names())), draw(st.sampled_from([1, 2, 3, 4, 8])))
    divisors = [d for d in range(1, cluster.num_devices + 1) if cluster.num_devices % d == 0]
    size = draw(st.sampled_from(divisors))
    stride = draw(st.sampled_from([d for d in divisors if cluster.num_devices % (d * size) == 0]))
    return cluster.group_links(np.array([stride]), np.array([size]))


@pytest.mark.parametrize("collective", COLLECTIVES)
@given(group=groups(), message_bytes=st.floats(0, 1e11), more=st.floats(0, 1e11))
@settings(max_examples=50, deadline=None)
def test_more_bytes_take_no_less_time(collective, group, message_bytes, more):
    """Time is finite, never negative, and never falls when the message grows."""
    short_s, long_s = collective(message_bytes, group), collective(message_bytes + more, group)

    assert np.all(np.isfinite(long_s))
    assert np.all(short_s >= 0)
    assert np.all(short_s <= long_s * (1 + 1e-12))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_group_of_one_takes_no_time(collective):
    """One rank has nobody to talk to."""
    assert collective(np.array([1e9]), group_of("dgx-h100", hosts=2, stride=1, size=1)).tolist() == [0.0]


@given(group=groups())
@settings(deadline=None)
def test_long_all_reduce_is_reduce_scatter_and_all_gather(group):
    """For long messages the ring wins, and an all-reduce costs what its two halves cost."""
    message_bytes = 1e14

    halves_s = reduce_scatter_s(message_bytes, group) + all_gather_s(message_bytes, group)

    assert all_reduce_s(message_bytes, group) == pytest.approx(halves_s, rel=1e-6)


@given(group=groups(), message_bytes=st.floats(0, 1e12))
@settings(deadline=None)
def test_all_reduce_is_never_slower_than_its_halves(group, message_bytes):
    """The tree can only help."""
    halves_s = reduce_scatter_s(message_bytes, group) + all_gather_s(message_bytes, group)

    assert np.all(all_reduce_s(message_bytes, group) <= halves_s * (1 + 1e-12))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "dgx-b200", "p5-h100", "v100-pcie", "l20", "gb200-nvl72"])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("message_bytes", [0.0, 1e3, MB, 1e9])
def test_crossing_hosts_is_never_faster(collective, name, size, message_bytes):
    """The same group takes at least as long when its members sit on hosts of their own, or on two hosts."""
    per_host = find_cluster(name).devices_per_host
    within_s = collective(message_bytes, group_of(name, hosts=size, stride=1, size=size))
    one_each_s = collective(message_bytes, group_of(name, hosts=size, stride=per_host, size=size))
    half_each_s = collective(message_bytes, group_of(name, hosts=2, stride=per_host * 2 // size, size=size))

    assert within_s <= half_each_s
    assert within_s <= one_each_s


def test_one_host_reaches_the_bus_bandwidth():
    """1 GB over eight H100s moves 2 * 7/8 GB through 450 GB/s, plus 14 hops."""
    group = group_of("dgx-h100", hosts=1, stride=1, size=8)

    assert all_reduce_s(1e9, group) == pytest.approx(2 * 7 / 8 * 1e9 / 450e9 + 14 * 1.9e-6)


def test_every_member_drives_its_own_nic():
    """Sixteen ranks on two hosts of eight send through eight NICs, a pair of single ranks through one."""
    wide = group_of("dgx-a100", hosts=2, stride=1, size=16)
    narrow = group_of("dgx-a100", hosts=2, stride=8, size=2)

    assert all_gather_s(1e9, wide) == pytest.approx(15 / 16 * 1e9 / (8 * 25e9), rel=0.01)
    assert all_gather_s(1e9, narrow) == pytest.approx(1 / 2 * 1e9 / 25e9, rel=0.01)


def test_short_all_reduces_climb_a_tree():
    """A short all-reduce over many hosts takes the logarithm of the hosts, not their number."""
    group = group_of("dgx-h100", hosts=256, stride=8, size=256)

    assert all_reduce_s(8, group) == pytest.approx(2 * 8 * 4e-6, rel=0.01)


def test_all_to_all_sends_little_of_its_buffer_to_each():
    """Sixteen ranks on two hosts send half of their buffers off the host, each through its own NIC."""
    group = group_of("dgx-h100", hosts=2, stride=1, size=16)

    assert all_to_all_s(1e9, group) == pytest.approx(8 / 16 * 1e9 / 50e9, rel=0.01)


def test_pairs_on_a_mesh_have_one_wire():
    """On eight fully meshed NPUs a message between two takes seven times as long as the mesh's bandwidth says."""
    group = group_of("ascend-910b", hosts=1, stride=1, size=8)

    assert send_recv_s(1e9, group) == pytest.approx(1e9 / 28e9, rel=0.01)
    assert ring_exchange_s(1e9, group) == pytest.approx(7 / 8 * 1e9 / 28e9, rel=0.01)


def test_arrays_give_arrays():
    """Many messages on many groups are one call, entry by entry."""
    cluster = find_cluster("dgx-h100", 4)
    group = cluster.group_links(np.array([1, 8, 1]), np.array([8, 4, 1]))
    message_bytes = np.array([MB, 2 * MB, 3 * MB])

    together_s = all_reduce_s(message_bytes, group)

    for row in range(3):
        assert together_s[row] == all_reduce_s(message_bytes[row], group.take(np.array([row])))[0]
