"""Copies of a study's storage, taken while the study may be running."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hardware.io.errors import ConfigError
from hardware.io.looking import NoRightsError, check_readable, look_at
from tuner.storage.integrity import trouble_of_journal, trouble_of_sqlite
from tuner.study_file.storage_address import StorageAddress, StorageKind

PG_DUMP = "pg_dump --format=custom --file=TARGET URL makes one, and pg_restore reads it"

_ENDS = ("", "-journal", "-wal", "-shm")
"""Ends of the names of all files that SQLite may make of a database."""


def back_up(address: StorageAddress, target: Path) -> Path:
    """Copy the storage at an address to a new file, whole or not at all; return its path.

    SQLite copies a database page by page as it stood at one moment (https://www.sqlite.org/backup.html). Of a journal,
    all complete entries are copied.

    Raises:
        ConfigError: The storage is a server's, there is none, the copy is damaged, or the target cannot be written.
    """
    file = address.file
    if file is None:
        raise ConfigError("is a server's, which has its own copies", key="storage", value=str(address), nearest=PG_DUMP)
    if not file.is_file():
        raise ConfigError("does not exist", key="storage", value=str(address))
    if target.exists() or target.is_symlink():
        raise ConfigError("exists already", key="TARGET", value=str(target), nearest="name a file that does not exist")
    is_journal = address.kind is StorageKind.JOURNAL
    copy, trouble_of = (_copy_journal, trouble_of_journal) if is_journal else (_copy_sqlite, trouble_of_sqlite)
    try:
        with _new_file_beside(target) as beside:
            copy(file, beside)
            trouble = trouble_of(beside)
            if not trouble:
                # a link, unlike a renaming, never replaces a file that somebody has made meanwhile
                os.link(beside, target)
    except NoRightsError as error:
        raise ConfigError(str(error), key="storage", value=str(address), nearest=error.advice) from None
    except OSError as error:
        raise _unwritable(target, error.strerror or str(error)) from None
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise _unwritable(target, os.strerror(errno.ENOSPC)) from None
        raise ConfigError(f"cannot be copied ({error})", key="storage", value=str(address)) from None
    if trouble:
        raise ConfigError(f"is damaged, and so is a copy ({trouble})", key="storage", value=str(address))
    return target.absolute()


def _unwritable(target: Path, why: str) -> ConfigError:
    try:
        free = f"; {shutil.disk_usage(target.parent).free / 2**20:.1f} MiB are free there"
    except OSError:
        free = ""
    return ConfigError(f"cannot be written ({why}{free})", key="TARGET", value=str(target))


@contextmanager
def _new_file_beside(target: Path) -> Iterator[Path]:
    """Create an empty file in the folder of the target; nothing of it is left after the block."""
    beside = target.with_name(f".{os.getpid()}.partial")  # a name as long as the target's might become too long
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield beside
    finally:
        for end in _ENDS:
            beside.with_name(beside.name + end).unlink(missing_ok=True)


def _copy_sqlite(source: Path, target: Path) -> None:
    with closing(look_at(source)) as database, closing(sqlite3.connect(target)) as copy:
        database.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # all in one file
    _flush(target)


def _copy_journal(source: Path, target: Path) -> None:
    check_readable(source)
    data = source.read_bytes()
    target.write_bytes(data[: data.rfind(b"\n") + 1])
    _flush(target)


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
