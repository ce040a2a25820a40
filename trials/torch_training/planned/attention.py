"""Attention of a rank's queries to whole sequences of keys, and its gradient from the kept log-sum-exp.

Letters: b sequences, q queries of the rank, k keys, h key heads, g query heads per key head, d size of a head. The
kernels are torch's fused ones for CPUs, which also return the log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trials.torch_training.model.attention_kernels import repeat_heads


def attend(query: Tensor, key: Tensor, value: Tensor, *, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the context [b, q, h*g, d] and the log-sum-exp of each query's scores [b, q, h*g].

    Args:
        query: Queries [b, q, h*g, d], in which the heads of one key head are neighbours.
        key: Keys of all positions [b, k, h, d].
        value: Values of all positions [b, k, h, d].
        positions: Positions of the queries [q], in increasing order, if a query sees only keys up to its own; None if
            it sees all.
    """
    key, value, is_causal, mask = _seen(query, key, value, positions)
    found, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(query, key, value), 0.0, is_causal, attn_mask=mask
    )
    return found.transpose(1, 2).contiguous(), normaliser.transpose(1, 2).contiguous()


def attend_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
    normaliser: Tensor,
    given: Tensor,
    *,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    Args:
        query: Queries, as in `attend`.
        key: Keys, as in `attend`.
        value: Values, as in `attend`.
        context: Context that `attend` returned.
        normaliser: Log-sum-exp that `attend` returned.
        given: Gradient of the context.
        positions: Positions of the queries, as in `attend`.
    """
    heads, unseen = key.shape[2], key.shape[1]
    key, value, is_causal, mask = _seen(query, key, value, positions)
    unseen -= key.shape[1]
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        given.transpose(1, 2),
        *_heads_first(query, key, value),
        context.transpose(1, 2),
        normaliser.transpose(1, 2).contiguous(),
        0.0,
        is_causal,
        attn_mask=mask,
    )
    to_query, *to_others = (grad.transpose(1, 2).contiguous() for grad in grads)
    # the gradient of a key head is the sum over the query heads that share it; keys behind all queries have none
    to_key, to_value = (
        functional.pad(torch.unflatten(grad, 2, (heads, -1)).sum(dim=3), (0, 0, 0, 0, 0, unseen)) for grad in to_others
    )
    return to_query, to_key, to_value


def _seen(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor, bool, Tensor | None]:
    """Return the keys and values that any query sees, and the kernel's causal mask or one of our own [q, k]."""
    if positions is None:
        return key, value, False, None
    if len(positions) == key.shape[1]:
        return key, value, True, None
    seen = int(positions[-1]) + 1
    is_hidden = positions[:, None] < torch.arange(seen)
    mask = torch.zeros(len(positions), seen, dtype=query.dtype).masked_fill_(is_hidden, float("-inf"))
    return key[:, :seen], value[:, :seen], False, mask


def _heads_first(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return queries, keys and values as [b, h*g, q or k, d], with key heads repeated for each of their queries."""
    repeats = query.shape[2] // key.shape[2]
    return [each.transpose(1, 2) for each in (query, repeat_heads(key, repeats), repeat_heads(value, repeats))]
