"""State what plans of JAX functions pin, and what a planned function computes; test_referee.py runs them sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.support.sent_bytes import planned_bytes
from benchmarks.zoo import shape_of
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.exports.jax_apply import apply_plan, outputs_of
from costmodels.sharding.exports.jax_layouts import jax_mesh
from costmodels.sharding.exports.jax_specs import jax_specs
from costmodels.sharding.frontends.jax.graph import graph_of_jax
from costmodels.sharding.frontends.jax.program import trace_function
from costmodels.sharding.plan import NONE, Plan, cost_of
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.support.graphs.named_plans import mesh_of
from tuner.planners.toast.by_hand import data_parallel


def product(x, weight):
    """A product."""
    return {"y": x @ weight}


ARGUMENTS = (shape_of(8, 16), shape_of(16, 32))


def served(graph, mesh, **factor_of):
    """A plan by sizes: JAX's factors have no names."""
    rows = [
        [
            next((factor for factor in op.rule.cuttable if op.rule.factors[factor].size == factor_of[name]), NONE)
            for name in mesh.names
        ]
        for op in graph.ops
    ]
    return Plan(graph=graph, mesh=mesh, served=np.array(rows))


def test_specs_of_a_product():
    """Rows along one axis and the sum along the other: what is read and written has its spec, the sum a constraint."""
    plan = served(graph_of_jax(product, *ARGUMENTS), mesh_of(data=2, model=4), data=8, model=16)
    specs = jax_specs(plan, outputs_of(trace_function(product, *ARGUMENTS)))

    assert specs.mesh == {"data": 2, "model": 4}
    assert specs.arguments == {"x": (("data",), ("model",)), "weight": (("model",), ())}
    assert specs.outputs == {"y": (("data",), ())}
    (constraint,) = specs.constraints
    assert (constraint.op, constraint.at, constraint.spec) == ("dot_general", "def", (("data",), ()))


def test_what_a_loop_carries_on_is_paid_by_every_iteration():
    """A loop begins with whole rows and ends with a part of them: each iteration gathers them for the next."""

    def step(weights, x):
        return lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]

    arguments = (shape_of(3, 16, 16, dtype=jnp.float32), shape_of(8, 16, dtype=jnp.float32))
    graph = graph_of_jax(step, *arguments)
    is_cut = {"tanh": 0, "next": 0}
    rows = [[is_cut.get(op.primitive, NONE)] for op in graph.ops]
    plan = Plan(graph=graph, mesh=mesh_of(data=8), served=np.array(rows))

    gathered_bytes = 3 * 8 * 16 * 4 * 7 / 8
    assert planned_bytes(cost_of(plan), plan.mesh) == {("gathered", ("data",)): gathered_bytes}


def test_no_constraint_keeps_a_gradient_from_its_transposition():
    """Data parallelism pins the gradient of a weight, a product, behind its transposition: XLA can make the transposed
    product itself.
    """

    def step(params, x):
        return params - jax.grad(lambda params: jnp.sum(jnp.tanh(x @ params)))(params)

    arguments = (shape_of(16, 32, dtype=jnp.float32), shape_of(64, 16, dtype=jnp.float32))
    plan = data_parallel(graph_of_jax(step, *arguments, donated=("params",)), mesh_of(data=8))
    equations = jax.make_jaxpr(apply_plan(step, plan))(*arguments).jaxpr.eqns
    maker = {var: each for each in equations for var in each.outvars}
    (turned,) = (each for each in equations if each.primitive.name == "transpose")
    (after,) = (each for each in equations if turned.outvars[0] in each.invars)

    assert maker[turned.invars[0]].primitive.name == "dot_general"
    assert after.primitive.name == "sharding_constraint"


def test_a_plan_of_another_function_is_refused():
    """A plan and a function that don't belong together are told apart before anything is computed."""
    plan = served(graph_of_jax(product, *ARGUMENTS), mesh_of(data=8), data=8)

    with pytest.raises(ConfigError, match="belongs to another function or other shapes than product"):
        apply_plan(product, plan)(jax.numpy.ones((4, 16)), jax.numpy.ones((16, 32)))


def test_too_few_devices_are_told():
    """A mesh that JAX has no devices for is refused with both counts."""
    plan = served(graph_of_jax(product, *ARGUMENTS), mesh_of(data=8), data=8)

    with pytest.raises(ConfigError, match="needs 8 devices; 1 are here"):
        jax_mesh(plan, jax.devices()[:1])


def test_calls_loops_and_branches_are_computed():
    """Checkpoints, custom derivatives, loops with constant carries, and branches do what they did."""

    def layer(x, weight):
        return jax.nn.relu(jnp.tanh(x @ weight))

    def loss(weights, x):
        def through(carry, weight):
            x, count, fixed = carry
            return (jax.checkpoint(layer)(x, weight) + fixed, count + 1, fixed), jnp.sum(x)

        (x, count, _), sums = lax.scan(through, (x, 0, jnp.float32(0.5)), weights, reverse=True)
        return lax.cond(count > 1, jnp.mean, jnp.sum, x) + jnp.sum(sums)

    step = jax.value_and_grad(loss)
    weights, x = jnp.linspace(-1.0, 1.0, 48).reshape(3, 4, 4), jnp.linspace(0.0, 1.0, 8).reshape(2, 4)
    graph = graph_of_jax(step, weights, x)
    mesh = DeviceMesh(names=("data",), sizes=(1,), cluster=find_cluster("dgx-a100"))
    plan = Plan(graph=graph, mesh=mesh, served=np.full((len(graph.ops), 1), NONE))

    found = jax.jit(apply_plan(step, plan))(weights, x)

    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(step(weights, x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@jax.custom_vjp
def clipped(x):
    """A square with another derivative than its own."""
    return x * x


clipped.defvjp(lambda x: (x * x, x), lambda x, given: (42.0 * x * given,))


@jax.custom_jvp
def straight(x):
    """Signs with the derivative of the identity."""
    return jnp.sign(x)


straight.defjvp(lambda primals, tangents: (straight(primals[0]), tangents[0]))


def test_derivatives_of_the_users_own_are_kept():
    """The gradient of a planned function is that of the function, inside calls and loops too, where parts of it have a
    derivative of the user's own.
    """

    def step(weights, x, rows):
        def layer(x, weight):
            return jax.jit(lambda x: clipped(jax.nn.relu(x)) + straight(x))(x @ weight), None

        y, _ = lax.scan(layer, x, weights)
        return jnp.sum(clipped(y)[rows])

    chance = np.random.default_rng(0)
    weights, x = (jnp.asarray(0.1 * chance.standard_normal(shape), jnp.float32) for shape in ((2, 16, 16), (8, 16)))
    rows = jnp.arange(4)
    graph = graph_of_jax(step, weights, x, rows)
    mesh = DeviceMesh(names=("data",), sizes=(1,), cluster=find_cluster("dgx-a100"))
    planned = apply_plan(step, Plan(graph=graph, mesh=mesh, served=np.full((len(graph.ops), 1), NONE)))
    gradient = jax.jit(jax.grad(planned, argnums=(0, 1)))(weights, x, rows)
    wanted = jax.grad(step, argnums=(0, 1))(weights, x, rows)

    for found, right in zip(gradient, wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-7)
    assert float(jnp.abs(wanted[0]).max()) > 0.1
