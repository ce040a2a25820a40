"""Step of a model of the catalog as a rank runs it: its states by name, the number of the step, and the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from costmodels.sharding.exports.jax_layouts import jax_mesh
from costmodels.sharding.graph import INPUT, STATE
from costmodels.sharding.plan import Plan
from trials.jax_training.model.initial import batch, initial_states
from trials.jax_training.model.sharded_step import ShardedStep


def lower_graph_step(plan: Plan, *, top_k: int, seed: int) -> LoweredGraphStep:
    """Lower the step of a plan's graph; `top_k` and `seed` are those of `PlannedWork`."""
    step = ShardedStep.of(plan, jax_mesh(plan), top_k=top_k)
    return LoweredGraphStep(step=step, program=step.lower(), seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoweredGraphStep:
    """Lowered step; see `trials.jax_training.steps.LoweredStep`.

    Attributes:
        step: Step with its shardings.
        program: Lowered program.
        seed: Seed of weights and data.
    """

    step: ShardedStep
    program: Any
    seed: int

    def begin(self, compiled: Any) -> RunningGraphStep:
        """Make weights and data."""
        graph = self.step.plan.graph
        states = initial_states(graph, self.seed, self.step.shardings(STATE))
        inputs = batch(graph, self.seed, self.step.shardings(INPUT))
        jax.block_until_ready((states, inputs))
        return RunningGraphStep(compiled=compiled, states=states, inputs=inputs)


@dataclass(kw_only=True, slots=True)
class RunningGraphStep:
    """Compiled step with its states, which each run replaces.

    Attributes:
        compiled: Compiled program.
        states: Parameters and moments by name.
        inputs: Batch by name.
        number: Number of steps so far.
    """

    compiled: Any
    states: Mapping[str, Array]
    inputs: Mapping[str, Array]
    number: int = 0

    @property
    def arguments(self) -> Sequence[Any]:
        """States, number of the step and inputs; JAX sorts by name."""
        states, inputs = ([arrays[name] for name in sorted(arrays)] for arrays in (self.states, self.inputs))
        return [*states, np.float32(1), *inputs]

    @property
    def replaced(self) -> Mapping[int, int]:
        """Each state is replaced by the result in its place."""
        return {number: number for number in range(len(self.states))}

    def run(self) -> float:
        """Run one step to its end, and return the loss before it."""
        self.number += 1
        self.states, loss = self.compiled(self.states, np.float32(self.number), self.inputs)
        jax.block_until_ready(self.states)
        return float(np.asarray(loss.addressable_data(0))[0])
