"""Coarse graphs of the zoo's programs: they lose nothing, wait in no circle, and bind only what shares a state."""

from functools import cache

import numpy as np
import pytest

from benchmarks.zoo.factories import FACTORIES
from benchmarks.zoo.torch_modules import FACTORIES as MODULES
from costmodels.sharding.frontends.jax.graph import graph_of
from costmodels.sharding.frontends.jax.program import trace_function
from costmodels.sharding.graph import CARRY, CONSTANT, STATE
from hardware.cluster_file import find_cluster
from tests.support.graphs.torch_graphs import graph_of_torch
from tuner.place.operators.coarsening import coarsen, copied_tensors
from tuner.place.operators.device_links import device_links
from tuner.place.operators.pricing import Site
from tuner.place.operators.program_graph import operators_of_graph, seconds_of, working_bytes_of

SMALL = ("gemma_small", "gemma_small_scan", "moe_small", "unet_small", "graph_network_small", "decode_small")
SMALL_MODULES = ("llama_small", "mixtral_small", "perceptron_small")

programs = pytest.mark.parametrize("name", [*SMALL, *SMALL_MODULES])
limits = pytest.mark.parametrize("most", [2, 7, 32, 10_000])


@cache
def captured(name):
    """Capture a program of the zoo."""
    if name in MODULES:
        return graph_of_torch(*MODULES[name]())
    function, arguments, donated = FACTORIES[name]()
    return graph_of(trace_function(function, *arguments, donated=donated))


def site():
    """Two kinds of devices."""
    cluster = find_cluster("dgx-a100")
    return Site(
        devices=(cluster.devices[0], find_cluster("v100-pcie").devices[0]),
        links=tuple(link for link in device_links(cluster) if {link.source, link.target} == {0, 1}),
        precision="bf16",
        capacity_bytes=np.array([2.0**36, 2.0**34]),
    )


def coarse_of(name, most):
    """Coarsen a program of the zoo."""
    graph = captured(name)
    return graph, coarsen(graph, seconds_of(graph, site()).mean(axis=1).tolist(), most)


@programs
@limits
def test_groups_are_few_and_each_operator_is_in_one(name, most):
    """Every operator but constants is in one group, and there are at most as many groups as asked."""
    graph, coarse = coarse_of(name, most)

    assert 1 <= len(coarse.groups) <= most
    assert sorted(op for group in coarse.groups for op in group) == [
        number for number, op in enumerate(graph.ops) if op.primitive != CONSTANT
    ]


@programs
@limits
def test_groups_wait_in_no_circle(name, most):
    """A group stands after all whose results it reads, but for what devices compute for themselves."""
    graph, coarse = coarse_of(name, most)
    group_of = {op: at for at, group in enumerate(coarse.groups) for op in group}
    copied = copied_tensors(graph)

    for tensor, uses in enumerate(graph.uses):
        maker, _ = graph.maker[tensor]
        for use in uses if tensor not in copied else ():
            if graph.ops[use.op].primitive != STATE:
                assert group_of[maker] <= group_of[use.op]


@programs
@limits
def test_cuts_are_the_tensors_between_groups(name, most):
    """Each pair of groups is cut by exactly the tensors that one makes and the other reads in this step."""
    graph, coarse = coarse_of(name, most)
    group_of = {op: at for at, group in enumerate(coarse.groups) for op in group}
    copied, expected = copied_tensors(graph), {}
    for number, op in enumerate(graph.ops):
        for tensor in op.operands if op.primitive not in (STATE, CONSTANT) else ():
            source = group_of.get(graph.maker[tensor][0])
            if tensor not in copied and source != group_of[number]:
                expected.setdefault((source, group_of[number]), set()).add(tensor)

    assert {pair: set(tensors) for pair, tensors in coarse.cuts.items()} == expected


@programs
@limits
def test_what_shares_a_state_shares_a_home(name, most):
    """All that read or write one parameter or moment are in one group, or in groups of one home."""
    graph, coarse = coarse_of(name, most)
    group_of = {op: at for at, group in enumerate(coarse.groups) for op in group}
    home_of = {at: at for at in range(len(coarse.groups))} | {at: one[0] for one in coarse.homes for at in one}
    copied = copied_tensors(graph)

    states = [op for op in graph.ops if op.primitive == STATE and not copied.issuperset(op.results)]
    for op in states:
        readers = {group_of[use.op] for use in graph.uses[op.results[0]]}
        writers = {group_of[graph.maker[tensor][0]] for tensor in op.operands}
        assert len({home_of[at] for at in readers | writers}) <= 1


def test_a_loop_is_in_one_group():
    """What an iteration hands on to the next is made in the group of the loop's start."""
    graph, coarse = coarse_of("gemma_small_scan", 10_000)
    group_of = {op: at for at, group in enumerate(coarse.groups) for op in group}
    loops = [number for number, op in enumerate(graph.ops) if op.primitive == CARRY]

    assert len(loops) == 2
    for number in loops:
        assert group_of[graph.maker[graph.ops[number].operands[1]][0]] == group_of[number]


@programs
@limits
def test_operators_keep_work_and_memory(name, most):
    """Times, operations and states of the coarse operators add up to those of the program."""
    graph = captured(name)
    operators, told = operators_of_graph("step", "zoo", graph, most, site())
    begun = [op.results[0] for op in graph.ops if op.begins]

    times = np.array([one.exec_s for one in operators])
    assert times.sum(axis=0) == pytest.approx(seconds_of(graph, site()).sum(axis=0))
    assert told.flop == sum(op.flop * op.times for op in graph.ops) > 0
    assert told.state_bytes == sum(one.memory_bytes for one in operators)
    assert told.state_bytes == sum(graph.tensors[tensor].num_bytes for tensor in begun)


def test_a_group_needs_room_for_what_lives_in_it_alone():
    """One group of all needs the whole step's peak beyond its states; of many groups, each needs no more."""
    graph, whole = coarse_of("gemma_small", 2)
    _, fine = coarse_of("gemma_small", 32)

    assert max(working_bytes_of(graph, fine)) < max(working_bytes_of(graph, whole))
    assert min(working_bytes_of(graph, fine)) >= 0
