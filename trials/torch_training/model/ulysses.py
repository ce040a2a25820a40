"""The all-to-all of DeepSpeed-Ulysses: from a split sequence with all heads to the whole sequence with some, and back.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, section 3.2. Letters: b sequences, s the length of the sequence that the
group shares, h heads of any kind (of queries, or of keys and values), d the size of a head, up the size of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SEQUENCE, HEADS = 1, 2
"""Dims of the tensors."""


def split_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From a slice of the sequence, [b, s / up, h, d], to a slice of the heads, [b, s, h / up, d]; with autograd."""
    return _exchange(x, HEADS, SEQUENCE, group)


def split_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From a slice of the heads, [b, s, h / up, d], to a slice of the sequence, [b, s / up, h, d]; with autograd."""
    return _exchange(x, SEQUENCE, HEADS, group)


def _exchange(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Sends each rank its slice of dim `split`, and joins the slices that come along dim `join`."""
    size = dist.get_world_size(group)
    assert x.shape[split] % size == 0, f"{size} ranks split dim {split} of {list(x.shape)} evenly"
    exchanged: Tensor = _Exchange.apply(x, split, join, group)  # type: ignore[no-untyped-call] # no types in torch
    return exchanged


class _Exchange(torch.autograd.Function):
    """An exchange, whose backward is the exchange the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
        """As `_exchange`."""
        ctx.split, ctx.join, ctx.group = split, join, group
        sent = torch.stack(x.chunk(dist.get_world_size(group), split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """As `_exchange`, with the dims swapped."""
        return _exchange(grad, ctx.join, ctx.split, ctx.group), None, None, None
