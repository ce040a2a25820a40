"""Answers to what a program asks of data that do not exist: a loss, a norm, whether two tensors are equal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

_TORCH = f"{Path(torch.__file__).parent}/"
_HERE = f"{Path(__file__).parent}/"


def _number(tensor: torch.Tensor) -> bool | int | float:
    """Return one for a number, and False for a truth value: nothing is infinite, nothing overflowed.

    Numbers of one byte are truth values too: DeepSpeed asks so whether a gradient overflowed.
    """
    if tensor.dtype in (torch.bool, torch.uint8):
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1


ASKED: Mapping[Any, Callable[[torch.Tensor], Any]] = {
    torch.ops.aten._local_scalar_dense.default: _number,
    torch.ops.aten.is_nonzero.default: lambda _: False,
    torch.ops.aten.equal.default: lambda _: True,
}
"""Operators whose result is no tensor, with the answer that stands for it."""


def place_in_program() -> str:
    """Return the file and line of the program, outside of PyTorch, that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE)):
        frame = frame.f_back
    return f"{shown_file(frame.f_code.co_filename)}:{frame.f_lineno}"


def shown_file(path: str) -> str:
    """Return a path without the folder of installed packages."""
    return path.rsplit("site-packages/", 1)[-1]
