"""Causal attention of a sequence split over ranks: by a ring (context parallel, cp), by Ulysses (up), or by both.

With both, each place of the ring is a group of up ranks: the ring distributes the sequence, and Ulysses splits the part
of one place. Letters as in attention_kernels.py; s_local is the number of positions that one rank holds.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from trials.torch_training.model.attention_kernels import attend_whole, repeat_heads
from trials.torch_training.model.ring import attend_on_ring
from trials.torch_training.model.ulysses import split_heads, split_sequence


def local_positions(sequence_length: int, *, cp: int, up: int, cp_rank: int, up_rank: int) -> Tensor:
    """Return the positions of the sequence that a rank holds, in its order: int64 [sequence_length / (cp * up)].

    The ring is balanced for the causal mask: the sequence is divided into 2 cp chunks, and place i of the ring holds
    chunks i and 2 cp - 1 - i (Llama team 2024, The Llama 3 Herd of Models, section 3.3.2). The up ranks of a place hold
    contiguous slices of its chunks.
    """
    divisor = 2 * cp * up if cp > 1 else up
    assert sequence_length % divisor == 0, f"the sequence length {sequence_length} must be a multiple of {divisor}"
    positions = torch.arange(sequence_length)
    if cp > 1:
        # An early and a late chunk together see about as many keys on every rank.
        positions = positions.view(2 * cp, -1)[[cp_rank, 2 * cp - 1 - cp_rank]].flatten()
    return positions.view(up, -1)[up_rank]


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, ring: dist.ProcessGroup | None, ulysses: dist.ProcessGroup | None
) -> Tensor:
    """Compute causal attention of this rank's queries to the whole sequence, with autograd; return [b, s_local, h, d].

    Args:
        q: Queries at `local_positions`, with rotary embedding [b, s_local, h, d].
        k: Keys at the same positions, with rotary embedding [b, s_local, g, d], with g a divisor of h.
        v: Values at the same positions [b, s_local, g, d].
        ring: Ranks of the ring, in order; None or a single rank without a ring.
        ulysses: Ranks that exchange heads for positions, in order; None or a single rank without Ulysses. Their number
            divides h. If it does not divide g, keys and values are repeated until it does.
    """
    assert q.shape[2] % k.shape[2] == 0, "the number of key heads must divide that of query heads"
    up = _group_size(ulysses)
    if ulysses is not None and up > 1:
        # Repeat the heads of keys and values up to the least common multiple of g and up.
        repeats = math.lcm(k.shape[2], up) // k.shape[2]
        k, v = repeat_heads(k, repeats), repeat_heads(v, repeats)
        q, k, v = (split_heads(x, ulysses) for x in (q, k, v))
    out = attend_on_ring(q, k, v, ring) if ring is not None and _group_size(ring) > 1 else attend_whole(q, k, v)
    return split_sequence(out, ulysses) if ulysses is not None and up > 1 else out


def _group_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)
