"""Reads a file that a user names: a plain file, and no more of it than its kind ever needs.

What is no plain file has no end (a device) or waits for somebody who may never write (a pipe), so neither is read.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from pathlib import Path

from hardware.io.errors import ConfigError, did_you_mean

GZIP_MARK = b"\x1f\x8b"


def read_input(path: Path, *, most_bytes: int) -> bytes:
    """What a file holds.

    Raises:
        ConfigError: there is none, it can't be read, is no plain file, or is larger.
    """
    try:
        # without O_NONBLOCK, to open a pipe is to wait for a writer
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123 # of a number
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError("is a pipe or a device, not a file", file=str(path), nearest="save it to a file")
            content = file.read(most_bytes + 1)
    except IsADirectoryError:
        raise ConfigError("is a directory, not a file", file=str(path)) from None
    except FileNotFoundError:
        raise _no_such_file(path) from None
    except ValueError:  # what the system takes for no path at all
        raise ConfigError("is no path of a file", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", file=str(path)) from None
    if len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return content


def unpacked(content: bytes, *, most_bytes: int, path: Path) -> bytes:
    """The content of a file, which gzip may have packed, and which may unpack to so much.

    Raises:
        ConfigError: it is damaged, or larger.
    """
    if not content.startswith(GZIP_MARK):
        return content
    try:
        whole = _unpacked(content, most_bytes)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise ConfigError("is damaged: it cannot be decompressed", file=str(path)) from None
    if len(whole) > most_bytes:
        raise _too_large(path, most_bytes)
    return whole


def _unpacked(content: bytes, most_bytes: int) -> bytes:
    """As much of it as tells whether it is too large."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        return file.read(most_bytes + 1)


def _too_large(path: Path, most_bytes: int) -> ConfigError:
    return ConfigError(f"is larger than {most_bytes / 1e6:,g} MB", file=str(path))


def _no_such_file(path: Path) -> ConfigError:
    siblings = sorted(each.name for each in path.parent.glob(f"*{path.suffix}")) if path.parent.is_dir() else []
    nearest = did_you_mean(path.name, siblings) if siblings else "check the path"
    return ConfigError("no such file", file=str(path), nearest=nearest)
