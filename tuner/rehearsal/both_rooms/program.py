"""User's program in a fork of a room: its environment, its start, and the last that it printed."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Mapping
from typing import Any

_MOST_PRINTED = 2_000
"""Largest number of bytes of each stream that are told."""


def set_environment(variables: Mapping[str, str | None]) -> None:
    """Set environment variables, and remove those that are None."""
    for name, text in variables.items():
        os.environ.pop(name, None)
        if text is not None:
            os.environ[name] = text


def run_program(request: Mapping[str, Any], case: Mapping[str, Any]) -> None:
    """Run the script or the module of a request with the arguments of a case; whatever it raises is raised."""
    sys.argv = [request["script"] or "-m", *case["arguments"]]
    if request["script"] is None:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(request["script"], run_name="__main__")


def last_printed() -> str:
    """Return the last that the program printed, where both streams are files of this process."""
    found = ""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        with contextlib.suppress(ValueError):  # the program closed it
            stream.flush()
        size = os.fstat(descriptor).st_size
        found += os.pread(descriptor, _MOST_PRINTED, max(size - _MOST_PRINTED, 0)).decode(errors="replace")
    return found
