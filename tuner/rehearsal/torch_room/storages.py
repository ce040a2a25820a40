"""Bytes of all storages that are alive, by what they are for."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tuner.rehearsal.torch_room.host_tensors import is_on_host, mark_on_host

ROUNDING = 512
"""Bytes up to whose multiple PyTorch's allocator rounds a tensor (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)."""
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, OTHER = "weights", "gradients", "optimizer", "activations", "other"


@dataclass(slots=True)
class _Lived:
    """Life of a storage with one size.

    Attributes:
        size: Size [bytes].
        purpose: What it is for.
        born: Number of the event at which it began.
        died: Number of the event at which it ended; None while it is alive.
    """

    size: int
    purpose: str
    born: int
    died: int | None = None


class _Reference(weakref.ref):  # type: ignore[type-arg] # one with a number is no generic type
    """Weak reference to a storage, which knows its address: `weakref.finalize` takes several times longer.

    Attributes:
        key: Address of the storage.
    """

    __slots__ = ("key",)
    key: int


class Storages:
    """Sizes of the live storages, counted while tensors are made and freed.

    What a storage is for may be said after the peak, as a gradient is known when the optimizer takes it.

    Attributes:
        purpose: Purpose of the storages that are made from now on.
        live: Bytes alive.
        peak: Largest number of bytes alive since the last `begin_step`.
    """

    def __init__(self) -> None:
        self.purpose = OTHER
        self.live = self.peak = 0
        self._events = self._peak_at = 0
        self._alive: dict[int, _Lived] = {}
        self._dead: list[_Lived] = []
        self._references: dict[int, _Reference] = {}

    @property
    def parts(self) -> dict[str, int]:
        """Bytes alive, by purpose."""
        return _by_purpose(self._alive.values())

    @property
    def peak_parts(self) -> dict[str, int]:
        """Bytes alive at the peak, by purpose."""
        lives, at = (*self._alive.values(), *self._dead), self._peak_at
        return _by_purpose(one for one in lives if one.born <= at and (one.died is None or at < one.died))

    def begin_step(self) -> None:
        """Look for the peak from now on."""
        self.peak, self._peak_at = self.live, self._events
        self._dead.clear()

    def assign(self, tensors: Any, purpose: str) -> None:
        """Say what the storages of some tensors are for."""
        for tensor in _tensors(tensors):
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if storage._cdata in self._alive:
                self._alive[storage._cdata].purpose = purpose
            elif not is_on_host(tensor):
                self._begin(storage, purpose)

    def leave(self, tensors: Any) -> None:
        """Say that some tensors lie in the host's memory."""
        for tensor in _tensors(tensors):
            key = tensor.untyped_storage()._cdata
            mark_on_host(tensor)
            if key in self._alive:
                self._end(key)

    def see(self, tensors: Any) -> None:
        """Count the storages of what an operator returned."""
        for tensor in _tensors(tensors):
            self.see_one(tensor)

    def see_one(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor without data."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive and tensor.device.type != "meta" and not is_on_host(tensor):
            self._begin(storage, self.purpose)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew after its size changed, as FSDP and DDP change it."""
        old = self._alive.get(storage._cdata)
        if old is not None:
            self._end(storage._cdata)
            self._live(storage, old.purpose)

    def _begin(self, storage: torch.UntypedStorage, purpose: str) -> None:
        reference = _Reference(storage, self._freed)
        reference.key = storage._cdata
        self._references[reference.key] = reference
        self._live(storage, purpose)

    def _freed(self, reference: _Reference) -> None:
        del self._references[reference.key]
        self._end(reference.key)

    def _live(self, storage: torch.UntypedStorage, purpose: str) -> None:
        self._events += 1
        one = self._alive[storage._cdata] = _Lived(_rounded(storage), purpose, self._events)
        self.live += one.size
        if self.live > self.peak:
            self.peak, self._peak_at = self.live, self._events

    def _end(self, key: int) -> None:
        one = self._alive.pop(key, None)
        if one is None:  # it left for the host's memory
            return
        self._events += 1
        one.died = self._events
        self.live -= one.size
        self._dead.append(one)


def _by_purpose(lives: Iterable[_Lived]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for one in lives:
        found[one.purpose] += one.size
    return {purpose: size for purpose, size in found.items() if size}


def _rounded(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // ROUNDING) * ROUNDING


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
