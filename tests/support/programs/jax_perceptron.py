"""A training step of JAX on abstract arguments, for tests of plans."""

import jax
import jax.numpy as jnp


def step(params, batch):
    """A step of gradient descent on a perceptron of two layers."""

    def loss(params):
        hidden = jax.nn.relu(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), value


def array(*shape):
    """An array that isn't allocated."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGUMENTS = ({"up": array(2048, 8192), "down": array(8192, 2048)}, {"x": array(8192, 2048), "y": array(8192, 2048)})
