"""Ring attention: each rank keeps its queries, and keys and values travel round a ring of ranks.

Source: Liu, Zaharia and Abbeel 2023, Ring Attention with Blockwise Transformers, section 3. The sequence is distributed
in the order of attention.py's `local_positions`, which balances the causal mask. In every step every rank has about
s_local² / 2 pairs of a query and a key: those below the diagonal in the first step, then a visible half of each block.

Letters as in attention_kernels.py. A block is the keys and values of one rank in one tensor, [2, b, s_local, g, d]. It
travels with its g heads, however many query heads share one. In the forward pass a rank sends cp - 1 blocks. In the
backward pass it sends the same number of blocks, and as often the gradients of one, which are accumulated in at least
float32. The backward pass goes round in the other direction, from the block that came last, as in Transformer Engine.
Each block therefore reaches its own rank last, together with its gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trials.torch_training.model.attention_kernels import accumulator, block_backward, block_forward


def attend_on_ring(q: Tensor, k: Tensor, v: Tensor, ring: dist.ProcessGroup) -> Tensor:
    """Compute causal attention of a sequence that is split over a ring; return this rank's part [b, s_local, h, d].

    Args:
        q: Queries of this rank [b, s_local, h, d], in the order of `local_positions`.
        k: Keys of this rank [b, s_local, g, d].
        v: Values of this rank [b, s_local, g, d].
        ring: Ranks of the ring, in order.
    """
    out: Tensor = _RingAttention.apply(q, k, v, ring)  # type: ignore[no-untyped-call] # torch gives `apply` no types
    return out


class _RingAttention(torch.autograd.Function):
    """Ring attention with one round per direction; the next block is in transfer while the current one is computed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: dist.ProcessGroup) -> Tensor:
        """Merge the results of single blocks by their log-sum-exps (Dao 2023, FlashAttention-2, section 3.1)."""
        rank, size = dist.get_rank(ring), dist.get_world_size(ring)
        block = torch.stack((k, v))
        transfer = _BlockTransfer(block, ring, by=1)
        out, lse = block_forward(q, k, v, causal=True)
        # results of many blocks add up, which would lose digits in the kernels' own dtype
        out = out.to(accumulator(q.dtype))
        for step in range(1, size):
            block = transfer.wait()
            if step < size - 1:
                transfer = _BlockTransfer(block, ring, by=1)
            queries, keys = _select_visible(step, rank, q.shape[1])
            part_k, part_v = block[:, :, keys]
            part, part_lse = block_forward(q[:, queries], part_k, part_v, causal=False)
            # Weight of the new block: exp(part_lse) / (exp(part_lse) + exp(lse)).
            share = torch.sigmoid(part_lse - lse[:, queries])
            out[:, queries].lerp_(part.to(out.dtype), share.unsqueeze(-1))
            lse[:, queries] = torch.logaddexp(lse[:, queries], part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, block, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Accumulate the gradients of each block, which follow it one step behind; the own block comes last."""
        q, block, out, lse = ctx.saved_tensors
        rank, size = dist.get_rank(ctx.ring), dist.get_world_size(ctx.ring)
        grad_out = grad_out.contiguous()
        grad_q = torch.zeros_like(q, dtype=accumulator(q.dtype))
        grads = torch.zeros_like(block, dtype=grad_q.dtype)
        grads_transfer = None
        for step in reversed(range(size)):
            transfer = _BlockTransfer(block, ctx.ring, by=-1) if step else None
            queries, keys = _select_visible(step, rank, q.shape[1])
            part_k, part_v = block[:, :, keys]
            part_grad_out, part_q, part_out, part_lse = (x[:, queries] for x in (grad_out, q, out, lse))
            # The log-sum-exp over all keys gives the full softmax, so the contributions of the blocks add up.
            part_grad_q, *part_grads = block_backward(
                part_grad_out, part_q, part_k, part_v, part_out, part_lse, causal=step == 0
            )
            grad_q[:, queries] += part_grad_q
            if grads_transfer is not None:
                # The partial sum arrives from the previous rank, one step behind its block.
                grads = grads_transfer.wait()
            grads[:, :, keys] += torch.stack(part_grads)
            if transfer is not None:
                grads_transfer = _BlockTransfer(grads, ctx.ring, by=-1)
                block = transfer.wait()
        grad_k, grad_v = grads.to(block.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _select_visible(step: int, rank: int, length: int) -> tuple[slice, slice]:
    """Return which queries of a rank see which keys of the block from `step` places back; both are `length` long.

    All queries see the first half of an earlier rank's keys. Only the second half of the queries sees a later rank's
    keys, and it sees all of them. In the rank's own block, each query sees the keys up to its own.
    """
    if step == 0:
        return slice(None), slice(None)
    if step <= rank:
        return slice(None), slice(length // 2)
    return slice(length // 2, None), slice(None)


class _BlockTransfer:
    """Transfer of a block to the rank `by` places on in the ring.

    Meanwhile a block of the same shape arrives from the rank `by` places back.
    """

    def __init__(self, block: Tensor, ring: dist.ProcessGroup, *, by: int) -> None:
        rank, size = dist.get_rank(ring), dist.get_world_size(ring)
        following, previous = (dist.get_global_rank(ring, other % size) for other in (rank + by, rank - by))
        self._sent = block  # keeps the memory alive: a message in transfer holds no reference to it
        self._received = torch.empty_like(block)
        self._works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, block, following, ring), dist.P2POp(dist.irecv, self._received, previous, ring)]
        )

    def wait(self) -> Tensor:
        """Return the received block after both messages are complete."""
        for work in self._works:
            work.wait()
        return self._received
