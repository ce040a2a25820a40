"""Program that plans zoo programs on eight virtual devices, runs them, and prints the results as JSON.

It needs its own process, because the number of devices is fixed when JAX starts. Its arguments are programs of the
zoo. XLA's optimisation is mostly off, so that compiling is quick.
"""

import json
import os
import sys
from collections import Counter

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters.mlir import make_ir_context  # no public name registers the dialects of StableHLO and Shardy
from jaxlib.mlir import ir

from benchmarks.zoo import FACTORIES
from tuner.planners import plan_jax
from tuner.planners.planning import PlannerOptions


def run(name):
    """Plan and run one program; return its largest error, and counts of sharded, donated and constrained arrays."""
    function, arguments, donated = FACTORIES[name]()
    arguments = jax.tree.map(_widened, arguments)
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"))
    # D-Rec's plan: the best one sends nothing of so small a step
    options = PlannerOptions(planner="recursive", whole_axes=True)
    plan = plan_jax(function, *arguments, mesh=mesh, donated=donated, options=options)
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: _random(leaf, rng), arguments)
    expected = jax.jit(function)(*values)

    step = jax.jit(
        plan.function,
        in_shardings=plan.in_shardings,
        out_shardings=plan.out_shardings,
        donate_argnums=plan.donate_argnums,
    )
    placed = jax.device_put(values, plan.in_shardings)
    found = step(*placed)
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    given = jax.tree.leaves([placed[number] for number in plan.donate_argnums])
    return {
        "error": max(_error(one, other) for one, other in pairs),
        "cut": sum(not one.sharding.is_fully_replicated for one, _ in pairs),
        "is_in_tree": jax.tree.structure(plan.in_specs) == jax.tree.structure(arguments),
        "is_out_tree": jax.tree.structure(plan.out_specs) == jax.tree.structure(expected),
        "donated": len(given),
        "kept": sum(not leaf.is_deleted() for leaf in given),
        "constraints": len(plan.constraints),
        "missing": _missing(plan),
    }


def _missing(plan):
    """Return the constraints that have no place in the annotated text.

    A tensor that is read in another layout than it is stored is pinned twice in sequence; one that is reduced, once.
    """
    shapes = {tensor.name: tensor.shape for tensor in plan.planned.plan.graph.tensors}
    wanted = {(each.at, each.tensor, str(each.spec)): each for each in plan.constraints}
    counts = Counter((each.at, shapes[each.tensor], _axes(each.spec)) for each in wanted.values())
    with make_ir_context():
        module = ir.Module.parse(plan.shardy())
        there = Counter(_pins(module.operation))
    return [str(key) for key in (counts - there)]


def _pins(operation):
    """Yield all constraints of a text: `read` if it changes an earlier one, else `written`; shape; sharding."""
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                if op.name == "sdy.sharding_constraint":
                    before = _pinned_before(op.operands[0])
                    sharding = str(op.attributes["sharding"])
                    shape = tuple(ir.RankedTensorType(op.results[0].type).shape)
                    yield "read" if before not in (None, sharding) else "written", shape, _parsed(sharding)
                yield from _pins(op.operation)


def _pinned_before(value):
    """Return the sharding of an earlier constraint on the same value, or None."""
    if isinstance(value.owner, ir.Block):
        return None  # what a loop gets
    owner = value.owner
    if owner.name == "stablehlo.optimization_barrier":
        results = [result == value for result in owner.results]
        return _pinned_before(owner.operands[results.index(True)])
    return str(owner.attributes["sharding"]) if owner.name == "sdy.sharding_constraint" else None


def _axes(spec):
    return tuple(() if each is None else (each,) if isinstance(each, str) else tuple(each) for each in spec)


def _parsed(sharding):
    """Parse the axes of each dim of `#sdy.sharding<@mesh, [{"a", "b"}, {}]>`."""
    dims = sharding[sharding.index("[") + 1 : sharding.rindex("]")]
    return tuple(
        tuple(axis.strip().strip('"') for axis in dim.strip("{} ").split(",") if axis.strip())
        for dim in (dims.split("}, {") if dims else [])
    )


def _widened(leaf):
    """Convert bfloat16 to float32, so that another order of additions changes little."""
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if leaf.dtype == jnp.bfloat16 else leaf.dtype)


def _random(leaf, rng):
    """Draw random arguments; moments stay away from zero, where Adam's first step is the sign of a gradient."""
    if np.issubdtype(leaf.dtype, np.integer):
        return rng.integers(0, 5, leaf.shape).astype(leaf.dtype)
    return rng.uniform(0.02, 0.2, leaf.shape).astype(leaf.dtype)


def _error(one, other):
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    assert np.isfinite(one).all(), "the programs compute numbers"
    assert np.isfinite(other).all(), "the programs compute numbers"
    return float(np.max(np.abs(one - other)) / max(np.max(np.abs(other)), 1e-30))


if __name__ == "__main__":
    print(json.dumps({name: run(name) for name in sys.argv[1:]}))  # noqa: T201 # what the test reads
