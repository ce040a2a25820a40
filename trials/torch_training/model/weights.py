"""Initial values of every logical weight, which do not depend on the configuration.

A weight is seeded by its name, created whole, and cut to the part that a rank holds. So every configuration starts from
the same model. Each weight is kept as a matrix or vector whose rows ZeRO may shard.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

INITIAL_STD = 0.02
"""Standard deviation of matrices (GPT-2, Megatron-LM --init-method-std)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A part of one dim of a weight.

    Attributes:
        dim: Dim that is divided.
        index: Number of the part.
        parts: Number of equal parts; the last is padded with zeros if they do not divide the dim.
    """

    dim: int
    index: int
    parts: int


class WeightMaker:
    """Factory for the weights of one rank.

    Args:
        seed: Seed of all weights.
        device: Device on which the weights are created.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device

    def matrix(self, name: str, shape: Sequence[int], cuts: Sequence[Cut] = (), *, columns: int = 1) -> nn.Parameter:
        """Return a part of a normally distributed weight of logical `shape`, its last `columns` dims as columns."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        # Create the whole weight and then cut it, so that the values do not depend on the cut.
        whole = torch.randn(tuple(shape), generator=generator, device=self._device).mul_(INITIAL_STD)
        part = _cut(whole, cuts)
        return nn.Parameter(part.flatten(-columns).flatten(0, -2).clone())

    def constant(self, value: float, shape: Sequence[int], cuts: Sequence[Cut] = ()) -> nn.Parameter:
        """Return a part of a constant weight as a vector."""
        whole = torch.full(tuple(shape), value, device=self._device)
        return nn.Parameter(_cut(whole, cuts).flatten().clone())


def cuts_of(placement: Placement, index: int, parts: int) -> tuple[Cut, ...]:
    """Return the part that rank `index` of `parts` holds under a placement."""
    return (Cut(dim=placement.dim, index=index, parts=parts),) if isinstance(placement, Shard) and parts > 1 else ()


def _cut(whole: Tensor, cuts: Sequence[Cut]) -> Tensor:
    for cut in cuts:
        # Parts are equal: the last one is padded with zeros, as for a vocabulary that tp does not divide.
        size = -(-whole.shape[cut.dim] // cut.parts)
        lacking = size * cut.parts - whole.shape[cut.dim]
        if lacking:
            filling = list(whole.shape)
            filling[cut.dim] = lacking
            whole = torch.cat([whole, whole.new_zeros(filling)], dim=cut.dim)
        whole = whole.narrow(cut.dim, cut.index * size, size)
    return whole
