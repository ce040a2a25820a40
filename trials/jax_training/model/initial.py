"""Initial states and data of a step on the devices of its shardings."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from costmodels.sharding.graph import STATE, Graph
from trials.step_numerics import initial_state, whole_batch


def initial_states(graph: Graph, seed: int, shardings: Mapping[str, NamedSharding]) -> dict[str, Array]:
    """Return all parameters and moments, each on the devices of its sharding.

    Args:
        graph: Graph of the step.
        seed: Seed of all weights.
        shardings: Sharding of each state by its name.
    """
    return {
        op.name: _put(initial_state(graph, op, seed), shardings[op.name]) for op in graph.ops if op.primitive == STATE
    }


def batch(graph: Graph, seed: int, shardings: Mapping[str, NamedSharding]) -> dict[str, Array]:
    """Return the tokens and labels of a step, each on the devices of its sharding.

    Args:
        graph: Graph of the step, whose inputs are `tokens` and `labels` [batch, sequence].
        seed: Seed of the data.
        shardings: Sharding of each input by its name.
    """
    return {name: _put(array, shardings[name]) for name, array in whole_batch(graph, seed).items()}


def _put(whole: NDArray[np.generic], sharding: NamedSharding) -> Array:
    """Return an array whose parts are on the devices of a sharding; a process fills only its own devices."""
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
