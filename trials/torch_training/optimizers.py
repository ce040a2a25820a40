"""Optimizers in torch: their updates of one parameter, or of a rank's part of it, and those of torch itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from trials.training.numerics import ADAM_EPSILON, FIRST_DECAY, LEARNING_RATE, SECOND_DECAY, WEIGHT_DECAY


def adam(
    parameter: Tensor, gradient: Tensor, first_moment: Tensor, second_moment: Tensor, *, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter and moments after a step of AdamW (Loshchilov and Hutter 2019, algorithm 2).

    Args:
        parameter: Weights before the step.
        gradient: Their gradient.
        first_moment: Running mean of gradients.
        second_moment: Running mean of squared gradients.
        step: Number of the step, from 1.
    """
    first_moment = first_moment.lerp(gradient, 1 - FIRST_DECAY)
    second_moment = (second_moment * SECOND_DECAY).addcmul_(gradient, gradient, value=1 - SECOND_DECAY)
    spread = (second_moment / (1 - SECOND_DECAY**step)).sqrt_().add_(ADAM_EPSILON)
    kept = parameter * (1 - LEARNING_RATE * WEIGHT_DECAY)
    return (
        kept.addcdiv_(first_moment, spread, value=-LEARNING_RATE / (1 - FIRST_DECAY**step)),
        first_moment,
        second_moment,
    )


def sgd(parameter: Tensor, gradient: Tensor, momentum: Tensor, *, step: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001 # as adam
    """Return parameter and momentum after a step of SGD with momentum."""
    momentum = (momentum * FIRST_DECAY).add_(gradient)
    return parameter.sub(momentum, alpha=LEARNING_RATE), momentum


UPDATES: Mapping[str, Callable[..., tuple[Tensor, ...]]] = {"adam": adam, "sgd": sgd}
"""What each optimizer's update computes."""


def optimizer_of(name: str, weights: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's optimizer of a name for some weights, with the same constants."""
    # a tied table is a weight of two modules, and is updated once
    parameters = list({id(weight): weight for weight in weights}.values())
    if name in ("sgd", "plain_sgd"):
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=FIRST_DECAY if name == "sgd" else 0.0)
    if name == "adagrad":
        return torch.optim.Adagrad(parameters, lr=LEARNING_RATE)
    if name == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=LEARNING_RATE)
    assert name == "adam", f"check_trainable lets no other optimizer than these pass: {name}"
    betas = (FIRST_DECAY, SECOND_DECAY)
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=betas, weight_decay=WEIGHT_DECAY)
