"""What is trained on: sequences of random tokens, some much more frequent than others, the same for every layout."""

from __future__ import annotations

import torch
from torch import Tensor

SKEW = 3.0
"""Tokens are u^SKEW of the vocabulary with u uniform: routers and losses have something to tell apart."""


def sequences(vocab_size: int, sequence_length: int, global_batch_size: int, seed: int) -> Tensor:
    """The batch [global_batch_size, sequence_length + 1]: inputs and, one further, targets."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand((global_batch_size, sequence_length + 1), generator=generator)
    return (uniform**SKEW * vocab_size).long().clamp_(max=vocab_size - 1)
