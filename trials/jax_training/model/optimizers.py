"""Optimizers' updates of one parameter in JAX, in float32.

A narrower parameter has a float32 copy, which is updated in its place and then rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array

from trials.training.numerics import ADAM_EPSILON, FIRST_DECAY, LEARNING_RATE, SECOND_DECAY, WEIGHT_DECAY


def adam(
    parameter: Array, gradient: Array, first_moment: Array, second_moment: Array, *master: Array, step: Array
) -> tuple[Array, ...]:
    """Return parameter, moments and perhaps the copy after a step of AdamW (Loshchilov and Hutter 2019, algorithm 2).

    Args:
        parameter: Weights before the step.
        gradient: Their gradient.
        first_moment: Running mean of gradients.
        second_moment: Running mean of squared gradients.
        *master: Float32 copy of the parameter, where there is one.
        step: Number of the step, from 1, as a float.
    """
    first_moment = FIRST_DECAY * first_moment + (1 - FIRST_DECAY) * gradient
    second_moment = SECOND_DECAY * second_moment + (1 - SECOND_DECAY) * jnp.square(gradient)
    mean = first_moment / (1 - FIRST_DECAY**step)
    spread = jnp.sqrt(second_moment / (1 - SECOND_DECAY**step))
    (before,) = master or (parameter,)
    change = mean / (spread + ADAM_EPSILON) + WEIGHT_DECAY * before
    after = before - LEARNING_RATE * change
    return after, first_moment, second_moment, *(after for _ in master)


def sgd(parameter: Array, gradient: Array, momentum: Array, *master: Array, step: Array) -> tuple[Array, ...]:  # noqa: ARG001 # as adam
    """Return parameter, momentum and perhaps the copy after a step of SGD with momentum."""
    momentum = FIRST_DECAY * momentum + gradient
    (before,) = master or (parameter,)
    after = before - LEARNING_RATE * momentum
    return after, momentum, *(after for _ in master)


OPTIMIZERS: Mapping[str, Callable[..., tuple[Array, ...]]] = {"adam": adam, "sgd": sgd}
"""What each optimizer's update computes."""
