"""TOAST: on small graphs the search finds the best of all states, twice the same, and what follows is no worse."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from costmodels.sharding.plan import cost_of, violations
from tests.support.graphs.attention_graphs import attention
from tests.support.graphs.random_graphs import graphs, mesh_of, meshes
from tests.support.graphs.small_graphs import mlp
from tuner.planners.engine.outcome import Known, Limits, Stop
from tuner.planners.engine.workers import ProcessWorkers
from tuner.planners.sharding.recursive import recursive_plan, whole
from tuner.planners.toast.colour_actions import ColourActions
from tuner.planners.toast.compatibility import compatibility
from tuner.planners.toast.named_dims import named_dims
from tuner.planners.toast.search import ColourGame, ToastOptions, toast_plan
from tuner.planners.toast.tree_search import SearchOptions, edit_actions, search

SMALL = ToastOptions(search=SearchOptions(trajectories=20), searches=1)
PAPER = replace(SMALL, is_seeded=False, is_edited=False, is_polished=False)


def game_of(graph, mesh, memory_bytes=1e12):
    """A graph as a game."""
    return ColourGame(ColourActions(compatibility(named_dims(graph)), mesh), memory_bytes)


def all_states(game):
    """Every state that actions lead to."""
    known, waiting = {game.first}, [game.first]
    while waiting:
        state = waiting.pop()
        for action in range(game.num_actions):
            other = game.after(state, action)
            if other not in known:
                known.add(other)
                waiting.append(other)
    return known


class Row:
    """A game of walking along a line, whose end is the best and whose way there is worse than its begin."""

    num_actions = 3
    first = 0

    def after(self, state, action):
        """A step forward by the last action alone."""
        return min(state + (action == 2), 3)

    def cost(self, state):
        """Less at the far end alone."""
        return {0: 1.0, 3: 0.5}.get(state, 1.2)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [mlp(), attention()], ids=["mlp", "attention"])
def test_the_best_of_all_states_is_found(graph):
    """On graphs of few colours the search finds what trying out every state finds."""
    game = game_of(graph, mesh_of(2, 2))
    best = min(map(game.cost, all_states(game)))
    tree = search(game, SearchOptions(trajectories=500), np.random.default_rng(0))

    assert tree.nodes[tree.best].cost == pytest.approx(best, rel=1e-9)


def test_a_small_tree_is_exhausted():
    """Where all was seen the search says so, and has seen no more than there is."""
    game = game_of(mlp(), mesh_of(2))
    tree = search(game, SearchOptions(trajectories=10_000), np.random.default_rng(0))

    assert tree.stop is Stop.EXHAUSTED
    assert {node.state for node in tree.nodes} == all_states(game)


def test_a_search_crosses_a_ridge():
    """The end of a line is found although every state on the way there costs more than the begin; where the search may
    not go so deep nothing is better than the begin, and no action is committed.
    """
    tree, shallow = (search(Row(), SearchOptions(depth=depth), np.random.default_rng(0)) for depth in (30, 2))

    assert tree.nodes[tree.best].state == 3
    assert tree.actions.count(2) == 3
    assert shallow.actions == ()
    assert shallow.best == 0


def test_the_same_seed_grows_the_same_tree():
    """Twice the same numbers give the same record, and other numbers another."""
    once, again, other = (
        search(game_of(attention(2), mesh_of(2, 4)), SearchOptions(trajectories=60), np.random.default_rng(seed))
        for seed in (1, 1, 2)
    )

    assert (once.nodes, once.actions) == (again.nodes, again.actions)
    assert once.nodes != other.nodes


def test_states_are_seen_once_and_limited():
    """However many trajectories come by, a state is one node; a search ends at the number of states that it was given,
    and says so.
    """
    tree, short = (
        search(game_of(attention(), mesh_of(2, 2)), SearchOptions(), np.random.default_rng(0), limits=limits)
        for limits in (Limits(), Limits(nodes=5))
    )

    assert len({node.state for node in tree.nodes}) == len(tree.nodes)
    assert max(node.visits for node in tree.nodes[1:]) > 1
    assert short.stop is Stop.NODES
    assert 5 <= len(short.nodes) < 5 + SearchOptions().depth


def test_editing_takes_back_what_was_committed():
    """From any two actions small changes lead to a sequence that no further small change makes better."""
    game = game_of(mlp(), mesh_of(2, 2))
    for sequence in itertools.permutations(range(game.num_actions), 2):
        begin = game.after(game.after(game.first, sequence[0]), sequence[1])
        state, actions = edit_actions(game, sequence)
        again, _ = edit_actions(game, actions)

        assert game.cost(state) <= game.cost(begin)
        assert again == state


def test_memory_is_a_penalty():
    """Where the unsharded step does not fit the cheapest plan is one that does."""
    graph, mesh = mlp(), mesh_of(2, 2)
    game = game_of(graph, mesh)
    least = min(game.figures(state).peak_memory_bytes for state in all_states(game))
    roomy = cost_of(toast_plan(graph, mesh, replace(SMALL, memory_bytes=1e15)).plan)
    memory_bytes = (roomy.peak_memory_bytes + least) / 2
    tight = cost_of(toast_plan(graph, mesh, replace(SMALL, memory_bytes=memory_bytes)).plan)

    assert least < roomy.peak_memory_bytes
    assert tight.peak_memory_bytes <= memory_bytes
    assert tight.step_time_s >= roomy.step_time_s


@given(graph=graphs(), mesh=meshes())
@settings(max_examples=15)
def test_any_graph_is_planned(graph, mesh):
    """Any graph on any mesh gets a plan that can run, costs what is said, and no more than the given one."""
    own_mesh, levels = whole(mesh)
    halved = recursive_plan(graph, own_mesh, levels)
    found = toast_plan(graph, mesh, SMALL, given=[halved])
    unsharded_s = game_of(graph, mesh).whole.step_time_s

    assert violations(found.plan) == ()
    assert found.outcome.best.cost == min(step.cost for step in found.steps)
    assert cost_of(found.plan).step_time_s <= cost_of(halved).step_time_s * (1 + 1e-9)
    assert cost_of(found.plan).step_time_s <= unsharded_s * (1 + 1e-9)
    assert found.outcome.bound <= found.outcome.best.cost * (1 + 1e-9)


def test_each_step_is_no_worse():
    """Seeds, edits and polishing are told apart, and each only helps."""
    graph, mesh = attention(2), mesh_of(2, 4)
    halved = recursive_plan(graph, mesh, whole(mesh)[1])
    plain = toast_plan(graph, mesh, PAPER)
    found = toast_plan(graph, mesh, SMALL, given=[halved])
    cost = {step.name: step.cost for step in found.steps}

    assert [step.name for step in plain.steps] == ["unsharded", "search"]
    assert cost["search"] == plain.outcome.best.cost
    assert cost["edited"] <= min(cost["search"], cost["seeded search"])
    assert found.outcome.best.cost <= min(cost["edited"], cost["given"])


def test_a_plan_without_anything_to_gain_is_optimal():
    """One device takes what it takes, and that is known to be the least."""
    found = toast_plan(mlp(), mesh_of(1), PAPER)

    assert found.outcome.known is Known.OPTIMAL
    assert found.outcome.best.cost == 1.0


def test_workers_grow_the_same_trees():
    """Trees grown in other processes are those of this one."""
    graph, mesh = attention(), mesh_of(2, 2)
    options = replace(SMALL, searches=2, is_seeded=False, is_polished=False)
    here = toast_plan(graph, mesh, options)
    with ProcessWorkers(1) as workers:
        there = toast_plan(graph, mesh, options, workers=workers)

    assert [tree.nodes for tree in there.trees] == [tree.nodes for tree in here.trees]
    assert (there.plan.served == here.plan.served).all()
