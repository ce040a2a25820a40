"""Places in the user's program, as they are shown."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

_HERE = str(Path(__file__).parent)
_BENEATH = (
    _HERE,
    *(str(Path(spec.origin).parent) for spec in map(find_spec, ("jax", "numpy")) if spec and spec.origin),
)


def place_in_program() -> str:
    """Return the file and line of the program, outside of JAX and numpy, that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_beneath(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{shown_file(frame.f_code.co_filename)}:{frame.f_lineno}"


def is_beneath(file: str) -> bool:
    """Return whether a file is of JAX, numpy or this room."""
    return file.startswith(_BENEATH) or file.startswith(("<frozen", "<string"))


def is_ours(file: str) -> bool:
    """Return whether a file is of this room."""
    return file.startswith(_HERE)


def shown_file(path: str) -> str:
    """Return a path without the folder of installed packages."""
    return path.rsplit("site-packages/", 1)[-1]
