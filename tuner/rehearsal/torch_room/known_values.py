"""Whole numbers that tensors without data stand for, as far as a program asks for lists of them.

A tensor that stands for equal numbers keeps them in all its views and copies. How many elements a mask selects is known
where the framework knows it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_EQUAL: dict[int, int] = {}
"""Number in all places of a storage, by the storage's address."""
_SELECTED: list[int] = []
"""Numbers of elements that masks select, the present one last."""
_COPIES = (
    *(torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten._reshape_copy.default),
    *(torch.ops.aten.all.default, torch.ops.aten.any.default),
)
"""Operators whose result stands for the number that their first argument stands for."""


def equal_numbers(shape: tuple[int, ...], value: int) -> torch.Tensor:
    """Make a tensor without data that stands for one number in all places."""
    found = torch.empty(shape, dtype=torch.long)
    _keep(found, value)
    return found


def always_true(tensor: torch.Tensor) -> torch.Tensor:
    """Let truth values be true in all places, and return them."""
    _keep(tensor, 1)
    return tensor


def known_number(tensor: torch.Tensor) -> int | None:
    """Return the number that a tensor stands for; None if there is none."""
    return _EQUAL.get(tensor.untyped_storage()._cdata)


def follow_copy(func: Any, source: Any, result: Any) -> None:
    """Let a copy of equal numbers stand for them too."""
    if func in _COPIES and isinstance(source, torch.Tensor):
        value = _EQUAL.get(source.untyped_storage()._cdata)
        if value is not None:
            _keep(result, value)


@contextmanager
def selecting(count: int) -> Iterator[None]:
    """Let every mask inside select `count` elements."""
    _SELECTED.append(count)
    try:
        yield
    finally:
        _SELECTED.pop()


def count_selected() -> int | None:
    """Return how many elements a mask selects here; None if that is not known."""
    return _SELECTED[-1] if _SELECTED else None


def selected(func: Any, source: Any) -> torch.Tensor | None:
    """Return what an operator selects by a mask whose number of elements is known; None for others."""
    if func is not torch.ops.aten.masked_select.default or not _SELECTED:
        return None
    return torch.empty((_SELECTED[-1],), dtype=source.dtype)


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
