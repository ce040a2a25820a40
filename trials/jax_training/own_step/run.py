"""A user's step as a rank runs it: the factory's function, with every layout of the candidate's plan pinned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from costmodels.sharding.exports.jax_apply import apply_plan, on_mesh, specs_of
from costmodels.sharding.exports.jax_layouts import jax_mesh
from costmodels.sharding.frontends.factories import step_of_factory
from costmodels.sharding.frontends.jax.program import Program, trace_function
from costmodels.sharding.plan import Plan
from trials.jax_training.own_step.values import make_value
from trials.own_step import OwnStep


def lower_own_step(own: OwnStep, plan: Plan, *, seed: int) -> LoweredOwnStep:
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
    return LoweredOwnStep(
        program=jitted.lower(*shapes), traced=program, arguments=arguments, shardings=shardings, seed=seed
    )


def _given_up(program: Program, arguments: Sequence[Any]) -> tuple[int, ...]:
    """Return the donated arguments of which every leaf is replaced by an output, so that a step can be repeated."""
    counts = [len(jax.tree.leaves(argument)) for argument in arguments]
    begins = np.concatenate([[0], np.cumsum(counts)]).tolist()
    return tuple(
        number
        for number in program.donated
        if all(leaf.kept_by is not None for leaf in program.arguments[begins[number] : begins[number + 1]])
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoweredOwnStep:
    """Lowered step; see `trials.jax_training.steps.LoweredStep`.

    Attributes:
        program: Lowered program.
        traced: Trace of the user's function.
        arguments: Arguments as the factory returns them.
        shardings: Sharding of each leaf of the arguments, as a tree like them.
        seed: Seed of the values.
    """

    program: Any
    traced: Program
    arguments: tuple[Any, ...]
    shardings: Any
    seed: int

    def begin(self, compiled: Any) -> RunningOwnStep:
        """Make the values of all arguments."""
        leaves, tree = jax.tree.flatten(self.arguments)
        shardings = jax.tree.leaves(self.shardings)
        values = [
            make_value(argument, leaf, self.seed, sharding)
            for argument, leaf, sharding in zip(self.traced.arguments, leaves, shardings, strict=True)
        ]
        jax.block_until_ready(values)
        replaced = {
            number: each.kept_by for number, each in enumerate(self.traced.arguments) if each.kept_by is not None
        }
        return RunningOwnStep(compiled=compiled, tree=tree, arguments=values, replaced=replaced)


@dataclass(kw_only=True, slots=True)
class RunningOwnStep:
    """Compiled step with its arguments, of which each run replaces those that the step keeps.

    Attributes:
        compiled: Compiled program.
        tree: Structure of the arguments.
        arguments: Leaves of the arguments.
        replaced: Number of the output that replaces a leaf, by the leaf's number.
    """

    compiled: Any
    tree: Any
    arguments: list[Any]
    replaced: Mapping[int, int]

    def run(self) -> float | None:
        """Run one step to its end, and return the first number among its results; None without one."""
        results = jax.tree.leaves(self.compiled(*jax.tree.unflatten(self.tree, self.arguments)))
        jax.block_until_ready(results)
        for argument, result in self.replaced.items():
            self.arguments[argument] = results[result]
        kept = set(self.replaced.values())
        told = (each for number, each in enumerate(results) if number not in kept and _is_number(each))
        return next((float(np.asarray(each.addressable_data(0))) for each in told), None)


def _is_number(result: Any) -> bool:
    return result.shape == () and bool(jnp.issubdtype(result.dtype, jnp.floating))
