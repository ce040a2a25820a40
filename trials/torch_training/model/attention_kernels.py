"""Attention on one device: the whole of a causal sequence, or one block of it whose result is merged with others.

Letters: b sequences, s_q queries, s_k keys and values, h heads, g heads of keys and values (a divisor of h), d the size
of a head. All tensors are [b, s, h or g, d] and narrow or wide as the caller's; log-sum-exps are [b, s_q, h] in at
least float32. The kernels are the fused ones of torch that also tell the log-sum-exp, one for each kind of device;
those for GPUs want a d that is a multiple of 8. Where g < h they are handed repeated heads: not all of them know
grouped ones (that for CPUs has learned it late, https://github.com/pytorch/pytorch/pull/157893).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LSE_ALIGNMENT = 32
"""Queries that torch's memory-efficient kernel pads its log-sum-exps to; kAlignLSE of its kernel_forward.h."""


def attend_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of s_q = s_k positions, with autograd: [b, s, h, d]."""
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """Each head `repeats` times in a row: [b, s, g * repeats, d]."""
    return x.repeat_interleave(repeats, dim=2) if repeats > 1 else x


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which partial results are added up."""
    return torch.promote_types(dtype, torch.float32)


def block_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of these queries to these keys alone: the result [b, s_q, h, d] and its log-sum-exp [b, s_q, h].

    Args:
        q: [b, s_q, h, d].
        k: [b, s_k, g, d].
        v: [b, s_k, g, d].
        causal: Whether query i sees keys 0 to i only; s_q = s_k then.
    """
    repeats = q.shape[2] // k.shape[2]
    heads_first = [x.transpose(1, 2) for x in (q, repeat_heads(k, repeats), repeat_heads(v, repeats))]
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, causal)
    elif q.dtype == torch.float32:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*heads_first, None, True, 0.0, causal)
        lse = lse.narrow(-1, 0, q.shape[1])
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def block_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys contribute to the gradients of q [b, s_q, h, d], and the gradients of k and v [b, s_k, g, d].

    With the result and the log-sum-exp over all keys, and not only over these, the softmax that the kernel recomputes
    is the whole one, and the contributions of all blocks add up (Dao 2023, FlashAttention-2, algorithm 2).

    Args:
        grad_out: [b, s_q, h, d], contiguous in d.
        q: As `block_forward`, and so are k, v and causal.
        k: See q.
        v: See q.
        out: Result over all keys, [b, s_q, h, d].
        lse: Log-sum-exp over all keys, [b, s_q, h].
        causal: See q.
    """
    heads, groups = q.shape[2], k.shape[2]
    repeats = heads // groups
    tensors = (grad_out, q, repeat_heads(k, repeats), repeat_heads(v, repeats), out)
    heads_first = [x.transpose(1, 2) for x in tensors]
    lse = lse.transpose(1, 2).contiguous()
    if q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads_first, lse, 0.0, causal)
    elif q.dtype == torch.float32:
        # rows of padding have weight exp(score - inf) = 0
        lse = functional.pad(lse, (0, -q.shape[1] % LSE_ALIGNMENT), value=float("inf"))
        grad_first, *qkv_first, out_first = heads_first
        wanted = [True, True, True, False]  # the last would be that of a bias of the scores
        *grads, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_first, *qkv_first, None, out_first, lse, *_no_dropout(q), 0.0, wanted, causal
        )
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *heads_first, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, *_no_dropout(q)
        )
    grad_q, *grads_kv = (grad.transpose(1, 2) for grad in grads)
    grad_k, grad_v = (
        grad.unflatten(2, (groups, repeats)).sum(3, dtype=accumulator(grad.dtype)) if repeats > 1 else grad
        for grad in grads_kv
    )
    return grad_q, grad_k, grad_v


def _no_dropout(like: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of random numbers that nobody draws."""
    seed, offset = torch.empty(2, 2, dtype=torch.uint64, device=like.device)
    return seed, offset
