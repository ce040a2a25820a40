"""Application of a plan to a JAX function: all layouts are pinned, so that XLA communicates as the plan says.

The function's jaxpr is evaluated again, equation by equation in the order of the frontend (`frontends/jax/flat.py`).
Sharding constraints are added to the results of every operator, and to operands that it reads in another layout. A
tensor that several operators read in one layout is constrained once. The new function computes nothing beyond the
original. Arguments that differ from those of planning (other shapes, another function) are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from costmodels.sharding.exports.axis_order import axis_orders
from costmodels.sharding.exports.jax_evaluation import evaluated
from costmodels.sharding.exports.jax_layouts import jax_mesh
from costmodels.sharding.exports.jax_placing import Placing
from costmodels.sharding.frontends.jax.graph import flatten_trace
from costmodels.sharding.frontends.jax.program import Program, trace_function
from costmodels.sharding.plan import Plan


def apply_plan(function: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """Return a function that computes the same with every layout of the plan pinned, for use under `jax.jit`.

    It needs no devices: the constraints name axes, and the shardings of the arguments determine the devices.

    Args:
        function: Function that was planned (`frontends.jax.graph.graph_of_jax`).
        plan: Sharding plan of the function.
    """
    orders = axis_orders(plan)

    @functools.wraps(function)  # lets callers donate arguments by name
    def planned(*arguments: Any) -> Any:
        program = trace_function(function, *arguments)
        outputs = evaluated(Placing.of(program, orders), program, jax.tree_util.tree_leaves(arguments))
        return jax.tree_util.tree_unflatten(program.out_tree, outputs)

    return planned


def specs_of(program: Program, plan: Plan) -> tuple[tuple[Any, ...], Any]:
    """Return the PartitionSpecs of a planned program: a tree like its arguments, and one like its outputs."""
    run = Placing.of(program, axis_orders(plan))
    inputs = [run.layouts.spec(run.lying(value)) for value in run.arguments]
    outputs = [run.layouts.spec(run.returned(value)) for value in run.results]
    trees: tuple[Any, ...] = jax.tree_util.tree_unflatten(program.in_tree, inputs)
    return trees, jax.tree_util.tree_unflatten(program.out_tree, outputs)


def on_mesh(mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """Return a tree of PartitionSpecs as shardings on a mesh."""
    return jax.tree_util.tree_map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )


def shardings(
    function: Callable[..., Any], plan: Plan, *arguments: Any, mesh: Mesh | None = None
) -> tuple[tuple[Any, ...], Any]:
    """Return `in_shardings` and `out_shardings` of a planned function for `jax.jit`."""
    inputs, outputs = specs_of(trace_function(function, *arguments), plan)
    own_mesh = jax_mesh(plan) if mesh is None else mesh
    return on_mesh(own_mesh, inputs), on_mesh(own_mesh, outputs)


def outputs_of(program: Program) -> tuple[tuple[str, str | None], ...]:
    """Return the path of each output of a function, and the name of its tensor in the graph."""
    flat, _, outputs = flatten_trace(program)
    return tuple(
        (path, flat.values[value].name if flat.values[value].varies else None)
        for path, value in zip(program.outputs, outputs, strict=True)
    )
