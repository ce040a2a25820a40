"""Gradients of what every iteration of a loop reads: added up behind the loop, as XLA does on accelerators."""

import jax
import jax.numpy as jnp
import pytest

from costmodels.blocks.operator import OpKind
from costmodels.sharding.device_mesh import mesh_of
from costmodels.sharding.frontends.jax.graph import graph_of_jax
from costmodels.sharding.plan import Plan, cost_of
from hardware.cluster_file import find_cluster
from tuner.planners.sharding.class_costs import ClassCosts, encode_rows
from tuner.planners.sharding.sharding_milp import shard_by_milp
from tuner.planners.sharding.sharding_terms import ShardingTerms
from tuner.planners.toast.by_hand import data_parallel

LENGTH = 5


def trained(params, batch):
    """Train a recurrent layer with a weight and a bias."""

    def loss(params):
        def cell(hidden, x):
            hidden = jnp.tanh(x + hidden @ params["w"] + params["b"])
            return hidden, None

        steps = batch.swapaxes(0, 1)
        last, _ = jax.lax.scan(cell, jnp.zeros_like(steps[0]), steps)
        return (last**2).mean()

    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads)


def graph():
    """The graph of the step."""
    shapes = {"w": jax.ShapeDtypeStruct((32, 32), jnp.float32), "b": jax.ShapeDtypeStruct((32,), jnp.float32)}
    return graph_of_jax(trained, shapes, jax.ShapeDtypeStruct((64, LENGTH, 32), jnp.float32), donated=("params",))


def sums(plan):
    """Number of executions of each collective that adds up partial sums in the loop, by its kind."""
    made = {plan.graph.tensors[each.tensor].name: each for each in cost_of(plan).collectives}
    return {name: (each.move.kind, each.times) for name, each in made.items() if name.startswith("grad.")}


def test_a_sum_that_stays_whole_is_taken_once():
    """Data parallelism adds up the gradients of the weight and of the bias once a step, not in every iteration."""
    found = sums(data_parallel(graph(), mesh_of("data=8", find_cluster("dgx-a100"))))

    assert {times for _, times in found.values()} == {1}
    assert {kind for kind, _ in found.values()} == {OpKind.ALL_REDUCE}
    assert len(found) >= 2


def gradient_of(planned):
    """The tensor that a loop adds to the gradient of the weight."""
    (found,) = (
        op.results[0]
        for op in planned.ops
        if op.primitive == "dot_general" and op.times == LENGTH and planned.tensors[op.results[0]].shape == (32, 32)
    )
    return found


def cut_gradient(plan):
    """The plan with the gradient's reader cut, so that its sum is scattered."""
    served = plan.served.copy()
    (use,) = plan.graph.uses[gradient_of(plan.graph)]
    served[use.op] = 0
    return Plan(graph=plan.graph, mesh=plan.mesh, served=served)


def test_a_sum_that_is_scattered_is_taken_in_every_iteration():
    """Where the readers of a gradient want it cut, XLA scatters it inside of the loop."""
    planned = graph()
    whole = data_parallel(planned, mesh_of("data=8", find_cluster("dgx-a100")))
    name = planned.tensors[gradient_of(planned)].name

    assert sums(whole)[name] == (OpKind.ALL_REDUCE, 1)
    assert sums(cut_gradient(whole))[name] == (OpKind.REDUCE_SCATTER, LENGTH)


def test_planners_charge_what_the_plan_costs():
    """Tables, classes and the integer program count the sums of a loop as the plan does."""
    planned, mesh = graph(), mesh_of("data=8", find_cluster("dgx-a100"))
    terms, costs = ShardingTerms(planned, mesh), ClassCosts(planned, mesh, range(len(planned.ops)))
    whole = data_parallel(planned, mesh)
    for plan in (whole, cut_gradient(whole)):
        rows = [tuple(row) for row in plan.served.tolist()]
        exact = cost_of(plan).step_time_s
        choices = [(row,) for row in rows]
        program = shard_by_milp(planned, mesh, allowed=lambda op, choices=choices: choices[op])

        assert terms.least(choices, rows).cost_s == pytest.approx(exact)
        assert costs.figures([encode_rows(row) for row in rows]).step_time_s == pytest.approx(exact)
        assert program.bound == pytest.approx(exact, rel=1e-6)
