"""Write files whole, and never through links: a link in a study's folder may lead to a file of the user's.

A file appears at once, under a name of its own that then replaces what had the file's name. Devices and pipes are
refused, except the process's own descriptors, such as /dev/stdout, and /dev/null.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from pathlib import Path

from hardware.io.answer_stream import AnswerStream
from hardware.io.errors import ConfigError


def check_place(out: Path, option: str = "--out") -> None:
    """Check that a file can be written there, before the work for it begins.

    Raises:
        ConfigError: The path is a directory, or its directory does not exist.
    """
    if out.is_dir() or not out.parent.is_dir():
        rule = "is a directory, not a file" if out.is_dir() else "is in a directory that does not exist"
        raise ConfigError(rule, key=option, value=str(out))


def write_output(out: Path, content: str | bytes, *, option: str = "--out", private: bool = False) -> None:
    """Write a text or bytes to the file that an option names, which nobody else may read if it is private.

    Raises:
        ConfigError: The file cannot be written.
    """
    # a name of a file may hold bytes that are no characters
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    try:
        special = _open_special(out)
        if special is None:
            _replace(out, data, private=private)
        else:
            _write(special, data)
    except OSError as error:
        raise ConfigError(f"cannot be written ({error.strerror})", key=option, value=str(out)) from None
    except ValueError:  # the text is no path on this system
        raise ConfigError("is no path of a file", key=option, value=str(out)) from None


def new_file(path: Path, *, private: bool = False) -> int:
    """Create an empty file in the place of whatever has its name, and return its descriptor.

    Raises:
        OSError: The file cannot be created.
    """
    special = _open_special(path)
    if special is not None:
        return special
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)


_STREAM = re.compile(r"/dev/(stdout|stderr)|(?:/dev/fd|/proc/self/fd)/([0-9]{1,6})")
"""Paths of a process's own descriptors, which a shell also uses to pass a pipe: `>(gzip > trace.gz)`."""

_SINKS = (os.makedev(1, 3), os.makedev(1, 7))
"""Linux's /dev/null and /dev/full: there is nothing in them to harm."""


def _open_special(path: Path) -> int | None:
    """Open what stands at a path if it is no place for a file; None if it is one.

    Raises:
        OSError: It is a pipe, whose reader may never come, or a device or a directory.
    """
    if stream := _STREAM.fullmatch(str(path)):
        number = {"stdout": 1, "stderr": 2}.get(stream[1]) or int(stream[2])
        # a command's answer has a copy of standard output
        return os.dup(sys.stdout.fileno() if number == 1 and isinstance(sys.stdout, AnswerStream) else number)
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISREG(found.st_mode):
        return None
    if stat.S_ISCHR(found.st_mode) and found.st_rdev in _SINKS:
        return os.open(path, os.O_WRONLY)
    what = "it is a directory" if stat.S_ISDIR(found.st_mode) else "it is a pipe or a device"
    raise OSError(errno.EINVAL, f"{what}, not a file")


def _replace(out: Path, data: bytes, *, private: bool) -> None:
    """Write a file beside `out`, and give it that name."""
    beside = out.with_name(f".{os.getpid()}.partial")
    try:
        _write(new_file(beside, private=private), data)
        beside.replace(out)
    finally:  # after an interrupt, too
        beside.unlink(missing_ok=True)


def _write(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
