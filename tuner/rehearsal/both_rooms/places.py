"""Places in the user's program, as they are shown: files and lines outside of its framework and of a rehearsal."""

from __future__ import annotations

import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

_MOST_LINES = 7
_HERE = f"{Path(__file__).parents[1]}/"
_BENEATH = (
    _HERE,
    *(f"{Path(spec.origin).parent}/" for spec in map(find_spec, ("torch", "jax", "numpy")) if spec and spec.origin),
)


def is_ours(file: str) -> bool:
    """Return whether a file is of a rehearsal."""
    return file.startswith(_HERE)


def is_beneath(file: str) -> bool:
    """Return whether a file is of PyTorch, JAX, numpy or a rehearsal."""
    return file.startswith((*_BENEATH, "<frozen", "<string"))


def place_in_program() -> str:
    """Return the file and line of the program that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_beneath(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{shown_file(frame.f_code.co_filename)}:{frame.f_lineno}"


def lines_on_the_way(error: BaseException) -> list[str]:
    """Return the program's own lines on the way to an error, the innermost last."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not is_beneath(one.filename)]
    return [f"{shown_file(one.filename)}:{one.lineno} {one.name}" for one in frames[-_MOST_LINES:]]


def shown_file(path: str) -> str:
    """Return a path without the folder of installed packages."""
    return path.rsplit("site-packages/", 1)[-1]
