"""Meshes: their groups of ranks, and what collectives on these take."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.blocks.operator import OpKind
from costmodels.sharding.device_mesh import DeviceMesh
from hardware.cluster_file import find_cluster
from hardware.collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s
from tests.support.graphs.random_graphs import meshes

TIMES = {
    OpKind.ALL_REDUCE: all_reduce_s,
    OpKind.ALL_GATHER: all_gather_s,
    OpKind.REDUCE_SCATTER: reduce_scatter_s,
    OpKind.ALL_TO_ALL: all_to_all_s,
}
MESSAGES = (1.0, 1e3, 1e6, 1e9)


def ranks_by_hand(sizes, axes):
    """The groups along these axes: ranks that differ in them alone, the last axis fastest."""
    groups = {}
    for rank, place in enumerate(itertools.product(*map(range, sizes))):
        key = tuple(at for axis, at in enumerate(place) if axis not in axes)
        groups.setdefault(key, []).append(rank)
    return np.array(list(groups.values()))


@given(mesh=meshes(), kind=st.sampled_from(list(TIMES)), data=st.data())
@settings(max_examples=120)
def test_collectives_take_what_they_take_on_their_ranks(mesh, kind, data):
    """A collective along any axes, in any order, takes what hardware/collectives.py says of these very ranks.

    All ranks are at work at once.
    """
    axes = tuple(data.draw(st.sets(st.sampled_from(range(len(mesh.sizes))), min_size=1)))
    links = mesh.cluster.links_among([ranks_by_hand(mesh.sizes, axes)], np.arange(mesh.num_devices))

    for message_bytes in MESSAGES:
        found_s = mesh.seconds(kind, message_bytes, axes)
        assert found_s == pytest.approx(TIMES[kind](message_bytes, links)[0])
        assert found_s == mesh.seconds(kind, message_bytes, axes[::-1])


@pytest.mark.parametrize(
    ("axes", "stride", "size"),
    [((2,), 1, 2), ((1,), 2, 4), ((0,), 8, 2), ((1, 2), 1, 8), ((0, 1), 2, 8), ((0, 1, 2), 1, 16)],
)
def test_evenly_spaced_groups_take_what_their_stride_says(axes, stride, size):
    """On two hosts, contiguous, strided and merged axes are the groups that a stride and a size name."""
    cluster = find_cluster("dgx-h100", hosts=2)
    mesh = DeviceMesh(names=("a", "b", "c"), sizes=(2, 4, 2), cluster=cluster)
    links = cluster.group_links(np.array([stride]), np.array([size]))

    for kind, message_bytes in itertools.product(TIMES, MESSAGES):
        assert mesh.seconds(kind, message_bytes, axes) == pytest.approx(TIMES[kind](message_bytes, links)[0])


def test_a_part_of_a_cluster_shares_it_with_the_others():
    """Where the mesh is a part of the cluster, its collectives run while the other devices do the same."""
    cluster = find_cluster("dgx-h100", hosts=2)
    mesh, part = (DeviceMesh(names=("a",), sizes=(size,), cluster=cluster) for size in (16, 4))
    links = cluster.links_among([np.arange(4)[None]], np.arange(16))

    assert part.seconds(OpKind.ALL_GATHER, 1e8, (0,)) == pytest.approx(all_gather_s(1e8, links)[0])
    assert part.seconds(OpKind.ALL_GATHER, 1e8, (0,)) < mesh.seconds(OpKind.ALL_GATHER, 1e8, (0,))


def test_nothing_and_nobody_take_no_time():
    """An empty message, and a group of one, take no time."""
    mesh = DeviceMesh(names=("a", "b"), sizes=(8, 1), cluster=find_cluster("dgx-h100"))

    assert mesh.seconds(OpKind.ALL_REDUCE, 0.0, (0,)) == 0.0
    assert mesh.seconds(OpKind.ALL_REDUCE, 1e9, (1,)) == 0.0
    assert mesh.seconds(OpKind.ALL_REDUCE, 1e9, ()) == 0.0


@pytest.mark.parametrize(
    ("names", "sizes", "words"),
    [
        (("a",), (2, 4), "every axis needs a size"),
        (("a", "a"), (2, 4), "axis names must be unique"),
        (("a",), (3,), r"a=3 are 3 devices, but dgx-h100 has 8"),
    ],
)
def test_wrong_meshes_are_told(names, sizes, words):
    """A mesh has a size for each axis, names that differ, and divides its cluster."""
    with pytest.raises(AssertionError, match=words):
        DeviceMesh(names=names, sizes=sizes, cluster=find_cluster("dgx-h100"))
