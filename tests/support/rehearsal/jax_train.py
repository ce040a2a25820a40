"""Training program on JAX alone: blocks of a gated MLP on a mesh of data and model, with Adam by hand."""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def arguments():
    """Return the flags of the command."""
    parser = argparse.ArgumentParser()
    for name, value in (
        ("dp", 1),
        ("tp", 1),
        ("layers", 2),
        ("hidden", 512),
        ("ffn", 2048),
        ("batch", 64),
        ("steps", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def init(key, given):
    """Return the weights: each layer goes to the hidden values of the MLP and back."""
    up, down = jax.random.split(key)
    shape = (given.layers, given.hidden, given.ffn)
    return {
        "up": jax.random.normal(up, shape) * given.hidden**-0.5,
        "down": jax.random.normal(down, (given.layers, given.ffn, given.hidden)) * given.ffn**-0.5,
    }


def loss_of(weights, batch):
    """Return the mean square of what all layers make of a batch."""

    def layer(values, one):
        return values + jnp.tanh(values @ one["up"]) @ one["down"], None

    values, _ = jax.lax.scan(layer, batch, weights)
    return jnp.mean(jnp.square(values))


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
    """Return the state after a step of Adam, and the loss."""
    weights, first, second, count = state
    loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
    first = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, first, gradients)
    second = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new * new, second, gradients)
    weights = jax.tree.map(lambda w, m, v: w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), weights, first, second)
    return (weights, first, second, count + 1), loss


def main():
    """Train on noise."""
    given = arguments()
    mesh = Mesh(np.array(jax.devices()).reshape(given.dp, given.tp), ("data", "model"))

    def placed(*names):
        return NamedSharding(mesh, PartitionSpec(*names))

    by_name = {"up": placed(None, None, "model"), "down": placed(None, "model", None)}
    make = jax.jit(functools.partial(init, given=given), out_shardings=by_name)
    weights = make(jax.random.key(0))
    state = (weights, jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights), 0)
    for step in range(given.steps):
        noise = np.random.default_rng(step).normal(size=(given.batch, given.hidden)).astype(np.float32)
        batch = jax.device_put(noise, placed("data", None))
        state, loss = train_step(state, batch)
        sys.stdout.write(f"step {step}: loss {float(loss):.4f}\n")


if __name__ == "__main__":
    main()
