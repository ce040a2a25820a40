"""An AutoMap-like search: what propagation says, the plan that it stands for, and the search over arguments."""

import numpy as np
import pytest

pytest.importorskip("jax", reason="the benchmark propagates through a JAX program")

import jax
import jax.numpy as jnp

from benchmarks.papers.automap import ArgumentGame, automap_plan
from benchmarks.papers.propagated_plans import PlanReader
from benchmarks.papers.propagation import Propagation
from costmodels.blocks.operator import OpKind
from costmodels.sharding.device_mesh import mesh_of
from costmodels.sharding.frontends.jax.graph import graph_of
from costmodels.sharding.frontends.jax.program import trace_function
from costmodels.sharding.plan import cost_of, violations
from hardware.cluster_file import find_cluster
from tests.support.benchmark_runs import json_of
from tests.support.graphs.wide_step import WIDE
from tuner.planners.engine.outcome import Limits
from tuner.planners.toast.colour_actions import ColourActions
from tuner.planners.toast.compatibility import compatibility
from tuner.planners.toast.named_dims import named_dims
from tuner.planners.toast.search import ColourGame, ToastOptions
from tuner.planners.toast.tree_search import SearchOptions, search

CLUSTER = find_cluster("dgx-a100")
TWO_AXES = mesh_of("data=4,model=2", CLUSTER)
ONE_AXIS = mesh_of("model=8", CLUSTER)


def mlp(params, x):
    """Figure 2 of TOAST: two products with a rectifier between them."""
    return jnp.maximum(x @ params["w1"], 0.0) @ params["w2"]


def shapes(**sizes):
    """Abstract arrays by their names."""
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}


@pytest.fixture(scope="module")
def two_products():
    """The products of 256 by 32, 32 by 64 and 64 by 16, traced, and their graph."""
    weights = shapes(w1=(32, 64), w2=(64, 16))
    program = trace_function(mlp, weights, jax.ShapeDtypeStruct((256, 32), jnp.float32))
    return program, graph_of(program)


@pytest.fixture(scope="module")
def wide():
    """A training step of one layer, traced, and its graph."""
    function, arguments, donated = WIDE.train_program()
    program = trace_function(function, *arguments, donated=donated)
    return program, graph_of(program)


def tensor_of(graph, name):
    """The number of a tensor by its name."""
    return next(number for number, array in enumerate(graph.tensors) if array.name == name)


def game_of(step, mesh):
    """Arguments of a step as a game, and TOAST's game on the same."""
    program, graph = step
    actions = ColourActions(compatibility(named_dims(graph)), mesh)
    base = ColourGame(actions, memory_bytes=min(device.memory_bytes for device in mesh.cluster.devices))
    return ArgumentGame(Propagation(program, graph, mesh), base), base


def test_one_argument_reaches_the_other(two_products):
    """Cutting the columns of the first weight cuts the rows of the second, and one all-reduce follows (section 2)."""
    program, graph = two_products
    first, second = tensor_of(graph, "params.w1"), tensor_of(graph, "params.w2")
    found = Propagation(program, graph, ONE_AXIS).layouts({first: (1,)})
    plan = PlanReader(graph, ONE_AXIS).plan(found.layouts)
    (collective,) = cost_of(plan).collectives

    assert found.layouts[first] == (1,)
    assert found.layouts[second] == (0,)
    assert collective.move.kind is OpKind.ALL_REDUCE
    assert violations(plan) == ()


def test_a_cut_batch_is_data_parallelism(wide):
    """Tokens and targets cut by an axis come back as the plan in which it serves the batch wherever there is one."""
    program, graph = wide
    given = {tensor_of(graph, name): (0, -1) for name in ("batch.tokens", "batch.targets")}
    read = PlanReader(graph, TWO_AXES).plan(Propagation(program, graph, TWO_AXES).layouts(given).layouts)
    actions = ColourActions(compatibility(named_dims(graph)), TWO_AXES)
    names = actions.found.names
    begin = int(names.begins[names.graph.maker[tensor_of(graph, "batch.tokens")][0]])
    batch = actions.found.colour_groups[names.colours[begin]]
    (action,) = (each for each in actions.actions if each.group == batch and each.axis == 0)
    made = actions.plan(actions.after(actions.first, action))

    assert cost_of(read).step_time_s == pytest.approx(cost_of(made).step_time_s, rel=1e-3)
    assert sent_by(read) == sent_by(made)


def sent_by(plan):
    """All collectives of a plan, in an order of their own."""
    moves = [each.move for each in cost_of(plan).collectives]
    return sorted((move.kind, move.axes, move.message_bytes) for move in moves)


def test_xla_sends_what_the_read_plan_says():
    """With data parallelism and Megatron's cuts of arguments alone, plan and XLA send the same bytes."""
    names = ("data on both axes", "data and Megatron")
    found = json_of("tests.support.graphs.propagated_on_devices", *names)

    for name in names:
        assert found[name]["planned"] == pytest.approx(found[name]["compiled"], rel=1e-6), name
        assert found[name]["violations"] == [], name


def test_actions_are_about_arguments(wide):
    """Every action cuts dims of arguments somewhere; what an axis has cut it does not cut again."""
    game, _ = game_of(wide, TWO_AXES)
    graph = wide[1]
    reached = [game.after(game.first, number) for number in range(game.num_actions)]

    assert reached
    assert all(graph.ops[number].begins for number in game.arguments)
    for number, state in enumerate(reached):
        axis = game.actions[number].axis
        cut = [layout[axis] for layout in state if layout[axis] >= 0]
        assert cut
        assert len(cut) <= len(game.actions[number].dims)
        assert game.after(state, number) == state


def test_the_search_finds_the_best_of_all_states(two_products):
    """On two products the tree ends with the cheapest of all states that any sequence of actions leads to."""
    game, _ = game_of(two_products, TWO_AXES)
    states, waiting = {game.first}, [game.first]
    while waiting:
        state = waiting.pop()
        new = {game.after(state, action) for action in range(game.num_actions)} - states
        states |= new
        waiting += new
    tree = search(game, SearchOptions(trajectories=2000), np.random.default_rng(0))

    assert len(states) > 10
    assert tree.nodes[tree.best].cost == pytest.approx(min(map(game.cost, states)))


def test_the_planner_tells_plan_time_and_evaluations(wide):
    """`automap_plan` makes no plan that is dearer than the unsharded step, and counts what it took."""
    program, graph = wide
    options = ToastOptions(searches=2)
    found = automap_plan(program, TWO_AXES, options, limits=Limits(nodes=30), graph=graph)
    seen = {node.state for tree in found.trees for node in tree.nodes}

    assert violations(found.plan) == ()
    assert found.cost < 1.0
    assert found.cost == pytest.approx(min(node.cost for tree in found.trees for node in tree.nodes))
    assert found.spent.evaluations == len(seen)
    assert 0 < found.spent.propagation_s < found.spent.total_s <= found.search_s
    assert found.pipeline_s > 0
