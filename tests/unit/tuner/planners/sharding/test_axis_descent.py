"""Descent along the axes: it makes no plan worse, and gets a single axis right."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import INPUT, STATE, GraphBuilder, TensorKind
from costmodels.sharding.plan import cost_of, violations
from tests.support.graphs.random_graphs import all_plans, choices, graphs, mesh_of, meshes, num_plans, plan_of, plans
from tests.support.graphs.small_graphs import mlp
from tuner.planners.sharding.axis_descent import descend
from tuner.planners.sharding.recursive import recursive_plan, refine_mesh, whole
from tuner.planners.sharding.sharding_milp import shard_by_milp
from tuner.planners.sharding.sharding_terms import MOST_READERS, ShardingTerms, rows_beside

MOST_PLANS = 2000


def rows_of(plan):
    """The factors that the axes serve in each operator."""
    return [tuple(row) for row in plan.served.tolist()]


@given(graph=graphs(max_ops=4), mesh=meshes(max_axes=2))
@settings(max_examples=40)
def test_the_tables_hold_every_plan(graph, mesh):
    """With every row open the cheapest combination is the best of all plans there are."""
    assume(num_plans(graph, mesh) <= MOST_PLANS)
    terms = ShardingTerms(graph, mesh)
    assume(terms.is_exact)
    rows = [tuple(choices(op, mesh.sizes)) for op in graph.ops]
    found = terms.least(rows, [own[0] for own in rows])

    least_s = min(cost_of(plan).step_time_s for plan in all_plans(graph, mesh))
    assert found.kept or found.cost_s == pytest.approx(least_s, rel=1e-9, abs=1e-15)


@given(plan=plans())
def test_no_plan_gets_worse(plan):
    """From anywhere, the plan at the end can run, costs no more, and a second descent leaves it alone."""
    terms = ShardingTerms(plan.graph, plan.mesh)
    found = descend(plan, terms).plan

    assert violations(found) == ()
    assert cost_of(found).step_time_s <= cost_of(plan).step_time_s * (1 + 1e-9)
    assert cost_of(descend(found, terms).plan).step_time_s == pytest.approx(cost_of(found).step_time_s, rel=1e-9)


@given(graph=graphs(max_ops=5), mesh=meshes(max_axes=1))
@settings(max_examples=25)
def test_one_axis_ends_with_the_optimum(graph, mesh):
    """On a mesh of one axis the integer program finds nothing better."""
    own_mesh, levels = whole(mesh)
    found = descend(recursive_plan(graph, own_mesh, levels), ShardingTerms(graph, own_mesh))

    assume(found.is_optimum)  # which it is unless very many read a tensor
    least_s = shard_by_milp(graph, own_mesh).best.cost
    assert cost_of(found.plan).step_time_s <= least_s * (1 + 1e-7) + 1e-9


@given(plan=plans(), closed=st.integers(0, 2**16))
@settings(max_examples=40)
def test_what_is_closed_stays(plan, closed):
    """An operator that may not choose what an axis serves keeps it."""

    def is_open(op, axis):
        return bool(closed >> ((3 * op + axis) % 16) & 1)

    found = descend(plan, ShardingTerms(plan.graph, plan.mesh), is_open=is_open).plan

    for op, axis in np.argwhere(found.served != plan.served).tolist():
        assert is_open(op, axis)


@given(plan=plans())
@settings(max_examples=40)
def test_the_rows_beside_are_all_that_differ_in_one_axis(plan):
    """They are the choices of the operator that agree with its row on all other axes."""
    for op, row in zip(plan.graph.ops, rows_of(plan), strict=True):
        for axis in range(len(row)):
            rest = row[:axis] + row[axis + 1 :]
            others = [one for one in choices(op, plan.mesh.sizes) if one[:axis] + one[axis + 1 :] == rest]

            assert sorted(rows_beside(op.rule, plan.mesh.sizes, row, axis)) == sorted(others)


def test_what_is_charged_beside_counts():
    """A charge that outweighs a step keeps every operator from what it is for."""
    graph, mesh = mlp(num_layers=1), mesh_of(8)
    own_mesh, levels = refine_mesh(mesh)
    plan = recursive_plan(graph, own_mesh, levels)

    found = descend(plan, ShardingTerms(graph, own_mesh), charge=lambda _, row: 100.0 * sum(one != -1 for one in row))

    assert (found.plan.served == -1).all()


@given(data=st.data())
@settings(max_examples=20)
def test_a_tensor_that_very_many_read_makes_no_plan_worse(data):
    """Where the tables are an approximation, the cost itself decides."""
    graph = widely_read(num_readers=MOST_READERS + 2)
    mesh = mesh_of(2, 2)
    rows = [data.draw(st.sampled_from(choices(op, mesh.sizes))) for op in graph.ops]
    plan, terms = plan_of(graph, mesh, rows), ShardingTerms(graph, mesh)

    assert not terms.is_exact
    assert cost_of(descend(plan, terms).plan).step_time_s <= cost_of(plan).step_time_s


def widely_read(num_readers):
    """One tensor that so many products read, half of them along each dim."""
    graph = GraphBuilder(name="wide")
    sizes = {"a": 512, "b": 512, "c": 64}
    x = graph.source(INPUT, "x", (512, 512), 2, TensorKind.DATA, ("a", "b"))
    for number in range(num_readers):
        side = "a" if number % 2 else "b"
        weight = graph.source(STATE, f"w{number}", (512, 64), 2, TensorKind.PARAMETER, (side, "c"))
        result = graph.tensor(f"y{number}", (512, 64), 2, TensorKind.ACTIVATION)
        other = "b" if number % 2 else "a"
        rule = rule_of(f"a b, {side} c -> {other} c", sizes)
        graph.op(f"product{number}", "product", (x, weight), (result,), rule, flop=1e9, precision="bf16")
    return graph.done()
