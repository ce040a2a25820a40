"""Ring attention: each rank keeps its queries, and the keys and values travel round a ring of ranks.

Source: Liu, Zaharia and Abbeel 2023, Ring Attention with Blockwise Transformers, section 3. The sequence is dealt out
in the order of attention.py's `local_positions`, which balances the causal mask: in every step every rank has about
s_local² / 2 pairs of a query and a key, at first those below the diagonal, then a visible half of each block.

Letters as in attention_kernels.py. A block is the keys and values of one rank in one tensor, [2, b, s_local, g, d]; it
travels with its g heads, however many heads of queries share one. Forward, a rank sends cp - 1 blocks; backward, it
sends as many and as often the gradients of one, which are added up in at least float32. For that the backward pass goes
round the other way, from the block that came last, as in Transformer Engine: each block comes home last, and its
gradients with it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trials.torch_training.model.attention_kernels import accumulator, block_backward, block_forward


def attend_on_ring(q: Tensor, k: Tensor, v: Tensor, ring: dist.ProcessGroup) -> Tensor:
    """Causal attention of a sequence that is split over a ring: this rank's [b, s_local, h, d].

    Args:
        q: This rank's queries, [b, s_local, h, d], in the order of `local_positions`.
        k: Its keys, [b, s_local, g, d].
        v: Its values, [b, s_local, g, d].
        ring: The ranks of the ring, in order.
    """
    out: Tensor = _RingAttention.apply(q, k, v, ring)  # type: ignore[no-untyped-call] # torch gives `apply` no types
    return out


class _RingAttention(torch.autograd.Function):
    """Each direction goes round once; the next block is under way while the present one is computed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: dist.ProcessGroup) -> Tensor:
        """Merges the results for single blocks by their log-sum-exps (Dao 2023, FlashAttention-2, section 3.1)."""
        rank, size = dist.get_rank(ring), dist.get_world_size(ring)
        block = torch.stack((k, v))
        passing = _Passing(block, ring, by=1)
        out, lse = block_forward(q, k, v, causal=True)
        out = out.to(accumulator(q.dtype))
        for step in range(1, size):
            block = passing.wait()
            if step < size - 1:
                passing = _Passing(block, ring, by=1)
            queries, keys = _visible(step, rank, q.shape[1])
            part_k, part_v = block[:, :, keys]
            part, part_lse = block_forward(q[:, queries], part_k, part_v, causal=False)
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
        """Adds up the gradients of a block while they follow it, one step behind; its own rank is its last."""
        q, block, out, lse = ctx.saved_tensors
        rank, size = dist.get_rank(ctx.ring), dist.get_world_size(ctx.ring)
        grad_out = grad_out.contiguous()
        grad_q = torch.zeros_like(q, dtype=accumulator(q.dtype))
        grads = torch.zeros_like(block, dtype=grad_q.dtype)
        grads_passing = None
        for step in reversed(range(size)):
            passing = _Passing(block, ctx.ring, by=-1) if step else None
            queries, keys = _visible(step, rank, q.shape[1])
            part_k, part_v = block[:, :, keys]
            part_grad_out, part_q, part_out, part_lse = (x[:, queries] for x in (grad_out, q, out, lse))
            part_grad_q, *part_grads = block_backward(
                part_grad_out, part_q, part_k, part_v, part_out, part_lse, causal=step == 0
            )
            grad_q[:, queries] += part_grad_q
            if grads_passing is not None:
                grads = grads_passing.wait()
            grads[:, :, keys] += torch.stack(part_grads)
            if passing is not None:
                grads_passing = _Passing(grads, ctx.ring, by=-1)
                block = passing.wait()
        grad_k, grad_v = grads.to(block.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _visible(step: int, rank: int, length: int) -> tuple[slice, slice]:
    """Which of a rank's queries see which keys of the block from `step` places back; both are `length` long.

    All queries see the first half of the keys of an earlier rank. Of a later rank, the second half of the queries sees
    all keys. Of the rank itself, each query sees the keys up to its own.
    """
    if step == 0:
        return slice(None), slice(None)
    if step <= rank:
        return slice(None), slice(length // 2)
    return slice(length // 2, None), slice(None)


class _Passing:
    """A block on its way to the rank `by` places on in the ring, while one of the same shape comes from `by` back."""

    def __init__(self, block: Tensor, ring: dist.ProcessGroup, *, by: int) -> None:
        rank, size = dist.get_rank(ring), dist.get_world_size(ring)
        following, previous = (dist.get_global_rank(ring, other % size) for other in (rank + by, rank - by))
        self._sent = block  # a message under way does not keep its memory
        self._received = torch.empty_like(block)
        self._works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, block, following, ring), dist.P2POp(dist.irecv, self._received, previous, ring)]
        )

    def wait(self) -> Tensor:
        """What has come, once both messages are through."""
        for work in self._works:
            work.wait()
        return self._received
