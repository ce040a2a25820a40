"""Colour actions: states are plans that can run, and their costs are those of the cost model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.sharding.plan import NONE, cost_of, violations
from tests.support.graphs.attention_graphs import attention
from tests.support.graphs.random_graphs import graphs, mesh_of, meshes
from tests.support.graphs.small_graphs import mlp
from tuner.planners.sharding.class_costs import ClassCosts, decode_rows, encode_rows
from tuner.planners.toast.colour_actions import ColourActions
from tuner.planners.toast.colour_scripts import hand_written, roles
from tuner.planners.toast.compatibility import compatibility
from tuner.planners.toast.named_dims import named_dims


def actions_of(graph, mesh, **options):
    """What a search could do."""
    return ColourActions(compatibility(named_dims(graph)), mesh, **options)


def state_after(actions, sequence):
    """Where some actions lead."""
    state = actions.first
    for action in sequence:
        state = actions.after(state, action)
    return state


def action_for(actions, op, factor, axis, resolution=0):
    """The action that cuts a factor of an operator, by their names."""
    names = actions.found.names
    number = next(number for number, each in enumerate(names.graph.ops) if each.name == op)
    rule = names.graph.ops[number].rule
    position = next(position for position, each in enumerate(rule.factors) if each.name == factor)
    group = int(actions.found.colour_groups[names.colours[names.name_of(number, position)]])
    return next(
        each
        for each in actions.actions
        if (each.group, each.axis, each.resolution) == (group, actions.mesh.names.index(axis), resolution)
    )


@given(graph=graphs(), mesh=meshes(), data=st.data())
def test_a_state_is_a_plan_and_costs_what_it_costs(graph, mesh, data):
    """After any actions in any graph the plan can run, and time and memory are those of `cost_of`."""
    actions = actions_of(graph, mesh)
    costs = ClassCosts(graph, mesh, actions.classes)
    state = actions.first
    for _ in range(4):
        plan, figures = actions.plan(state), costs.figures(actions.codes(state))
        known = cost_of(plan)

        assert violations(plan) == ()
        assert figures.step_time_s == pytest.approx(known.step_time_s, rel=1e-9, abs=1e-15)
        assert figures.peak_memory_bytes == pytest.approx(known.peak_memory_bytes, rel=1e-9, abs=1e-6)
        if actions.actions:
            state = actions.after(state, data.draw(st.sampled_from(actions.actions)))


@given(order=st.permutations(range(4)))
@settings(max_examples=24)
def test_all_orders_of_actions_meet_in_one_state(order):
    """Actions that do not compete for an axis lead to one state in whatever order."""
    actions = actions_of(attention(2), mesh_of(2, 4, 2))
    several = [
        action_for(actions, "0.k.op", "s", "data"),
        action_for(actions, "0.k.op", "h", "model"),
        action_for(actions, "0.v.op", "v", "model"),
        action_for(actions, "0.k.op", "d", "expert"),
    ]

    assert state_after(actions, [several[number] for number in order]) == state_after(actions, several)


def test_what_was_cut_before_is_not_cut_again():
    """A second time the same action changes nothing; of two colours in one operator the first one gets the axis."""
    actions = actions_of(mlp(), mesh_of(2))
    batch, ffn = (action_for(actions, "0.up", factor, "data") for factor in ("batch", "ffn"))
    once = state_after(actions, [batch])

    assert state_after(actions, [batch, batch]) == once
    assert state_after(actions, [batch, ffn]) != state_after(actions, [ffn, batch])


def test_batch_and_then_parameters_is_fsdp():
    """Batch before ffn on one axis shards weights where they lie, gathers them for use and scatters their gradients."""
    graph = mlp()
    actions = actions_of(graph, mesh_of(4))
    batch, ffn = (action_for(actions, "0.up", factor, "data") for factor in ("batch", "ffn"))
    plan = actions.plan(state_after(actions, [batch, ffn]))
    sent = {(each.move.kind.value, graph.tensors[each.tensor].name) for each in cost_of(plan).collectives}

    assert sent == {
        *(("all_gather", name) for name in ("0.w1", "0.w2")),
        *(("reduce_scatter", name) for name in ("0.w1.g", "0.w2.g")),
    }


def test_what_cannot_or_need_not_be_cut_is_left_alone():
    """An axis of three cuts nothing of a graph whose dims are powers of two; the threshold leaves out what cuts fewer
    names, and by default it does not hold for so few colours.
    """
    assert actions_of(mlp(), mesh_of(3)).actions == ()
    assert len(actions_of(mlp(), mesh_of(2)).actions) == 4
    assert actions_of(mlp(), mesh_of(2), least_dims=10_000).actions == ()


def test_constants_follow_their_readers():
    """A mask is made in the parts in which it is read, and nothing is sent for it."""
    graph = attention(masks="shared")
    actions = actions_of(graph, mesh_of(4))
    plan = actions.plan(state_after(actions, [action_for(actions, "0.k.op", "s", "data")]))
    (mask,) = (number for number, op in enumerate(graph.ops) if op.name == "mask")

    assert plan.served[mask, 0] != NONE
    assert all(graph.tensors[each.tensor].name != "mask" for each in cost_of(plan).collectives)


def test_roles_are_read_off_the_graph():
    """Batch, the residual stream and what is inside a layer are told apart, and people's scripts begin with them."""
    actions = actions_of(mlp(num_layers=3), mesh_of(2, 2))
    role = roles(actions)
    batch, ffn = (action_for(actions, "0.up", factor, "data") for factor in ("batch", "ffn"))
    scripts = [[actions.actions[number] for number in script] for script in hand_written(actions)]

    assert role.data == (batch.group,)
    assert ffn.group in (*role.model, *role.inside)
    assert [batch, action_for(actions, "0.up", "batch", "model")] in scripts
    assert any(script[0] == batch and ffn in script[1:] for script in scripts)


@given(row=st.lists(st.integers(-1, 20), min_size=1, max_size=6))
def test_a_row_is_a_number(row):
    """Every row comes back from its number."""
    assert decode_rows(encode_rows(row), len(row)) == tuple(row)
