"""Functions of torch that a trace calls in another form, because their own hides what a plan can cut, or is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class composed_functions(TorchFunctionMode):  # noqa: N801 # a context
    """Mode in which bags of one length are looked up as embeddings and then reduced, and lengths are numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, or what it is composed of."""
        if func is functional.embedding_bag:
            named = {"indices" if name == "input" else name: given for name, given in (kwargs or {}).items()}
            found = _bags_of_one_length(*args, **named)
            if found is not None:
                return found
        if func is functional.ctc_loss:
            found = _alignment_loss(*args, **(kwargs or {}))
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))


def _bags_of_one_length(
    indices: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,  # noqa: ARG001 # gradients of a plan are dense
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,  # noqa: ARG001
    padding_idx: int | None = None,
) -> Tensor | None:
    """Return reduced bags, the rows of a matrix of indices; None for others."""
    if indices.dim() != 2 or offsets is not None or max_norm is not None or indices.shape[1] == 0:
        return None
    rows = functional.embedding(indices, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    is_here = None
    if padding_idx is not None:
        is_here = (indices != padding_idx % weight.shape[0])[..., None]
        rows = torch.where(is_here, rows, -torch.inf if mode == "max" else 0.0)
    if mode == "max":
        found = rows.amax(dim=1)
        return found if is_here is None else torch.where(is_here.any(dim=1), found, 0.0)
    if mode == "sum":
        return rows.sum(dim=1)
    count = indices.shape[1] if is_here is None else is_here.sum(dim=1).clamp(min=1)
    return rows.sum(dim=1) / count


def _alignment_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor | None:
    """Return a CTC loss of a batch, whose lengths are read as numbers; None for a single sequence."""
    if log_probs.dim() != 3:
        return None
    lengths, counts = ([int(one) for one in each] for each in (input_lengths, target_lengths))
    found: Tensor = torch.ops.aten._ctc_loss.default(log_probs, targets, lengths, counts, blank, zero_infinity)[0]
    if zero_infinity:
        found = torch.where(found == torch.inf, 0.0, found)
    if reduction == "mean":
        return (found / found.new_tensor(counts).clamp(min=1)).mean()
    return found.sum() if reduction == "sum" else found
