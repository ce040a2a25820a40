"""Initial states and data of a step on the devices of its shardings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from costmodels.sharding.graph import STATE, Graph, Tensor, TensorKind
from costmodels.sharding.micro_batches import count_micro_batches
from trials.training.numerics import initial_state, whole_batch


def dtype_of(array: Tensor) -> Any:
    """Return the type of a tensor of a step: by its width, and int32 for data."""
    if array.kind is TensorKind.DATA:
        return jnp.int32
    return {2: jnp.bfloat16, 4: jnp.float32}[int(array.element_bytes)]


def initial_states(graph: Graph, seed: int, shardings: Mapping[str, NamedSharding]) -> dict[str, Array]:
    """Return all parameters and moments, each on the devices of its sharding.

    Args:
        graph: Graph of the step.
        seed: Seed of all weights.
        shardings: Sharding of each state by its name.
    """
    return {
        op.name: _put(
            initial_state(graph, op, seed).astype(dtype_of(graph.tensors[op.results[0]]), copy=False),
            shardings[op.name],
        )
        for op in graph.ops
        if op.primitive == STATE
    }


def batch(graph: Graph, seed: int, shardings: Mapping[str, NamedSharding]) -> dict[str, Array]:
    """Return the tokens and labels of a step, each on the devices of its sharding.

    Those of several micro-batches lie one after the other [micro-batches, batch, sequence].

    Args:
        graph: Graph of the step, whose inputs are `tokens` and `labels` [batch, sequence] of a micro-batch.
        seed: Seed of the data.
        shardings: Sharding of each input by its name.
    """
    count = count_micro_batches(graph)
    whole = whole_batch(graph, seed)
    if count > 1:
        whole = {name: array.reshape(count, -1, array.shape[-1]) for name, array in whole.items()}
    return {name: _put(array, shardings[name]) for name, array in whole.items()}


def _put(whole: NDArray[np.generic], sharding: NamedSharding) -> Array:
    """Return an array whose parts are on the devices of a sharding; a process fills only its own devices."""
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
