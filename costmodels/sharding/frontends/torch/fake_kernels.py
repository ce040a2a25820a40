"""What torch's fake tensors can't compute, though kernels can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_impls import _deregister_op_impl, register_op_impl

_GROUPED = torch.ops.aten._grouped_mm.default


@contextmanager
def further_fake_kernels() -> Iterator[None]:
    """Let fake tensors of all types take part in products of groups, whose own function of shapes allows bfloat16 only.

    Kernels take float32 and float16, too (torch 2.13: `_grouped_mm_validate_inputs` in GroupedMMUtils.h against
    `_meta_grouped_mm_common` in `_meta_registrations.py`).
    """
    register_op_impl(_GROUPED)(_product_of_groups)
    try:
        yield
    finally:
        _deregister_op_impl(_GROUPED)


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
