"""Copies of a study's storage, taken while the study may be running."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from hardware.io.errors import ConfigError, shown_url
from tuner.storage.integrity import trouble_of_journal, trouble_of_sqlite
from tuner.study_file.storage_url import is_journal, storage_file

PG_DUMP = "pg_dump --format=custom --file=TARGET URL makes one, and pg_restore reads it"


def back_up(url: str, target: Path) -> Path:
    """Copy the storage at `url` to a new file, whole or not at all; return its path.

    SQLite copies a database page by page as it stood at one moment (https://www.sqlite.org/backup.html). Of a journal,
    all complete entries are copied.

    Raises:
        ConfigError: The storage is a server's, there is none, the copy is damaged, or the target cannot be written.
    """
    file = storage_file(url)
    if file is None:
        raise ConfigError(
            "is a server's, which has its own copies", key="storage", value=shown_url(url), nearest=PG_DUMP
        )
    if not file.is_file():
        raise ConfigError("does not exist", key="storage", value=shown_url(url))
    if target.exists() or target.is_symlink():
        raise ConfigError("exists already", key="TARGET", value=str(target), nearest="name a file that does not exist")
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    copy, trouble_of = (_copy_journal, trouble_of_journal) if is_journal(url) else (_copy_sqlite, trouble_of_sqlite)
    try:
        copy(file, beside)
        trouble = trouble_of(beside)
        if not trouble:
            # a link, unlike a renaming, never replaces a file that somebody has made meanwhile
            os.link(beside, target)
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise ConfigError(rule, key="TARGET", value=str(target)) from None
    except sqlite3.Error as error:
        raise ConfigError(f"cannot be copied ({error})", key="storage", value=shown_url(url)) from None
    finally:
        beside.unlink(missing_ok=True)
    if trouble:
        raise ConfigError(f"is damaged, and so is a copy ({trouble})", key="storage", value=shown_url(url))
    return target.absolute()


def _copy_sqlite(source: Path, target: Path) -> None:
    with (
        closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as database,
        closing(sqlite3.connect(target)) as copy,
    ):
        database.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # all in one file
    _flush(target)


def _copy_journal(source: Path, target: Path) -> None:
    data = source.read_bytes()
    target.write_bytes(data[: data.rfind(b"\n") + 1])
    _flush(target)


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
