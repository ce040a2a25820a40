from dataclasses import replace

import pytest

from hardware.cluster_file import cluster_from_mapping, find_cluster
from tests.support.settings.placements import PLACEMENTS, module
from tuner.place.options import cluster_of, kinds_of, options_of, pools_of
from tuner.place.placement_file import read_placement
from tuner.place.workload import WEIGHTS, Edge, Workload

HOST = find_cluster("dgx-h100", 1)


def workload(modules, edges=(), **changes):
    """Modules on one host."""
    return Workload(
        name="small", cluster=HOST, modules=modules, edges=edges, headroom=0.08, **({"overlap_steps": 0} | changes)
    )


def options(small):
    """The options of every unit of a workload."""
    return options_of(small, kinds_of(pools_of(small)), lambda _: None)


def test_the_family_of_device_sets():
    """Of 6 hosts: powers of two, divisors, the half, what they leave, and powers of two of one host's devices."""
    pools = pools_of(replace(workload((module("a"),)), cluster=find_cluster("dgx-h100", 6)))
    sizes = {(kind.hosts, kind.devices) for kind in kinds_of(pools)}

    assert sizes == {(hosts, 8 * hosts) for hosts in (1, 2, 3, 4, 5, 6)} | {(1, 1), (1, 2), (1, 4)}


def test_a_kind_is_its_part_of_the_cluster(tmp_path):
    """A kind of the second group has that group's devices, and all hosts together are the cluster itself."""
    mixed = cluster_from_mapping({"groups": [{"name": "dgx-h100", "hosts": 2}, {"name": "dgx-a100"}]}, tmp_path)
    kinds = kinds_of(pools_of(replace(workload((module("a"),)), cluster=mixed)))

    for kind in kinds:
        part = cluster_of(mixed, kind)
        assert part.num_devices == kind.devices
        if kind.pool >= 0:
            assert part.devices == (mixed.groups[kind.pool].device,)
    assert cluster_of(mixed, kinds[0]) == mixed


def test_states_that_leave_take_their_time_and_no_memory():
    """Beside each layout whose states stay is one whose states leave: slower by its moves, with no idle memory."""
    for unit in options(workload((module("a", "train"), module("b")))):
        for stays, leaves in zip(unit[::2], unit[1::2], strict=True):
            assert (stays.leaves, leaves.leaves) == (False, True)
            assert leaves.idle_bytes == 0 < stays.idle_bytes
            assert leaves.times_s[0] == pytest.approx(stays.times_s[0] + leaves.moves_s[0])
            assert leaves.moves_s[0] > 0 == stays.moves_s[0]


def test_training_moves_more_than_inference():
    """States of training come and go with the optimizer's, the weights of inference come alone."""
    trained, inferred = options(workload((module("a", "train", layout=(("tp", 8),)), module("b", layout=(("tp", 8),)))))
    moves = [
        next(one.moves_s[0] for one in unit if one.leaves and one.kind.devices == 8) for unit in (trained, inferred)
    ]

    assert moves[0] > 2 * moves[1] > 0


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_engine_sleeps_without_memory_only_where_it_runs_first(overlap):
    """Weights that arrive before a step lie on the devices until generation begins, unless nothing runs before it."""
    small = replace(read_placement(PLACEMENTS / "ppo-7b-16.yaml"), overlap_steps=overlap, cluster=HOST)
    names = [one.name for one in small.modules]
    engine = options(small)[names.index("rollout")]

    assert all((one.idle_bytes > 0) == bool(overlap) for one in engine)
    assert all(one.moves_s == (0.0,) for one in engine)


def test_a_frozen_generator_keeps_or_loads_its_weights():
    """A generator without new weights keeps them, or loads them each time."""
    edge = Edge(source=0, target=1, sends=WEIGHTS, data_bytes=1.0)
    frozen, fresh = (
        options(workload((module("a", "train"), module("b", "generate")), edges))[1] for edges in ((), (edge,))
    )

    assert {one.leaves for one in frozen} == {True, False}
    assert all(not one.leaves and one.idle_bytes > 0 for one in fresh)


def test_fixed_degrees_and_devices_hold():
    """Every option has the degrees and the number of devices that the file fixes."""
    found = options(workload((module("a", "train", layout=(("tp", 4), ("mbs", 2)), devices=8),)))[0]

    assert found
    assert {(one.layout.config.tp, one.layout.config.mbs, one.kind.devices) for one in found} == {(4, 2, 8)}
