"""Type of the zoo's programs, and the conversion of a loss to a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Tree = Any
"""Nested dicts of arrays, or of their shapes."""

Program = tuple[Callable[..., Any], tuple[Tree, ...], tuple[str, ...]]
"""Function, its abstract arguments, and the names of the arguments that it may overwrite."""


def shape_of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Return an abstract array, which is not allocated."""
    return jax.ShapeDtypeStruct(shape, dtype)


def train_program(loss_of: Callable[[Tree, Tree], Array], params: Tree, batch: Tree) -> Program:
    """Build one step of Adam on a loss of (parameters, batch), with float32 moments for any type of parameters."""

    def train_step(params: Tree, optimizer: Tree, batch: Tree) -> tuple[Tree, Tree, Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        with jax.named_scope("adam"):
            params, optimizer = adam(params, grads, optimizer)
        return params, optimizer, loss

    moments = jax.tree.map(lambda leaf: shape_of(*leaf.shape, dtype=jnp.float32), params)
    optimizer = {"mean": moments, "square": moments, "count": shape_of(dtype=jnp.int32)}
    return train_step, (params, optimizer, batch), ("params", "optimizer")


def adam(params: Tree, grads: Tree, optimizer: Tree, rate: float = 1e-3) -> tuple[Tree, Tree]:
    """Return parameters and moments after one step (Kingma and Ba 2015, algorithm 1)."""
    count = optimizer["count"] + 1
    steps = count.astype(jnp.float32)
    mean = jax.tree.map(lambda old, grad: 0.9 * old + 0.1 * grad.astype(jnp.float32), optimizer["mean"], grads)
    square = jax.tree.map(
        lambda old, grad: 0.999 * old + 0.001 * jnp.square(grad.astype(jnp.float32)), optimizer["square"], grads
    )

    def updated(param: Array, mean: Array, square: Array) -> Array:
        # Both moments are corrected for their start at zero.
        change = mean / (1 - 0.9**steps) / (jnp.sqrt(square / (1 - 0.999**steps)) + 1e-8)
        return (param.astype(jnp.float32) - rate * change).astype(param.dtype)

    return jax.tree.map(updated, params, mean, square), {"mean": mean, "square": square, "count": count}
