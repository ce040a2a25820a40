"""Attention on one device: a whole causal sequence, or one block of it whose result is merged with others.

Letters: b sequences, s_q queries, s_k keys and values, h heads, g heads of keys and values (a divisor of h), d the size
of a head. All tensors are [b, s, h or g, d], in the caller's dtype. Log-sum-exps are [b, s_q, h] in at least float32.
The kernels are torch's fused ones that also return the log-sum-exp, one for each kind of device. Those for GPUs need a
d that is a multiple of 8. If g < h, they get repeated heads, because not all of them support grouped heads (the CPU
kernel learned it late, https://github.com/pytorch/pytorch/pull/157893).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LSE_ALIGNMENT = 32
"""Multiple to which torch's memory-efficient kernel pads its log-sum-exps; kAlignLSE in its kernel_forward.h."""


def attend_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of s_q = s_k positions with autograd; return [b, s, h, d]."""
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=q.shape[2] != k.shape[2]
    )
    return out.transpose(1, 2)


def repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """Repeat each head `repeats` times in a row; return [b, s, g * repeats, d]."""
    return x.repeat_interleave(repeats, dim=2) if repeats > 1 else x


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results are added up."""
    return torch.promote_types(dtype, torch.float32)


def block_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute attention of queries to one block of keys.

    Return the result [b, s_q, h, d] and its log-sum-exp [b, s_q, h].

    Args:
        q: Queries of this rank [b, s_q, h, d].
        k: Keys of the block [b, s_k, g, d].
        v: Values of the block [b, s_k, g, d].
        causal: Whether query i sees only keys 0 to i; requires s_q = s_k.
    """
    repeats = q.shape[2] // k.shape[2]
    heads_first = [x.transpose(1, 2) for x in (q, repeat_heads(k, repeats), repeat_heads(v, repeats))]
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, causal)
    elif q.dtype == torch.float32:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*heads_first, None, True, 0.0, causal)
        # The kernel pads the log-sum-exps to a multiple of LSE_ALIGNMENT.
        lse = lse.narrow(-1, 0, q.shape[1])
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def block_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the block's contributions to the gradient of q [b, s_q, h, d], and to those of k and v [b, s_k, g, d].

    With the result and the log-sum-exp over all keys, not only over this block, the kernel recomputes the full softmax.
    The contributions of all blocks then add up (Dao 2023, FlashAttention-2, algorithm 2).

    Args:
        grad_out: Gradient of the result [b, s_q, h, d], contiguous in d.
        q: Queries as in `block_forward`.
        k: Keys as in `block_forward`.
        v: Values as in `block_forward`.
        out: Result over all keys [b, s_q, h, d].
        lse: Log-sum-exp over all keys [b, s_q, h].
        causal: Causal mask as in `block_forward`.
    """
    heads, groups = q.shape[2], k.shape[2]
    repeats = heads // groups
    tensors = (grad_out, q, repeat_heads(k, repeats), repeat_heads(v, repeats), out)
    heads_first = [x.transpose(1, 2) for x in tensors]
    lse = lse.transpose(1, 2).contiguous()
    if q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads_first, lse, 0.0, causal)
    elif q.dtype == torch.float32:
        # Padded rows get the weight exp(score - inf) = 0.
        lse = functional.pad(lse, (0, -q.shape[1] % LSE_ALIGNMENT), value=float("inf"))
        grad_first, *qkv_first, out_first = heads_first
        wanted = [True, True, True, False]  # the fourth is the gradient of a bias of the scores
        *grads, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_first, *qkv_first, None, out_first, lse, *_no_dropout(q), 0.0, wanted, causal
        )
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *heads_first, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, *_no_dropout(q)
        )
    grad_q, *grads_kv = (grad.transpose(1, 2) for grad in grads)
    # The gradient of a key head is the sum over the query heads that share it.
    grad_k, grad_v = (
        grad.unflatten(2, (groups, repeats)).sum(3, dtype=accumulator(grad.dtype)) if repeats > 1 else grad
        for grad in grads_kv
    )
    return grad_q, grad_k, grad_v


def _no_dropout(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return placeholder seed and offset for a random generator that is not used."""
    seed, offset = torch.empty(2, 2, dtype=torch.uint64, device=like.device)
    return seed, offset
