"""Quantized tensors of Transformer Engine: data, a transposed copy where the device's products want one, and scales.

What a quantizer makes is told by its own Python code (`inner_tensor_specs` and `storage_metadata`, which Transformer
Engine has for torch.compile); that of delayed scaling makes what current scaling makes (csrc/quantizer.cpp).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

_FUSED = ("Float8Quantizer", "MXFP8Quantizer")
"""Quantizers into which kernels write at once; others need a plain tensor first (csrc/extensions/activation.cpp)."""


def quantized(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Make the tensor that a quantizer makes of one of a shape and a dtype."""
    maker = type(quantizer)
    if maker.__name__ == "Float8Quantizer":
        module = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
        maker = module.Float8CurrentScalingQuantizer
    size = tuple(shape)
    inner = {
        name: torch.empty(tuple(each), dtype=kind)
        for name, (each, kind) in maker.inner_tensor_specs(quantizer, size).items()
    }
    found = maker.storage_metadata(quantizer, dtype)
    context = {
        "cls": found["cls"],
        "is_tensor": not quantizer.internal,
        "requires_grad": False,
        "nontensor_kwargs": found["nontensor_kwargs"],
    }
    strides = torch.empty(size, device="meta").stride()
    return found["cls"].__tensor_unflatten__(inner, context, size, strides)


def written(quantizer: Any, out: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return what a kernel writes: its output, or a tensor that a quantizer makes, or a plain one.

    Where a kernel cannot quantize, a tensor of high precision stands beside the result for a moment.
    """
    if quantizer is None:
        return torch.empty(tuple(shape), dtype=dtype) if out is None else out
    plain = None if type(quantizer).__name__ in _FUSED else torch.empty(tuple(shape), dtype=dtype)
    result = quantized(quantizer, shape, dtype) if out is None else out
    del plain
    return result


def shape_of(tensor: Any) -> torch.Size:
    """Return the shape of a tensor, or of a storage of quantized data."""
    return torch.Size(tensor.shape if isinstance(tensor, torch.Tensor) else tensor.size())


def dtype_of(tensor: Any) -> torch.dtype:
    """Return the dtype that a tensor has for its users."""
    found: torch.dtype = tensor.dtype if isinstance(tensor, torch.Tensor) else tensor._dtype
    return found
