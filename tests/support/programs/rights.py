"""Rights of a colleague, for tests that run as root, who may read and write everything."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534

_LIBC = ctypes.CDLL(None, use_errno=True)


_CAPABILITIES_3 = 0x20080522
"""Version of the structures of capget(2) and capset(2)."""

_OVER_FILES = 1 << 1 | 1 << 2
"""The capabilities that let root write, and read, what a file's mode forbids (capabilities(7))."""


@contextmanager
def without_roots_rights() -> Iterator[None]:
    """Hold this thread, and those that it starts in the block, to the modes of files; only root is not held to them.

    The user stays who it is: libraries that are imported in the block may lie where no other user can read.
    """
    if os.geteuid():
        yield
        return
    before = _capabilities()
    _set_capabilities((before[0] & ~_OVER_FILES, *before[1:]))
    try:
        yield
    finally:
        _set_capabilities(before)


def _capabilities() -> tuple[int, ...]:
    """Ask for this thread's capabilities: effective, permitted and inheritable ones, the first 32 and then the rest."""
    found = (ctypes.c_uint32 * 6)()
    if _LIBC.capget((ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), found):
        raise OSError(ctypes.get_errno(), "capget")
    return tuple(found)


def _set_capabilities(wanted: tuple[int, ...]) -> None:
    if _LIBC.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)(*wanted)):
        raise OSError(ctypes.get_errno(), "capset")


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let everybody read a folder and its files in the block, and nobody write them."""
    before = {path: path.stat().st_mode for path in (folder, *folder.iterdir())}
    for path in before:
        path.chmod(0o555 if path == folder else 0o444)
    try:
        yield
    finally:
        for path, mode in before.items():
            if path.exists():
                path.chmod(mode)


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """Create a folder to which every user of the machine can go, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)
