"""Temporary folders, and one message where there can be none: the folder for temporary files may be full or missing."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hardware.io.errors import ConfigError

LEAST_ROOM_BYTES = 1 << 20
"""Room that a temporary folder needs at its beginning: with less, one of its files would soon be cut short."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def temporary_folder(what_for: str, *, room_bytes: int = LEAST_ROOM_BYTES) -> Iterator[Path]:
    """Create a temporary folder that is removed after the block, for what a message then says it was for.

    Raises:
        ConfigError: No folder can be made, there is no room in it at once, or the block has filled it.
    """
    with tempfile.TemporaryDirectory(dir=check_temporary(what_for, room_bytes=room_bytes)) as name:
        try:
            yield Path(name)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise no_room(Path(name).parent, what_for) from None


def check_temporary(what_for: str, *, room_bytes: int = LEAST_ROOM_BYTES) -> Path:
    """Return the folder for temporary files, if there is room in it.

    Raises:
        ConfigError: There is no such folder that can be written to, or not that much room in it.
    """
    named = Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 # the first that Python tries itself
    if not named.is_dir():
        try:
            named = Path(tempfile.gettempdir())
        except FileNotFoundError:  # it has tried to write a file in each that it knows
            raise no_room(named.parent, what_for) from None
    folder = named.absolute()
    check_room(folder, what_for, key="TMPDIR", room_bytes=room_bytes)
    return folder


def check_room(folder: Path, what_for: str, *, key: str, room_bytes: int) -> None:
    """Check that there is room in a folder that `key` names.

    Raises:
        ConfigError: There is not.
    """
    free = _free_bytes(folder)
    if free is None or free < room_bytes:
        raise no_room(folder, what_for, key=key)


def _free_bytes(folder: Path) -> int | None:
    """Return the room in a folder, 0 if it takes no file more; None if this process may not write to it.

    If there is no such folder yet, its parent counts.
    """
    folder = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return None
    state = os.statvfs(folder)
    is_full = state.f_files and not state.f_favail  # some file systems count no files
    return 0 if is_full else state.f_bavail * state.f_frsize


_NEAREST = {
    "TMPDIR": "make room there, or set TMPDIR to a folder that has some",
    "RAY_TMPDIR": "make room there, or set RAY_TMPDIR to a folder with a short path that Ray can write to",
}


def no_room(folder: Path, what_for: str, *, key: str = "TMPDIR") -> ConfigError:
    """Return the error for a folder that has no room, with the room that it has."""
    free = _free_bytes(folder)
    told = "it cannot be written to" if free is None else f"{free / 2**20:.1f} MiB are free"
    return ConfigError(f"has no room for {what_for} ({told})", key=key, value=str(folder), nearest=_NEAREST[key])
