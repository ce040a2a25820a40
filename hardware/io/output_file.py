"""Write files whole, and never through links: a link in a study's folder may lead to a file of the user's.

A file appears at once, under a name of its own that then replaces what had the file's name. Devices and pipes are
written to as they are.
"""

from __future__ import annotations

import os
from pathlib import Path

from hardware.io.errors import ConfigError


def check_place(out: Path, option: str = "--out") -> None:
    """Check that a file can be written there, before the work for it begins.

    Raises:
        ConfigError: The path is a directory, or its directory does not exist.
    """
    if out.is_dir() or not out.parent.is_dir():
        rule = "is a directory, not a file" if out.is_dir() else "is in a directory that does not exist"
        raise ConfigError(rule, key=option, value=str(out))


def write_output(out: Path, content: str | bytes, *, option: str = "--out") -> None:
    """Write a text or bytes to the file that an option names.

    Raises:
        ConfigError: The file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_special(out):
            _write(out, data)
        else:
            _replace(out, data)
    except OSError as error:
        raise ConfigError(f"cannot be written ({error.strerror})", key=option, value=str(out)) from None


def new_file(path: Path) -> int:
    """Create an empty file in the place of whatever has its name, and return its descriptor.

    Raises:
        OSError: The file cannot be created.
    """
    if _is_special(path):
        return os.open(path, os.O_WRONLY)
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def _is_special(out: Path) -> bool:
    """Return whether a path leads to something that is no file: a device or a pipe, or a directory."""
    return Path("/dev") in out.absolute().parents or (out.exists() and not out.is_file())


def _replace(out: Path, data: bytes) -> None:
    """Write a file beside `out`, and give it that name."""
    beside = out.with_name(f".{os.getpid()}.partial")
    try:
        _write(beside, data)
        beside.replace(out)
    finally:  # after an interrupt, too
        beside.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    with os.fdopen(new_file(path), "wb") as file:
        file.write(data)
