"""Lines of the user's code at which a trace meets something."""

from __future__ import annotations

from pathlib import Path
from traceback import FrameSummary, StackSummary

import torch

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_PACKAGES = ("site-packages", "dist-packages")


def place_in(stack: StackSummary) -> str:
    """Return the last line of the user's own code in a stack that traces a module, in words; empty without one.

    Where that line calls a library, the line of the library stands beside it.
    """
    begins = [number for number, frame in enumerate(stack) if _is_step(frame)]
    frames = [frame for frame in stack[begins[0] + 1 if begins else 0 :] if not frame.filename.startswith(_OURS)]
    own = [frame for frame in frames if not any(folder in Path(frame.filename).parts for folder in _PACKAGES)]
    if not frames:
        return ""
    if not own or own[-1] is frames[-1]:
        return _line(frames[-1])
    return f"{_line(own[-1])}, which calls {_line(frames[-1])}"


def _is_step(frame: FrameSummary) -> bool:
    """Return whether a frame is the traced step's, which calls the user's module or loss."""
    return frame.name == "forward" and Path(frame.filename) == Path(__file__).parent / "program.py"


def _line(frame: FrameSummary) -> str:
    return f"line {frame.lineno} of {Path(frame.filename).name}"
