"""XLA sends what the plan says for planned JAX programs, and loops, calls and branches compute what they did."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.zoo import shape_of
from costmodels.device_mesh import DeviceMesh
from costmodels.frontends.jax_graph import graph_of_jax
from costmodels.frontends.jax_program import traced
from costmodels.plan import NONE, Plan
from costmodels.plan_exports.jax_apply import apply_plan, jax_mesh, outputs_of
from costmodels.plan_exports.jax_specs import jax_specs
from hardware.cluster import find_cluster
from hardware.errors import ConfigError
from tests.costmodels.frontends.named_plans import mesh_of

ROOT = Path(__file__).resolve().parents[3]


def on_devices(*arguments):
    """What `jax_on_devices` prints."""
    command = [sys.executable, "-m", "tests.costmodels.jax_plans.jax_on_devices", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


SCORES_BYTES = 32 * 256 * 8 * 4 * 7 / 8
"""What a device sends of the router's scores in a gather: XLA can't cut `top_k` along any dim."""


@pytest.mark.parametrize("planner", ["recursive", "descent"])
def test_xla_sends_what_the_plan_says(planner):
    """Reduced bytes are the plan's to 0.5%, in any plan; gathers and exchanges to 5% where no order of axes is broken.

    What is left to tolerances: XLA cuts constants (masks, positions) as it likes, and gathers norms' statistics wide,
    and what `top_k` reads. Where a place is broken XLA may only send more. With one axis none can be.
    """
    one_axis = ["transformer@data=8"] if planner == "recursive" else []
    programs = (*one_axis, "transformer@data=2,model=4", "experts@data=2,model=4")
    plans = on_devices(*(f"{program}@{planner}" for program in programs))

    assert not any(plans[f"{program}@{planner}"]["broken"] for program in one_axis)
    for name, found in plans.items():
        planned, compiled = found["planned"], found["compiled"]
        assert planned["reduced"] > 1e5
        assert compiled["reduced"] == pytest.approx(planned["reduced"], rel=5e-3)
        for kind in ("gathered", "exchanged"):
            sent, expected = compiled.get(kind, 0.0), planned.get(kind, 0.0)
            if found["broken"]:
                assert sent >= 0.95 * expected
                continue
            beyond = SCORES_BYTES if name.startswith("experts") and kind == "gathered" else 0.0
            assert expected * 0.95 - 1e3 <= sent <= (expected + beyond) * 1.05 + 1e3


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
    specs = jax_specs(plan, outputs_of(traced(product, *ARGUMENTS)))

    assert specs.mesh == {"data": 2, "model": 4}
    assert specs.arguments == {"x": (("data",), ("model",)), "weight": (("model",), ())}
    assert specs.outputs == {"y": (("data",), ())}
    (constraint,) = specs.constraints
    assert (constraint.op, constraint.at, constraint.spec) == ("dot_general", "def", (("data",), ()))


def test_a_plan_of_another_function_is_refused():
    """A plan and a function that don't belong together are told apart before anything is computed."""
    plan = served(graph_of_jax(product, *ARGUMENTS), mesh_of(data=8), data=8)

    with pytest.raises(ConfigError, match="is a plan of another function, or other shapes, than product"):
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
