"""Steps that ranks compile and run: a rank lowers a step, begins it, and runs it repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoweredStep:
    """Step that JAX has lowered for all devices of a mesh.

    Attributes:
        program: Lowered program, each array of which is a parameter, also those that nothing reads.
        make: Function that makes the values of all arguments, on the devices of the mesh.
        replaced: Number of the result that replaces an argument in the next run, by the argument's number among leaves.
        counter: Number of the argument that is the number of the step, from 1; None without one.
    """

    program: Any
    make: Callable[[], tuple[Any, ...]]
    replaced: Mapping[int, int]
    counter: int | None = None

    def begin(self, compiled: Any) -> RunningStep:
        """Make the values of all arguments."""
        leaves, tree = jax.tree.flatten(self.make())
        jax.block_until_ready(leaves)
        return RunningStep(compiled=compiled, tree=tree, arguments=leaves, replaced=self.replaced, counter=self.counter)


@dataclass(kw_only=True, slots=True)
class RunningStep:
    """Compiled step with its arguments, of which each run replaces those that the step keeps.

    Attributes:
        compiled: Compiled program.
        tree: Structure of the arguments.
        arguments: Leaves of the arguments, in the order of the program's parameters.
        replaced: Number of the result that replaces a leaf, by the leaf's number.
        counter: Number of the leaf that is the number of the step; None without one.
        number: Number of steps so far.
    """

    compiled: Any
    tree: Any
    arguments: list[Any]
    replaced: Mapping[int, int]
    counter: int | None
    number: int = 0

    def run(self) -> float | None:
        """Run one step to its end, and return the first number among its results, its loss; None without one."""
        self.number += 1
        if self.counter is not None:
            self.arguments[self.counter] = np.float32(self.number)
        results = jax.tree.leaves(self.compiled(*jax.tree.unflatten(self.tree, self.arguments)))
        jax.block_until_ready(results)
        for argument, result in self.replaced.items():
            self.arguments[argument] = results[result]
        kept = set(self.replaced.values())
        told = (each for number, each in enumerate(results) if number not in kept and _is_number(each))
        return next((float(np.asarray(each.addressable_data(0))) for each in told), None)


def _is_number(result: Any) -> bool:
    return result.shape == () and bool(jnp.issubdtype(result.dtype, jnp.floating))
