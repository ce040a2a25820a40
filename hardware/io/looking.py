"""SQLite databases for whoever only looks at them, also without the right to write there.

SQLite reads a database in write-ahead logging only where it may write: it keeps an index of the log in a file beside
the database (https://www.sqlite.org/wal.html#read_only_databases). While a driver has the database open, that file is
there, and reading it is enough. A database that nobody has open is read from a copy in memory.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hardware.io.temporary import temporary_folder

WAIT_S = 60.0
"""Time for which a reader waits for a writer before it gives up [s]."""

_BESIDE = ("-wal", "-journal")
"""Ends of the names of the files that hold a part of the database."""

_ATTEMPTS = 10
_PAUSE_S = 0.2
"""Time between two attempts to copy a database while somebody writes it [s]."""

_NEEDS_TO_WRITE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
"""Errors of SQLite where it cannot read without writing."""


class NoRightsError(Exception):
    """Lack of the right to read or to write a file; the text says which.

    Attributes:
        advice: Advice on the way out.
    """

    def __init__(self, text: str, advice: str) -> None:
        super().__init__(text)
        self.advice = advice


class _Copy(sqlite3.Connection):
    """Connection to a copy in memory.

    Attributes:
        copied_from: State of the files that were copied.
    """

    copied_from: tuple[object, ...] = ()


def may_write(file: Path) -> bool:
    """Return whether this process may write an existing file and others beside it, as writers of studies do."""
    return os.access(file, os.W_OK, effective_ids=True) and os.access(
        file.absolute().parent, os.W_OK | os.X_OK, effective_ids=True
    )


def check_readable(file: Path) -> None:
    """Check that this process may read an existing file.

    Raises:
        NoRightsError: It may not.
    """
    if not os.access(file, os.R_OK, effective_ids=True):
        raise NoRightsError("you may not read it", "ask its owner for the right to")


def check_writable(file: Path) -> None:
    """Check that this process may write an existing file, and others beside it.

    Raises:
        NoRightsError: It may not.
    """
    check_readable(file)
    if not may_write(file):
        raise NoRightsError(
            "you may not write it, or not make files in its folder",
            "commands that only look (`meshtune status`, `best`, `report`, `backup`) work, and `meshtune run` goes on "
            "with a copy by `meshtune backup`",
        )


def look_at(file: Path) -> sqlite3.Connection:
    """Connect to an existing SQLite database for reading; nothing is written, neither to it nor beside it.

    Any thread may use the connection, one at a time.

    Raises:
        NoRightsError: The file may not be read.
        sqlite3.Error: It cannot be read for another reason.
        ConfigError: There is no room for a copy.
    """
    try:
        return _look_at(file)
    except PermissionError as error:  # the rights are gone meanwhile, or a file beside it has others
        raise NoRightsError(f"you may not read {Path(error.filename).name}", "ask its owner for the right to") from None


def is_outdated(connection: object, file: Path) -> bool:
    """Return whether a connection of `look_at` is to a copy that the file has left behind."""
    return isinstance(connection, _Copy) and connection.copied_from != _state_of(file)


def _look_at(file: Path) -> sqlite3.Connection:
    check_readable(file)
    if may_write(file) or _is_open_elsewhere(file) or not _logs_ahead(file):
        try:
            return _connect(file)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _NEEDS_TO_WRITE:
                raise
    return _copy_in_memory(file)


def _connect(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=WAIT_S, check_same_thread=False
    )
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # it opens nothing before the first query
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _is_open_elsewhere(file: Path) -> bool:
    return file.with_name(f"{file.name}-shm").exists()


def _logs_ahead(file: Path) -> bool:
    """Return whether a database is in write-ahead logging; its 19th byte says so."""
    with file.open("rb") as opened:
        return opened.read(20)[18:20] == b"\2\2"


def _copy_in_memory(file: Path) -> sqlite3.Connection:
    """Return a connection to a copy of a database that nobody is writing, in its state after the last commit."""
    with _unchanged_copy(file) as (copy, state), closing(sqlite3.connect(copy)) as source:
        memory = sqlite3.connect(":memory:", check_same_thread=False, factory=_Copy)
        memory.copied_from = state
        source.backup(memory)
    memory.execute("PRAGMA query_only = ON")  # what would be written here would be lost
    return memory


@contextmanager
def _unchanged_copy(file: Path) -> Iterator[tuple[Path, tuple[object, ...]]]:
    """Copy the files of a database to a temporary folder while nobody writes them; yield the copy and their state."""
    with temporary_folder(f"a copy of {file.name}", room_bytes=_size_of(file)) as folder:
        for _ in range(_ATTEMPTS):
            before = _state_of(file)
            for part in _parts(file):
                (folder / part.name).unlink(missing_ok=True)
                if part.exists():
                    shutil.copyfile(part, folder / part.name)
            if _state_of(file) == before:
                yield folder / file.name, before
                return
            time.sleep(_PAUSE_S)
        raise sqlite3.OperationalError("it is written all the time, and cannot be copied meanwhile")


def _size_of(file: Path) -> int:
    return sum(part.stat().st_size for part in _parts(file) if part.exists())


def _parts(file: Path) -> tuple[Path, ...]:
    return (file, *(file.with_name(file.name + end) for end in _BESIDE))


def _state_of(file: Path) -> tuple[object, ...]:
    """Return what changes whenever the content of a database does, as far as the file system tells it."""
    return tuple(map(_stamp, _parts(file)))


def _stamp(part: Path) -> tuple[int, ...] | None:
    try:
        told = part.stat()
    except FileNotFoundError:
        return None
    return (told.st_ino, told.st_size, told.st_mtime_ns)
