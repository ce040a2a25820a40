"""Attention as the kernels of a device make it: they keep the output and a number a row, and never the scores.

On the CPU, PyTorch would choose other kernels, and compute scores in full where a device fuses them. FlexAttention and
its masks are taken as compiled, as programs for devices have them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_LARGEST_HEAD = 256
"""Largest size of a head in flash attention (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
_MULTIPLE = 8
"""Multiple to which heads and rows of masks are padded, as there."""
_HALF = (torch.float16, torch.bfloat16)


def stand_in_for_attention() -> None:
    """Let `scaled_dot_product_attention` take the operator that a CUDA device would take."""
    functional: Any = torch.nn.functional
    of_torch = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if torch.is_autocast_enabled():
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (one.to(dtype) if one.is_floating_point() else one for one in (query, key, value))
        if is_causal and attn_mask is not None:  # refused in PyTorch's words
            kernel = None
        else:
            kernel = _kernel(query, key, value, attn_mask, enable_gqa=enable_gqa)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kernel == "efficient":
            needs_sums = any(one.requires_grad for one in (query, key, value))
            operator, bias = torch.ops.aten._scaled_dot_product_efficient_attention, _bias(attn_mask, query, key)
            return operator(query, key, value, bias, needs_sums, dropout_p, is_causal, scale=scale)[0]
        return of_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    functional.scaled_dot_product_attention = scaled_dot_product_attention


def changes() -> dict[str, Callable[[Any], None]]:
    """Return what is exchanged in PyTorch's module of FlexAttention."""
    return {"torch.nn.attention.flex_attention": _fuse}


def _kernel(query: Any, key: Any, value: Any, mask: Any, *, enable_gqa: bool) -> str | None:
    """Return the kernel that sdp_utils.cpp chooses: `flash`, `efficient`, or None for PyTorch's formula."""
    enabled: Any = torch.backends.cuda
    if any(one.dim() != 4 for one in (query, key, value)) or not _has_no_data(query):
        return None
    is_even = query.shape[-1] == value.shape[-1] <= _LARGEST_HEAD
    suits_flash = is_even and mask is None and query.dtype in _HALF and torch.cuda.get_device_capability() >= (8, 0)
    if suits_flash and (enabled.flash_sdp_enabled() or enabled.cudnn_sdp_enabled()):  # both keep the same tensors
        return "flash"
    if enabled.mem_efficient_sdp_enabled() and not (enable_gqa and query.shape[1] != key.shape[1]):
        return "efficient"
    return None


def _has_no_data(tensor: torch.Tensor) -> bool:
    return isinstance(getattr(tensor, "_local_tensor", tensor), FakeTensor)


def _flash(query: Any, key: Any, value: Any, dropout: float, is_causal: bool, scale: float) -> Any:
    """Call the flash kernel, which takes heads of certain sizes alone."""
    size = query.shape[-1]
    if rest := -size % _MULTIPLE:
        query, key, value = (torch.nn.functional.pad(one, (0, rest)) for one in (query, key, value))
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    found = operator(query, key, value, dropout, is_causal, return_debug_mask=False, scale=scale)[0]
    return found[..., :size] if rest else found


def _bias(mask: Any, query: Any, key: Any) -> Any:
    """Return a mask as the numbers that are added to the scores; one of truth values becomes numbers."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    columns = mask.shape[-1]
    if rest := -columns % _MULTIPLE:
        mask = torch.nn.functional.pad(mask, (0, rest))[..., :columns]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _fuse(module: Any) -> None:
    module.create_block_mask, module._validate_device = _block_mask(module), lambda *_: None
    operator = module.flex_attention_hop

    def flex_attention(query: Any, key: Any, value: Any, *given: Any) -> Any:
        return _FlexAttention.apply(operator, query, key, value, *given)  # type: ignore[no-untyped-call]

    module.flex_attention_hop = flex_attention


class _FlexAttention(torch.autograd.Function):
    """Attention with a function of the scores; PyTorch's own would trace that function, which needs a compiler."""

    @staticmethod
    def forward(context: Any, operator: Any, query: Any, key: Any, value: Any, *given: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output, sums, maxima = operator(query, key, value, *given)
        context.save_for_backward(query, key, value, output, sums)
        context.mark_non_differentiable(maxima)
        return output, sums, maxima

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        query, key, value, output, _ = context.saved_tensors
        products = (output * gradients[0]).sum(-1, dtype=torch.float32)  # one number a row, as the kernel wants it
        made = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        del products
        return None, *made, *(None,) * 4


def _block_mask(module: Any) -> Callable[..., Any]:
    """Return a function that makes a mask of blocks as the compiled one does: without the mask of all pairs."""
    signature = inspect.signature(module.create_block_mask)

    def create_block_mask(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        asked = bound.arguments
        size = asked["BLOCK_SIZE"]
        rows, columns = (size, size) if isinstance(size, int) else size
        blocks = (-(-asked["Q_LEN"] // rows), -(-asked["KV_LEN"] // columns))
        shape = (asked["B"] or 1, asked["H"] or 1, *blocks)

        def made() -> tuple[torch.Tensor, torch.Tensor]:
            return torch.empty(shape[:-1], dtype=torch.int32), torch.empty(shape, dtype=torch.int32)

        partly, full = made(), made() if asked["separate_full_blocks"] else (None, None)
        lengths = (asked["Q_LEN"], asked["KV_LEN"])
        return module.BlockMask.from_kv_blocks(
            *partly, *full, BLOCK_SIZE=(rows, columns), mask_mod=asked["mask_mod"], seq_lengths=lengths
        )

    return create_block_mask
