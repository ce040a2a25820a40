"""A user's step as a rank runs it: the factory's function, with every layout of the candidate's plan pinned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from costmodels.sharding.exports.jax_apply import apply_plan, on_mesh, specs_of
from costmodels.sharding.exports.jax_layouts import jax_mesh
from costmodels.sharding.frontends.factories import step_of_factory
from costmodels.sharding.frontends.jax.program import Program, trace_function
from costmodels.sharding.plan import Plan
from trials.jax_training.own_step.values import make_value
from trials.jax_training.steps import LoweredStep
from trials.own_step import OwnStep


def lower_own_step(own: OwnStep, plan: Plan, *, seed: int) -> LoweredStep:
    """Import a user's step, and lower it as a plan shards it; `seed` is that of the values of its arguments.

    Raises:
        ConfigError: The factory can't be imported here, or returns another function than it was planned with.
    """
    function, arguments, donated = step_of_factory(
        own.factory, option=own.key, folder=own.folder, micro_batches=own.micro_batches
    )
    program = trace_function(function, *arguments, donated=donated)
    in_specs, out_specs = specs_of(program, plan)
    mesh = jax_mesh(plan)
    shardings = on_mesh(mesh, in_specs)
    jitted = jax.jit(
        apply_plan(function, plan),
        in_shardings=shardings,
        out_shardings=on_mesh(mesh, out_specs),
        donate_argnums=_given_up(program, arguments),
        keep_unused=True,
    )
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), arguments)

    def make() -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(arguments)
        each = zip(program.arguments, leaves, jax.tree.leaves(shardings), strict=True)
        made: tuple[Any, ...] = jax.tree.unflatten(
            tree, [make_value(argument, leaf, seed, sharding) for argument, leaf, sharding in each]
        )
        return made

    replaced = {number: one.kept_by for number, one in enumerate(program.arguments) if one.kept_by is not None}
    return LoweredStep(program=jitted.lower(*shapes), make=make, replaced=replaced)


def _given_up(program: Program, arguments: Sequence[Any]) -> tuple[int, ...]:
    """Return the donated arguments of which every leaf is replaced by an output, so that a step can be repeated."""
    counts = [len(jax.tree.leaves(argument)) for argument in arguments]
    begins = np.concatenate([[0], np.cumsum(counts)]).tolist()
    return tuple(
        number
        for number in program.donated
        if all(leaf.kept_by is not None for leaf in program.arguments[begins[number] : begins[number + 1]])
    )
