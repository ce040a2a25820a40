"""Decompositions of ATen operators that have no rule of their own: torch's, and some written here."""

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


def _weight_norm_backward(
    grad: torch.Tensor, direction: torch.Tensor, length: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of direction v and length g of a weight w = g v / |v| (Salimans and Kingma 2016, eq. 3)."""
    dims = [one for one in range(direction.dim()) if one != dim % direction.dim()]
    norms = norms.view(length.shape).to(direction.dtype)
    along = (grad * direction).sum(dims, keepdim=True) / norms
    return length / norms * (grad - direction * along / norms), along


def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,  # noqa: ARG001 # of the gradient
    mode: int = 0,
    sparse: bool = False,  # noqa: ARG001
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Add up the rows of each bag, which begins at an offset; maxima (mode 2) are left as they are."""
    if mode == 2:
        return NotImplemented
    begins = offsets[:-1] if include_last_offset else offsets
    places = torch.arange(indices.shape[0], device=indices.device, dtype=begins.dtype)
    bags = torch.searchsorted(begins, places, right=True) - 1
    is_here = torch.ones_like(indices, dtype=weight.dtype)
    if padding_idx >= 0:
        is_here = (indices != padding_idx).to(weight.dtype)
    scales = is_here if per_sample_weights is None else is_here * per_sample_weights
    rows = aten.embedding(weight, indices) * scales[:, None]
    count = begins.shape[0]
    found = weight.new_zeros(count, weight.shape[1]).index_put([bags], rows, accumulate=True)
    sizes = weight.new_zeros(count).index_put([bags], is_here, accumulate=True)
    if mode == 1:
        found = found / sizes.clamp(min=1)[:, None]
    bag_size = sizes.to(offsets.dtype)
    return found, bags, bag_size, torch.zeros_like(bag_size)


def _embedding_bag_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,  # noqa: ARG001 # the operator's own parameters
    offset2bag: torch.Tensor,
    bag_size: torch.Tensor,
    maximum_indices: torch.Tensor,  # noqa: ARG001
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,  # noqa: ARG001
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """Give each row the gradient of its bag."""
    if mode == 2:
        return NotImplemented
    scaled = grad / bag_size.clamp(min=1).to(grad.dtype)[:, None] if mode == 1 else grad
    rows = scaled[offset2bag]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    return aten.embedding_dense_backward(rows, indices, num_weights, padding_idx, scale_grad_by_freq)


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
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
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
