"""Real values for the tensors of a user's module and its inputs that are on the device `meta`, and so have none.

Parameters are normal numbers of a small deviation, and buffers are zeros. Inputs of floating numbers are uniform
between 0 and 1, and integers and truth values are zeros. A tensor with values keeps them. All depend on the seed and
on names alone, whatever the plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from costmodels.sharding.frontends.torch.program import input_names
from trials.training.numerics import small_normal, uniform


def value_of_state(name: str, tensor: Tensor, seed: int) -> Tensor:
    """Return the whole value of a parameter or buffer, on the CPU."""
    if not tensor.is_meta:
        return tensor.detach().cpu()
    if not isinstance(tensor, torch.nn.Parameter) or not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return torch.from_numpy(small_normal(name, tuple(tensor.shape), seed)).to(tensor.dtype)


def values_of_inputs(inputs: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """Return the inputs, with whole values for all tensors, on the CPU."""
    leaves, tree = pytree.tree_flatten(inputs)
    names = iter(input_names(inputs))
    made = [_input(next(names), leaf, seed) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    found: tuple[Any, ...] = pytree.tree_unflatten(made, tree)
    return found


def _input(name: str, tensor: Tensor, seed: int) -> Tensor:
    if not tensor.is_meta:
        return tensor.detach().cpu()
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return torch.from_numpy(uniform(name, tuple(tensor.shape), seed)).to(tensor.dtype)
