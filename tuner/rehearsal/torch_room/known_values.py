"""Whole numbers that tensors without data stand for, as far as a program asks for lists of them.

A tensor that stands for equal numbers keeps them in all its views and copies.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_EQUAL: dict[int, int] = {}
"""Number in all places of a storage, by the storage's address."""
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten._reshape_copy.default)


def equal_numbers(shape: tuple[int, ...], value: int) -> torch.Tensor:
    """Make a tensor without data that stands for one number in all places."""
    found = torch.empty(shape, dtype=torch.long)
    _keep(found, value)
    return found


def has_known_numbers(tensor: torch.Tensor) -> bool:
    """Return whether it is known what numbers a tensor stands for."""
    return bool(_EQUAL) and tensor.untyped_storage()._cdata in _EQUAL


def follow_copy(func: Any, source: Any, result: Any) -> None:
    """Let a copy of equal numbers stand for them too."""
    if func in _COPIES and isinstance(source, torch.Tensor):
        value = _EQUAL.get(source.untyped_storage()._cdata)
        if value is not None:
            _keep(result, value)


def answer_lists() -> None:
    """Let `tolist` return the numbers that a tensor stands for."""
    ask: Any = FakeTensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        value = _EQUAL.get(tensor.untyped_storage()._cdata)
        return ask(tensor) if value is None else _nested(tuple(tensor.shape), value)

    FakeTensor.tolist = tolist  # type: ignore[assignment, method-assign]


def _keep(tensor: torch.Tensor, value: int) -> None:
    storage = tensor.untyped_storage()
    key = storage._cdata
    _EQUAL[key] = value
    weakref.finalize(storage, _EQUAL.pop, key, None)


def _nested(shape: tuple[int, ...], value: int) -> Any:
    return value if not shape else [_nested(shape[1:], value) for _ in range(shape[0])]
