"""Additions to torch's fake tensors that traces need: shapes of results, and values of constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_impls import _deregister_op_impl, register_op_impl

CONSTANT_ELEMENTS = 4096
"""Most elements of a constant whose values are known in a trace."""


@contextmanager
def able_fake_tensors() -> Iterator[None]:
    """Let fake tensors of all types take part in products of groups and in CTC losses, and know values of constants.

    Kernels of the products take float32 and float16, too, and the function of their shapes only bfloat16 (torch 2.13:
    `_grouped_mm_validate_inputs` in GroupedMMUtils.h against `_meta_grouped_mm_common` in `_meta_registrations.py`).
    Libraries check constants that they have made of numbers; torch by itself knows those of one element.
    """
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = CONSTANT_ELEMENTS
    for op, shapes in _SHAPES.items():
        register_op_impl(op)(shapes)
    try:
        yield
    finally:
        for op in _SHAPES:
            _deregister_op_impl(op)
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


def _product_of_groups(
    _mode: Any, _op: Any, left: Tensor, right: Tensor, ends: Tensor | None = None, *_others: Any, **_options: Any
) -> Any:
    if left.dtype == torch.bfloat16:
        return NotImplemented  # torch's own function checks more
    if left.shape[-1] != right.shape[-2]:
        raise RuntimeError(f"matrices {tuple(left.shape)} and {tuple(right.shape)} can't be multiplied")
    groups = left.shape[0] if ends is None else len(ends)
    lead = [groups] if left.dim() == right.dim() else []
    return left.new_empty((*lead, left.shape[-2], right.shape[-1]))


def _alignment_loss(
    _mode: Any,
    _op: Any,
    log_probs: Tensor,
    _targets: Tensor,
    _lengths: Any,
    target_lengths: list[int],
    *_others: Any,
    **_options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the losses [N], and the log probabilities of all prefixes [N, T, 2 S + 1], of a CTC loss (Graves 2006)."""
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * max(target_lengths, default=0) + 1)


_SHAPES: Mapping[OpOverload[..., Any], Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _product_of_groups,
    torch.ops.aten._ctc_loss.default: _alignment_loss,
}
"""Functions of the shapes of results where torch has none, or a narrower one."""
