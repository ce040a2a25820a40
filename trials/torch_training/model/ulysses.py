"""All-to-all of DeepSpeed-Ulysses: between a split sequence with all heads and the whole sequence with some heads.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, section 3.2. Letters: b sequences, s the length of the sequence that the
group shares, h heads (of queries, or of keys and values), d the size of a head, up the size of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SEQUENCE, HEADS = 1, 2
"""Numbers of the tensors' sequence dim and heads dim."""


def split_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange slices of the sequence [b, s / up, h, d] for slices of the heads [b, s, h / up, d], with autograd."""
    return _exchange(x, HEADS, SEQUENCE, group)


def split_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange slices of the heads [b, s, h / up, d] for slices of the sequence [b, s / up, h, d], with autograd."""
    return _exchange(x, SEQUENCE, HEADS, group)


def _exchange(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Send each rank its slice of dim `split`, and join the received slices along dim `join`."""
    size = dist.get_world_size(group)
    assert x.shape[split] % size == 0, f"{size} ranks must split dim {split} of {list(x.shape)} evenly"
    exchanged: Tensor = _Exchange.apply(x, split, join, group)  # type: ignore[no-untyped-call] # no types in torch
    return exchanged


class _Exchange(torch.autograd.Function):
    """All-to-all whose backward pass is the all-to-all in the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
        """Exchange slices; arguments as in `_exchange`."""
        ctx.split, ctx.join, ctx.group = split, join, group
        # The first dim of the buffer numbers the receivers.
        sent = torch.stack(x.chunk(dist.get_world_size(group), split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Exchange the gradient's slices, with both dims swapped."""
        return _exchange(grad, ctx.join, ctx.split, ctx.group), None, None, None
