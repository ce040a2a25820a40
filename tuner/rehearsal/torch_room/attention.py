"""PyTorch's attention (`scaled_dot_product_attention`) with the kernels that it chooses on devices.

On the CPU it would write all scores wherever there is dropout, or fewer heads of keys than of queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_LARGEST_HEAD = 256
"""Largest head of the flash kernel (ATen/native/transformers/cuda/sdp_utils.cpp, PyTorch 2.13)."""
_MULTIPLE = 8
"""Multiple to which heads and rows of masks are padded, as there."""
_LOW = (torch.float16, torch.bfloat16)


def stand_in_for_attention() -> None:
    """Let attention take the flash or the memory-efficient kernel as on a device, and write all scores otherwise."""
    functional: Any = nn.functional
    plain = functional.scaled_dot_product_attention

    def attend(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        given = query, key, value
        if torch.is_autocast_enabled():
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (one.to(dtype) if one.is_floating_point() else one for one in given)
        if query.dim() == 4 and query.device.type == "cpu" and _has_no_data(query):
            cuda: Any = torch.backends.cuda
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            if attn_mask is None and _is_flash(query, value) and cuda.flash_sdp_enabled():
                return _flash(query, key, value, dropout_p, is_causal, scale)
            if not (enable_gqa and query.shape[1] != key.shape[1]) and cuda.mem_efficient_sdp_enabled():
                return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    functional.scaled_dot_product_attention = attend


def _has_no_data(tensor: torch.Tensor) -> bool:
    return isinstance(getattr(tensor, "_local_tensor", tensor), FakeTensor)


def _is_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    heads = query.shape[-1], value.shape[-1]
    return query.dtype in _LOW and heads[0] == heads[1] <= _LARGEST_HEAD


def _flash(query: Any, key: Any, value: Any, dropout: float, is_causal: bool, scale: float) -> Any:
    size = query.shape[-1]
    if rest := -size % _MULTIPLE:
        query, key, value = (nn.functional.pad(one, (0, rest)) for one in (query, key, value))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    found = kernel(query, key, value, dropout, is_causal, False, scale=scale)[0]
    return found[..., :size] if rest else found


def _efficient(query: Any, key: Any, value: Any, mask: Any, dropout: float, is_causal: bool, scale: float) -> Any:
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.where(mask, 0.0, -torch.inf).to(query.dtype)
        columns = mask.shape[-1]
        if rest := -columns % _MULTIPLE:
            mask = nn.functional.pad(mask, (0, rest))[..., :columns]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs = any(one.requires_grad for one in (query, key, value))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, mask, needs, dropout, is_causal, scale=scale)[0]
