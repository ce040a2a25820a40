"""Training data: sequences of random tokens with skewed frequencies, equal for every layout."""

from __future__ import annotations

import torch
from torch import Tensor

SKEW = 3.0
"""Exponent of the token distribution: tokens are u^SKEW of the vocabulary with u uniform.

Some tokens are then much more frequent than others, which gives routers and losses differences to learn.
"""


def sequences(vocab_size: int, sequence_length: int, global_batch_size: int, seed: int) -> Tensor:
    """Return the batch [global_batch_size, sequence_length + 1]: inputs and, shifted by one, targets."""
    generator = torch.Generator().manual_seed(seed)
    # A generator on the CPU gives every rank and device the same numbers.
    uniform = torch.rand((global_batch_size, sequence_length + 1), generator=generator)
    return (uniform**SKEW * vocab_size).long().clamp_(max=vocab_size - 1)
