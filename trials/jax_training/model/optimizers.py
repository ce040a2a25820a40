"""Optimizers' updates of one parameter in JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array

from trials.step_numerics import ADAM_EPSILON, FIRST_DECAY, LEARNING_RATE, SECOND_DECAY, WEIGHT_DECAY


def adam(
    parameter: Array, gradient: Array, first_moment: Array, second_moment: Array, *, step: Array
) -> tuple[Array, Array, Array]:
    """Return parameter and moments after a step of AdamW (Loshchilov and Hutter 2019, algorithm 2).

    Args:
        parameter: Weights before the step.
        gradient: Their gradient.
        first_moment: Running mean of gradients.
        second_moment: Running mean of squared gradients.
        step: Number of the step, from 1, as a float.
    """
    first_moment = FIRST_DECAY * first_moment + (1 - FIRST_DECAY) * gradient
    second_moment = SECOND_DECAY * second_moment + (1 - SECOND_DECAY) * jnp.square(gradient)
    mean = first_moment / (1 - FIRST_DECAY**step)
    spread = jnp.sqrt(second_moment / (1 - SECOND_DECAY**step))
    change = mean / (spread + ADAM_EPSILON) + WEIGHT_DECAY * parameter
    return parameter - LEARNING_RATE * change, first_moment, second_moment


def sgd(parameter: Array, gradient: Array, momentum: Array, *, step: Array) -> tuple[Array, Array]:  # noqa: ARG001 # as adam
    """Return parameter and momentum after a step of SGD with momentum."""
    momentum = FIRST_DECAY * momentum + gradient
    return parameter - LEARNING_RATE * momentum, momentum


OPTIMIZERS: Mapping[str, Callable[..., tuple[Array, ...]]] = {"adam": adam, "sgd": sgd}
"""What each optimizer's update computes."""
