"""Step of a model of the catalog as a rank runs it: its states by name, the number of the step, and the batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from costmodels.sharding.exports.jax_layouts import jax_mesh
from costmodels.sharding.graph import INPUT, STATE
from costmodels.sharding.plan import Plan
from trials.jax_training.model.initial import batch, initial_states
from trials.jax_training.model.sharded_step import ShardedStep
from trials.jax_training.steps import LoweredStep


def lower_graph_step(plan: Plan, *, top_k: int, seed: int) -> LoweredStep:
    """Lower the step of a plan's graph; `top_k` and `seed` are those of `PlannedWork`."""
    step, graph = ShardedStep.of(plan, jax_mesh(plan), top_k=top_k), plan.graph
    states, inputs = step.shardings(STATE), step.shardings(INPUT)

    def make() -> tuple[Any, ...]:
        return initial_states(graph, seed, states), np.float32(1), batch(graph, seed, inputs)

    # each state is replaced by the result in its place
    replaced = {number: number for number in range(len(states))}
    return LoweredStep(program=step.lower(), make=make, replaced=replaced, counter=len(states))
