"""Two towers of unlike depth, as contrastive models of images and texts have them, whose results meet in one loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.zoo.programs import Program, Tree, shape_of


def _tower(layers: Tree, x_bd: Array) -> Array:
    """Apply feed-forward layers with residual connections."""
    for layer in layers:
        x_bd = x_bd + jax.nn.gelu(x_bd @ layer["up"]) @ layer["down"]
    return x_bd


def _program(width: int, batch: int, depths: tuple[int, ...]) -> Program:
    """Build one step of gradient descent on the towers of these depths."""

    def loss_of(params: Tree, batch: Tree) -> Array:
        image_bd, text_bd = (_tower(layers, x_bd) for layers, x_bd in zip(params, batch, strict=True))
        return jnp.mean((image_bd * text_bd).astype(jnp.float32))

    def train_step(params: Tree, batch: Tree) -> tuple[Tree, Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda param, grad: param - 1e-3 * grad, params, grads), loss

    layer = {"up": shape_of(width, 4 * width), "down": shape_of(4 * width, width)}
    params = tuple([layer] * depth for depth in depths)
    return train_step, (params, (shape_of(batch, width),) * len(depths)), ("params",)


def two_towers() -> Program:
    """Build towers of six and four layers, 2.7 GB of parameters."""
    return _program(4096, 8192, (6, 4))


def two_towers_small() -> Program:
    """Build towers of one layer each."""
    return _program(1024, 2048, (1, 1))
