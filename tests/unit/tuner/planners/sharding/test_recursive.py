"""D-Rec: plans that can run, never better than the optimum, and the price that orders the visits."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.blocks.operator import OpKind
from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import INPUT, GraphBuilder, TensorKind
from costmodels.sharding.plan import NONE, cost_of, violations
from tests.support.graphs.random_graphs import graphs, mesh_of, meshes, plan_of
from tests.support.graphs.small_graphs import mlp
from tuner.planners.engine.outcome import Limits
from tuner.planners.sharding.recursive import ORDERS, _Cut, _Progress, recursive_plan, refine_mesh, whole
from tuner.planners.sharding.sharding_milp import shard_by_milp

orders = st.sampled_from(ORDERS)
ways_to_cut = st.sampled_from((refine_mesh, whole))


@given(graph=graphs(), mesh=meshes(), cut=ways_to_cut, order=orders)
def test_every_plan_can_run(graph, mesh, cut, order):
    """Whatever the graph, the mesh and the order, the plan breaks no rule, and nothing of it is left to chance."""
    plan, again = (recursive_plan(graph, *cut(mesh), order=order) for _ in range(2))

    assert violations(plan) == ()
    assert plan.served.tolist() == again.served.tolist()


@given(graph=graphs(max_ops=5), mesh=meshes(), cut=ways_to_cut)
@settings(max_examples=30)
def test_no_plan_beats_the_optimum(graph, mesh, cut):
    """No order finds a plan below what the integer program proves of the same mesh, whose own plan breaks no rule."""
    refined_mesh, levels = cut(mesh)
    proven = shard_by_milp(graph, refined_mesh, limits=Limits(time_s=10.0))
    assert proven.best is None or not violations(proven.best.solution)

    for order in ORDERS:
        plan = recursive_plan(graph, refined_mesh, levels, order=order)

        assert (
            cost_of(plan).step_time_s >= proven.bound * (1 - 1e-7) - 1e-9
        )  # HiGHS loses a nanosecond beside microseconds


@given(mesh=meshes())
def test_there_is_a_level_for_every_prime_factor(mesh):
    """Levels are the prime factors of all axes, those of an axis in a row, and their parts make up the mesh."""
    fine, levels = refine_mesh(mesh)

    assert {level.ways for level in levels} <= {2, 3}  # no axis has more than six devices
    assert [level.axis for level in levels] == list(range(len(levels)))
    assert [math.prod(level.ways for level in levels if level.of == axis) for axis in range(len(mesh.sizes))] == list(
        mesh.sizes
    )
    assert fine.sizes == tuple(level.ways for level in levels)


def test_levels_of_uneven_axes():
    """An axis of twelve is cut by three and twice by two, or is a level of its own where axes stay whole; one of a
    single device is not cut at all.
    """
    fine, levels = refine_mesh(mesh_of(12, 1, 2))
    mesh, wholes = whole(mesh_of(6, 1, 2))

    assert fine.names == ("data.0", "data.1", "data.2", "expert")
    assert [(level.ways, level.of) for level in levels] == [(3, 0), (2, 0), (2, 0), (2, 2)]
    assert mesh.sizes == (6, 1, 2)
    assert [(level.axis, level.ways) for level in wholes] == [(0, 6), (2, 2)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [(12,), (2, 3)])
def test_meshes_need_be_no_power_of_two(sizes, order):
    """On 6 and 12 devices every level cuts half of an MLP's products at least, and the step is shorter than on one."""
    graph, (mesh, levels) = mlp(batch=12 * 1024, hidden=12 * 256, ffn=12 * 1024), refine_mesh(mesh_of(*sizes))
    products = [number for number, op in enumerate(graph.ops) if op.precision]
    alone = plan_of(graph, mesh, [[NONE] * len(mesh.sizes) for _ in graph.ops])

    plan = recursive_plan(graph, mesh, levels, order=order)

    assert ((plan.served[products] != NONE).mean(axis=0) >= 0.5).all()
    assert cost_of(plan).step_time_s < cost_of(alone).step_time_s


def elementwise(size, **words):
    """A source of `size` by 5, and one operator on it."""
    graph = GraphBuilder(name="elementwise")
    source = graph.source(INPUT, "x", (size, 5), 1e6, TensorKind.DATA)
    result = graph.tensor("y", (size, 5), 1e6, TensorKind.ACTIVATION)
    graph.op("op", "any", (source,), (result,), rule_of("a b -> a b", {"a": size, "b": 5}, **words))
    return graph.done()


def test_parts_of_an_axis_cut_what_the_axis_cannot():
    """Six rows can't be cut by an axis of four, but by one of its halves."""
    graph, mesh = elementwise(6), mesh_of(4)

    by_axis, by_parts = (recursive_plan(graph, *cut(mesh)) for cut in (whole, refine_mesh))

    assert by_axis.served[1].tolist() == [NONE]
    assert by_parts.served[1].tolist() == [0, NONE]


def test_levels_cut_what_earlier_ones_left():
    """Twelve rows are cut by three, two and two, and then no more."""
    plan = recursive_plan(elementwise(12), *refine_mesh(mesh_of(2, 12)))

    assert sorted(plan.served[1].tolist()) == [NONE, 0, 0, 0]


def product(pattern, *, blocked=()):
    """A source x, a heavy operator that writes y of 8 by 6, whose rows alone can be cut, and one that reads it."""
    graph, sizes = GraphBuilder(name="product"), {"a": 8, "b": 6, "c": 16}
    x = graph.source(INPUT, "x", (8, 6), 1e6, TensorKind.DATA)
    y = graph.tensor("y", (8, 6), 1e6, TensorKind.ACTIVATION)
    heavy = rule_of("a b -> a b", sizes, blocked=("b",))
    graph.op("heavy", "any", (x,), (y,), heavy, flop=1e15, precision="bf16")
    rule = rule_of(pattern, sizes, blocked=blocked)
    z = graph.tensor("z", rule.result_shape(0), 1e6, TensorKind.ACTIVATION)
    graph.op("reader", "any", (y,), (z,), rule)
    return graph.done()


def price_s(graph):
    """The price of the last operator once the heavy one has been visited, on two devices; and their mesh."""
    mesh, (level,) = refine_mesh(mesh_of(2))
    cut = _Cut(_Progress(graph, mesh), level)
    cut.visit("weight")
    return cut._price_s(2), mesh


def test_the_price_of_what_costs_more_than_a_redistribution():
    """What would have to add up a long result pays that to take the rows as they lie, less an exchange of columns.

    The heavy operator leaves y by rows. Its reader sums over rows into z of 6 by 16: by rows it works half as long and
    scatters z; by columns it works half as long and exchanges half of y; both are better than to work alone.
    """
    found_s, mesh = price_s(product("a b -> b c"))
    scatter_s = mesh.seconds(OpKind.REDUCE_SCATTER, 6 * 16 * 1e6, (0,))
    exchange_s = mesh.seconds(OpKind.ALL_TO_ALL, 8 * 6 * 1e6 / 2, (0,))
    (device,) = mesh.cluster.devices
    by_rows_s = (24 + 96) * 1e6 / device.memory_bandwidth_bytes_per_s + scatter_s
    by_columns_s = (24 + 48) * 1e6 / device.memory_bandwidth_bytes_per_s + exchange_s

    assert found_s == pytest.approx(by_rows_s - by_columns_s)
    assert found_s > 0


def test_the_price_of_what_fits_and_of_what_cannot():
    """What works best on the rows as they lie has no price; what needs whole columns can't avoid a redistribution."""
    assert price_s(product("a b -> a b"))[0] == 0.0
    assert math.isinf(price_s(product("a b -> a b", blocked=("a",)))[0])
