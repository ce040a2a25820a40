"""Bytes of all storages that are alive, by what they are for."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tuner.rehearsal.torch_room.host_tensors import is_on_host

ROUNDING = 512
"""Bytes up to whose multiple PyTorch's allocator rounds a tensor (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)."""
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, OTHER = "weights", "gradients", "optimizer", "activations", "other"


class Storages:
    """Sizes of the live storages, counted while tensors are made and freed.

    Attributes:
        purpose: Purpose of the storages that are made from now on.
        live: Bytes alive.
        peak: Largest number of bytes alive since the last `begin_step`.
        peak_parts: Bytes by purpose at the peak.
    """

    def __init__(self) -> None:
        self.purpose = OTHER
        self.live = self.peak = 0
        self.peak_parts: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        self._purposes: dict[int, str] = {}
        self._parts: Counter[str] = Counter()

    @property
    def parts(self) -> dict[str, int]:
        """Bytes alive, by purpose."""
        return {purpose: size for purpose, size in self._parts.items() if size}

    def begin_step(self) -> None:
        """Look for the peak from now on."""
        self.peak, self.peak_parts = self.live, self.parts

    def assign(self, tensors: Any, purpose: str) -> None:
        """Say what the storages of some tensors are for."""
        for tensor in _tensors(tensors):
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            key = storage._cdata
            if key not in self._sizes:
                self._begin(storage, purpose)
                continue
            self._parts[self._purposes[key]] -= self._sizes[key]
            self._parts[purpose] += self._sizes[key]
            self._purposes[key] = purpose

    def see(self, tensors: Any) -> None:
        """Count the storages of what an operator returned."""
        for tensor in _tensors(tensors):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes and tensor.device.type != "meta" and not is_on_host(tensor):
                self._begin(storage, self.purpose)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew after its size changed, as FSDP and DDP change it."""
        if storage._cdata in self._sizes:
            self._change(storage._cdata, _rounded(storage) - self._sizes[storage._cdata])

    def _begin(self, storage: torch.UntypedStorage, purpose: str) -> None:
        key = storage._cdata
        self._sizes[key], self._purposes[key] = 0, purpose
        weakref.finalize(storage, self._end, key)
        self._change(key, _rounded(storage))

    def _end(self, key: int) -> None:
        self._change(key, -self._sizes[key])
        del self._sizes[key], self._purposes[key]

    def _change(self, key: int, by: int) -> None:
        self._sizes[key] += by
        self._parts[self._purposes[key]] += by
        self.live += by
        if self.live > self.peak:
            self.peak, self.peak_parts = self.live, self.parts


def _rounded(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // ROUNDING) * ROUNDING


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
