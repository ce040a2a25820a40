"""Cross-entropy loss of logits whose vocabulary is split over tensor-parallel ranks.

Three all-reduces of one number per token replace the gathering of the logits (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _SplitCrossEntropy(torch.autograd.Function):
    """Sum over tokens of -log softmax(logits)[target]; logits [t, v] are the columns from `first` on."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        """Compute the loss from logits [t, v] and targets [t]; the gradient needs only the local probabilities."""
        scores = logits.float()
        # Subtract the maximum over the whole vocabulary, so that no exponential overflows.
        highest = scores.max(dim=1).values
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        scores = (scores - highest[:, None]).exp()
        total = scores.sum(dim=1)
        dist.all_reduce(total, group=group)
        # The target's logit is on exactly one rank; the others add 0 to the sum.
        column = target - first
        is_here = (column >= 0) & (column < logits.shape[1])
        column = column.clamp(0, logits.shape[1] - 1)
        own = logits.float().gather(1, column[:, None])[:, 0] - highest
        own = torch.where(is_here, own, 0.0)
        dist.all_reduce(own, group=group)
        ctx.save_for_backward(scores.div_(total[:, None]), column, is_here)
        ctx.dtype = logits.dtype
        return (total.log() - own).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, column, is_here = ctx.saved_tensors
        # Gradient of the loss: softmax minus the one-hot target.
        probabilities = probabilities.clone()
        probabilities[torch.arange(len(column), device=column.device), column] -= is_here.float()
        return (probabilities.mul_(gradients[0])).to(ctx.dtype), None, None, None


def cross_entropy(
    logits: Tensor, target: Tensor, *, vocab_size: int, first: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Compute the sum of the tokens' losses.

    Args:
        logits: Logits of this rank's part of the vocabulary [..., v].
        target: Target tokens [...].
        vocab_size: Number of rows in the vocabulary; columns beyond it are padding.
        first: Token of the first column.
        group: Ranks that hold the other parts; None if this rank holds the whole vocabulary.
    """
    logits = logits.flatten(0, -2)
    # Padding columns get the logit -inf, and so the probability 0.
    filling = first + logits.shape[1] - vocab_size
    if filling > 0:
        logits = torch.cat([logits[:, :-filling], logits.new_full((len(logits), filling), -torch.inf)], dim=1)
    if group is None:
        return torch.nn.functional.cross_entropy(logits.float(), target.flatten(), reduction="sum")
    loss: Tensor = _SplitCrossEntropy.apply(logits, target.flatten(), first, group)  # type: ignore[no-untyped-call] # torch leaves it untyped
    return loss
