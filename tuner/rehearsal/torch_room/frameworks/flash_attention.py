"""Kernels of the package flash-attn, as the tensors that they make.

Shapes and arguments follow flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of Dao-AILab's
flash-attention, version 2.8: the backward pass sums the gradient of queries in fp32 beside its result, in deterministic
mode once for each group of blocks that run at a time, and the gradients of keys and values for each head of queries.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from tuner.rehearsal.torch_room.watch import Watch

VERSION = "2.8.3"
_MULTIPLE = 128
"""Number up to whose multiple the backward pass rounds sequences."""


class _Attention(torch.autograd.Function):
    """Attention that keeps its inputs, its output, and one fp32 number for each query and head."""

    @staticmethod
    def forward(
        ctx: Any, watch: Watch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, deterministic: bool
    ) -> torch.Tensor:
        out: torch.Tensor
        out, statistics, _, state = _forward(watch, q, k, v)
        ctx.watch, ctx.deterministic = watch, deterministic
        ctx.save_for_backward(q, k, v, out, statistics, state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, statistics, _ = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _backward(ctx.watch, grad, q, k, v, out, statistics, *gradients, deterministic=ctx.deterministic)
        return None, *gradients, None


def _forward(watch: Watch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    """Return the output, the statistics of the softmax, no probabilities, and a random state."""
    watch.note("flash.attention_fwd", tuple(q.shape), tuple(k.shape))
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)
    # [batch, heads, length], or [heads, tokens] of sequences that follow each other
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return out, torch.empty(rows, dtype=torch.float32), None, torch.empty(2, dtype=torch.int64)


def _backward(
    watch: Watch,
    _grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *_: Any,
    deterministic: bool = False,
    **__: Any,
) -> torch.Tensor:
    """Return the sums of the softmax's backward pass; the gradients are written where the caller wants them."""
    watch.note("flash.attention_bwd", tuple(q.shape), tuple(k.shape))
    length = -(-q.shape[-3] // _MULTIPLE) * _MULTIPLE
    batch = q.shape[0] if q.dim() == 4 else 1
    rows = batch * q.shape[-2]
    processors = torch.cuda.get_device_properties().multi_processor_count
    parts = -(-processors // rows) if deterministic else 1
    summed = torch.empty((parts, batch, length, q.shape[-2], q.shape[-1]), dtype=torch.float32)
    expanded = [
        torch.empty((*one.shape[:-2], q.shape[-2], one.shape[-1]), dtype=one.dtype)
        for one in (k, v)
        if one.shape[-2] != q.shape[-2]
    ]
    statistics = torch.empty((batch, q.shape[-2], length), dtype=torch.float32)
    del summed, expanded
    return statistics


def offer_flash_attention(utils: Any, watch: Watch) -> None:
    """Let Transformer Engine find flash-attn where without it no kernel would do, or one that keeps all scores.

    NVIDIA's containers of PyTorch have it: Megatron-LM's CI on A100 keeps no scores in deterministic mode, in which
    Transformer Engine leaves cuDNN's kernel out there.

    Args:
        utils: Its module of attention's utilities.
        watch: Record of the present step.
    """
    choose = utils.get_attention_backend

    def get_attention_backend(*given: Any, **named: Any) -> Any:
        found = choose(*given, **named)
        if not (found[0] or found[2] or utils.FlashAttentionUtils.is_installed or _is_switched_off()):
            _install(utils, watch)
            watch.invented[f"flash-attn {VERSION}, which is not installed here"] += 1
            found = choose(*given, **named)
        return found

    utils.get_attention_backend = get_attention_backend


def _is_switched_off() -> bool:
    """Return whether the program switched flash-attn off (Megatron-LM, `--attention-backend`)."""
    return os.environ.get("NVTE_FLASH_ATTN") == "0"


def _install(utils: Any, watch: Watch) -> None:
    found = utils.FlashAttentionUtils
    found.version = utils.PkgVersion(VERSION)
    found.is_installed = True
    found.set_flash_attention_version()
    backends: Any = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.backends")

    run: Any = _Attention.apply

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, deterministic: bool = False, **__: Any
    ) -> Any:
        return run(watch, q, k, v, deterministic)

    def bound(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: function(watch, *given, **named)

    backends.flash_attn_func = backends.flash_attn_varlen_func = attend
    backends._flash_attn_fwd = backends._flash_attn_varlen_fwd = bound(_forward)
    backends._flash_attn_bwd = backends._flash_attn_varlen_bwd = bound(_backward)
