"""Decompositions of ATen operators that have no rule of their own: torch's, and three written here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload

from costmodels.sharding.frontends.torch.rules import has_rule

aten = torch.ops.aten


def decompositions() -> dict[OpOverload[..., Any], Callable[..., Any]]:
    """Return the decomposition of each operator without a rule, where one exists."""
    core = core_aten_decompositions()
    known = {op: core[op] for op in core} | get_decompositions(_FURTHER)
    return {op: made_of for op, made_of in known.items() if isinstance(op, OpOverload) and not has_rule(op)} | _OURS


def _var_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute variance and mean with two sums, so that the reduced dims can be partitioned."""
    dims = list(range(x.dim())) if not dim else [one % x.dim() for one in dim]
    count = 1
    for one in dims:
        count *= x.shape[one]
    mean = x.mean(dims, keepdim=True)
    squares = (x - mean).square().sum(dims, keepdim=keepdim)
    variance = squares / max(count - (1 if correction is None else correction), 0)
    return variance, mean if keepdim else mean.view(variance.shape)


def _var(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> torch.Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _convolution_backward(*arguments: Any) -> Any:
    """Compute each gradient with an operator of its own, as each has its own rule; the bias's gradient is a sum."""
    *shared, mask = arguments
    # A call for a single gradient has a rule and is left as it is.
    if sum(mask) == 1 and not mask[2]:
        return NotImplemented
    grad = arguments[0]
    found: list[torch.Tensor | None] = [
        aten.convolution_backward(*shared, [number == one for number in range(3)])[one] if mask[one] else None
        for one in range(2)
    ]
    # The bias's gradient sums over all dims but the channels.
    sums = [dim for dim in range(grad.dim()) if dim != 1]
    return (*found, grad.sum(sums) if mask[2] else None)


_OURS: dict[OpOverload[..., Any], Callable[..., Any]] = {
    aten.convolution_backward.default: _convolution_backward,
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
}

_FURTHER = (
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten.index_select,
    aten.linalg_vector_norm,
    aten.native_batch_norm,
    aten.native_batch_norm_backward,
    aten.repeat,
)
"""Operators that torch counts as core, but can decompose nevertheless."""
