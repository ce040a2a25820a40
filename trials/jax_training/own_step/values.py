"""Real values for the arguments of a user's step, from their shapes and types.

Parameters are normal numbers of a small deviation. Other arguments that a step keeps for the next, such as moments and
counts, are zero. Of all others, floating numbers are uniform between 0 and 1, and integers and truth values are zero.
An argument that is an array already keeps its values. All depend on the seed and on names alone, whatever the plan.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from costmodels.sharding.frontends.jax.program import Argument
from costmodels.sharding.graph import TensorKind
from trials.training.numerics import small_normal, uniform


def make_value(argument: Argument, leaf: Any, seed: int, sharding: NamedSharding) -> Array:
    """Return the value of one leaf of the arguments, on the devices of its sharding.

    Args:
        argument: Name and purpose of the leaf.
        leaf: Shape and type of the leaf, or an array with its values.
        seed: Seed of all values.
        sharding: Sharding of the leaf; a process fills only its own devices.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        whole = leaf if isinstance(leaf, Array) else jax.random.split(jax.random.key(seed), leaf.shape)
        keys: Array = jax.device_put(whole, sharding)
        return keys
    values = _values(argument, leaf, seed)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _values(argument: Argument, leaf: Any, seed: int) -> np.ndarray:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return np.asarray(leaf)
    shape, dtype = leaf.shape, leaf.dtype
    if not jnp.issubdtype(dtype, jnp.floating) or argument.kind is TensorKind.OPTIMIZER:
        return np.zeros(shape, dtype)
    draw = small_normal if argument.kind is TensorKind.PARAMETER else uniform
    return draw(argument.name, shape, seed).astype(dtype)
