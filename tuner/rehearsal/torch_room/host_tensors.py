"""Tensors that a program has in the host's memory: batches before they are copied to the device.

Everything lies on the CPU here, so that these are marked; a copy of one to the device is a tensor of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ON_HOST: set[int] = set()
"""Addresses of the storages."""
_MAKING: list[bool] = []
"""Not empty while tensors are made in the host's memory."""


@contextmanager
def in_host_memory() -> Iterator[None]:
    """Mark all tensors that are made inside as those of the host's memory."""
    _MAKING.append(True)
    try:
        yield
    finally:
        _MAKING.pop()


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of the host's memory; one that is made there is marked."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    if _MAKING and key not in _ON_HOST:
        mark_on_host(tensor)
    return key in _ON_HOST


def mark_on_host(tensor: torch.Tensor) -> None:
    """Mark a tensor as one of the host's memory."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in _ON_HOST:
        _ON_HOST.add(key)
        weakref.finalize(storage, _ON_HOST.discard, key)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as the device has it: itself, or its copy."""
    return tensor.clone() if is_on_host(tensor) else tensor
