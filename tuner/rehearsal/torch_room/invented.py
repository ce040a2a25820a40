"""Answers to what a program asks of data that do not exist: a loss, a norm, whether two tensors are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tuner.rehearsal.torch_room.known_values import is_true

_NUMBERS: list[int] = []
"""Answers for whole numbers where a framework knows more, the present one last."""


@contextmanager
def answering(number: int) -> Iterator[None]:
    """Let every whole number that is asked for inside be `number`."""
    _NUMBERS.append(number)
    try:
        yield
    finally:
        _NUMBERS.pop()


def _number(tensor: torch.Tensor) -> bool | int | float:
    """Return one for a number, and False for a truth value that is not known: nothing is infinite, nothing overflowed.

    Numbers of one byte are truth values too: DeepSpeed asks so whether a gradient overflowed.
    """
    if tensor.dtype in (torch.bool, torch.uint8):
        return is_true(tensor)
    if tensor.dtype.is_floating_point:
        return 1.0
    return _NUMBERS[-1] if _NUMBERS else 1


ASKED: Mapping[Any, Callable[[torch.Tensor], Any]] = {
    torch.ops.aten._local_scalar_dense.default: _number,
    torch.ops.aten.is_nonzero.default: is_true,
    torch.ops.aten.equal.default: lambda _: True,
}
"""Operators whose result is no tensor, with the answer that stands for it."""
