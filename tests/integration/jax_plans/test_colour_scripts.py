"""Hand-written plans for the models of TOAST's section 5.1.1 are among the scripts of their graphs."""

import pytest

jax = pytest.importorskip("jax", reason="the zoo needs JAX: pip install 'meshtune[jax]'")

from benchmarks.papers.toast_planners import Problem, cell_of, multi_query  # noqa: E402 # only where JAX is
from benchmarks.zoo import FACTORIES  # noqa: E402 # as above
from costmodels.sharding.frontends.jax.graph import graph_of_jax  # noqa: E402 # as above
from costmodels.sharding.graph import STATE  # noqa: E402 # as above
from costmodels.sharding.plan import NONE, cost_of, violations  # noqa: E402 # as above
from tests.support.graphs.random_graphs import mesh_of  # noqa: E402 # as above
from tuner.planners.toast.colour_actions import ColourActions  # noqa: E402 # as above
from tuner.planners.toast.colour_scripts import hand_written, roles  # noqa: E402 # as above
from tuner.planners.toast.compatibility import compatibility  # noqa: E402 # as above
from tuner.planners.toast.named_dims import named_dims  # noqa: E402 # as above


def actions_of(name, *sizes):
    """Return the actions of a search on a small program of the zoo."""
    function, arguments, donated = FACTORIES[name]()
    graph = graph_of_jax(function, *arguments, donated=donated)
    return ColourActions(compatibility(named_dims(graph)), mesh_of(*sizes))


def groups_of(actions, name):
    """The groups of colours of a source's dims."""
    names = actions.found.names
    number = next(number for number, op in enumerate(names.graph.ops) if op.name == name)
    own = range(int(names.begins[number]), int(names.begins[number + 1]))
    return [int(actions.found.colour_groups[names.colours[each]]) for each in own]


def scripts_of(actions):
    """Return the hand-written scripts as pairs of group and axis."""
    return [
        [(actions.actions[number].group, actions.actions[number].axis) for number in script]
        for script in hand_written(actions)
    ]


def test_edges_are_cut_alone():
    """Edge sharding of a graph network cuts edges and leaves nodes, alone and beside Megatron on the other axis."""
    actions = actions_of("graph_network_small", 2, 2)
    edges, nodes = groups_of(actions, "batch.edges")[0], groups_of(actions, "batch.nodes")[0]
    inside = set(roles(actions).inside)
    scripts = scripts_of(actions)

    assert edges != nodes
    assert [(edges, 0), (edges, 1)] in scripts
    assert any(
        script[0] == (edges, 0)
        and {axis for group, axis in script if group in inside} == {1}
        and nodes not in {group for group, _ in script}
        for script in scripts
    )


def test_a_decoder_has_roles():
    """In a decoding step texts are data, kept tokens are along them, and heads and hidden dims are inside a layer."""
    actions = actions_of("decode_small", 2)
    role = roles(actions)
    batch, tokens, _ = groups_of(actions, "cache.0.keys")
    model, heads, _ = groups_of(actions, "params.layers.0.query")

    assert role.is_kept
    assert role.data == (batch,)
    assert role.along == (tokens,)
    assert role.model == (model,)
    assert {heads, groups_of(actions, "params.layers.0.down")[0]} <= set(role.inside)


def test_attention_goes_by_the_batch_between_products_by_heads():
    """Multi-query attention: the cache is cut by texts, projections stay by heads, and the plan can run."""
    actions = actions_of("decode_small", 2)
    role = roles(actions)
    heads = groups_of(actions, "params.layers.0.query")[1]
    state = actions.first
    for action in actions.actions:
        if action.group == heads:
            state = actions.after(state, action)
    by_heads = actions.plan(state)
    found = multi_query(actions, by_heads, 0)
    caches = [number for number, op in enumerate(found.graph.ops) if op.primitive == STATE]
    reads = [number for number, op in enumerate(found.graph.ops) if op.name == "params.layers.0.query"]

    assert violations(found) == ()
    assert role.is_kept
    assert all(found.served[number, 0] == 0 for number in caches)
    assert all(by_heads.served[number, 0] == NONE for number in caches)
    assert all(found.served[number, 0] == by_heads.served[number, 0] != NONE for number in reads)
    assert cost_of(found).peak_memory_bytes < cost_of(by_heads).peak_memory_bytes


def test_the_manual_plan_is_the_best_script():
    """No script of a small decoder or of a loop of layers is faster than its cell says."""
    for name, sizes in (("decode_small", (2,)), ("gemma_small_scan", (2, 2))):
        actions = actions_of(name, *sizes)
        problem = Problem(graph=actions.found.names.graph, mesh=actions.mesh)
        cell = cell_of("manual", problem)
        for script in hand_written(actions):
            state = actions.first
            for number in script:
                state = actions.after(state, actions.actions[number])
            assert cost_of(actions.plan(state)).step_time_s >= cell["step_time_s"] * (1 - 1e-9)
        assert cell["fits"]
