"""Read files that users name: plain files only, and no more of them than their kind ever needs.

Devices and pipes are refused: a device has no end, and a pipe waits for a writer who may never come.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hardware.io.errors import ConfigError, did_you_mean

GZIP_MARK = b"\x1f\x8b"


def open_input(path: Path) -> BinaryIO:
    """Open a plain file for reading.

    Raises:
        ConfigError: The file is missing, can't be opened, or is no plain file.
    """
    try:
        # without O_NONBLOCK, opening a pipe waits for a writer
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _no_such_file(path) from None
    except ValueError:  # the text is no path on this system
        raise ConfigError("is no path of a file", file=str(path)) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(number, "rb")
    os.close(number)
    if stat.S_ISDIR(mode):
        raise ConfigError("is a directory, not a file", file=str(path))
    raise ConfigError("is a pipe or a device, not a file", file=str(path), nearest="save it to a file")


def read_input(path: Path, *, most_bytes: int) -> bytes:
    """Read a plain file whole.

    Raises:
        ConfigError: The file is missing, can't be read, is no plain file, or is larger than `most_bytes`.
    """
    with open_input(path) as file, reading_errors(path):
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return content


@contextmanager
def reading_errors(path: Path) -> Iterator[None]:
    """Tell the errors of reading an open file.

    Raises:
        ConfigError: A read has failed.
    """
    try:
        yield
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot be read ({error.strerror})", file=str(path))


def unpack(content: bytes, *, most_bytes: int, path: Path) -> bytes:
    """Decompress the content of a file if gzip has compressed it.

    Raises:
        ConfigError: the content is damaged, or larger than `most_bytes` once it is decompressed.
    """
    if not content.startswith(GZIP_MARK):
        return content
    try:
        whole = _decompress(content, most_bytes)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise ConfigError("is damaged: it cannot be decompressed", file=str(path)) from None
    if len(whole) > most_bytes:
        raise _too_large(path, most_bytes)
    return whole


def _decompress(content: bytes, most_bytes: int) -> bytes:
    """Decompress one byte more than allowed at most, which is enough to see that the content is too large."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        return file.read(most_bytes + 1)


def _too_large(path: Path, most_bytes: int) -> ConfigError:
    return ConfigError(f"is larger than {most_bytes / 1e6:,g} MB", file=str(path))


def _no_such_file(path: Path) -> ConfigError:
    if path.is_symlink():
        return ConfigError("is a link to no file", file=str(path), nearest="remove the link, or make what it names")
    siblings = sorted(each.name for each in path.parent.glob(f"*{path.suffix}")) if path.parent.is_dir() else []
    nearest = did_you_mean(path.name, siblings) if siblings else "check the path"
    return ConfigError("no such file", file=str(path), nearest=nearest)
