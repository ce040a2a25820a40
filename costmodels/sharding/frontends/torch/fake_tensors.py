"""Additions to torch's fake tensors that traces need: products of groups in all types, and values of constants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_impls import _deregister_op_impl, register_op_impl

CONSTANT_ELEMENTS = 4096
"""Most elements of a constant whose values are known in a trace."""

_GROUPED = torch.ops.aten._grouped_mm.default


@contextmanager
def able_fake_tensors() -> Iterator[None]:
    """Let fake tensors of all types take part in products of groups, and know the values of constants.

    Kernels of the products take float32 and float16, too, and the function of their shapes only bfloat16 (torch 2.13:
    `_grouped_mm_validate_inputs` in GroupedMMUtils.h against `_meta_grouped_mm_common` in `_meta_registrations.py`).
    Libraries check constants that they have made of numbers; torch by itself knows those of one element.
    """
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = CONSTANT_ELEMENTS
    register_op_impl(_GROUPED)(_product_of_groups)
    try:
        yield
    finally:
        _deregister_op_impl(_GROUPED)
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
