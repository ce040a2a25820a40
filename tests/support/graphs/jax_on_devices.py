"""Program that plans small zoo programs on eight virtual devices, runs some, and prints the results as JSON.

It needs its own process, because the number of devices is fixed when JAX starts. Its arguments are the programs to
run. XLA's optimisation is mostly off, so that compiling is quick.
"""

import json
import os
import sys
from collections import Counter

from tests.support.quick_xla import on_devices

os.environ["XLA_FLAGS"] = on_devices(8)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax._src.interpreters.mlir import make_ir_context  # no public name registers the dialects of StableHLO and Shardy
from jaxlib.mlir import ir

from benchmarks.support.planned_numbers import difference
from benchmarks.support.referee_cases import widened
from benchmarks.zoo import FACTORIES
from tuner.planners import plan_jax
from tuner.planners.planning import PlannerOptions

SMALL = [name for name in FACTORIES if "small" in name and name != "gemma_small"]
"""Small programs; the layers of Gemma without a loop run in its loop too."""


def plan_step(name):
    """Plan a program for D-Rec; the best plan sends nothing of so small a step."""
    function, arguments, donated = FACTORIES[name]()
    arguments = jax.tree.map(widened, arguments)
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"))
    options = PlannerOptions(planner="recursive", whole_axes=True)
    return function, arguments, plan_jax(function, *arguments, mesh=mesh, donated=donated, options=options)


def describe(function, arguments, plan):
    """Return whether a plan's trees are the caller's, and counts of its sharded outputs and its constraints."""
    outputs = jax.tree.leaves(plan.out_shardings)
    return {
        "cut": sum(not sharding.is_fully_replicated for sharding in outputs),
        "is_in_tree": jax.tree.structure(plan.in_specs) == jax.tree.structure(arguments),
        "is_out_tree": jax.tree.structure(plan.out_specs) == jax.tree.structure(jax.eval_shape(function, *arguments)),
        "constraints": len(plan.constraints),
        "missing": _missing(plan),
    }


def run(function, arguments, plan):
    """Run a planned step; return its largest relative error, and how many donated arrays it had and did not take."""
    placed = []

    def planned(*values):
        placed.extend(jax.device_put(values, plan.in_shardings))
        shardings = {"in_shardings": plan.in_shardings, "out_shardings": plan.out_shardings}
        return jax.jit(plan.function, **shardings, donate_argnums=plan.donate_argnums)(*placed)

    error = difference(function, planned, arguments)
    donated = jax.tree.leaves([placed[number] for number in plan.donate_argnums])
    return {"error": error, "donated": len(donated), "kept": sum(not leaf.is_deleted() for leaf in donated)}


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


if __name__ == "__main__":
    steps = {name: plan_step(name) for name in SMALL}
    described = {name: describe(*step) for name, step in steps.items()}
    run_ones = {name: run(*steps[name]) for name in sys.argv[1:]}
    print(json.dumps({"described": described, "run": run_ones}))  # noqa: T201 # what the test reads
