"""Checks of the files that studies are stored in, without changing them: is everything there that was written."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from hardware.io.errors import shorten
from hardware.io.looking import check_readable, look_at
from tuner.study_file.storage_address import StorageAddress, StorageKind


def trouble_of_storage(address: StorageAddress) -> str:
    """Return what is wrong with the file of a storage; empty if nothing is, or if a server keeps it.

    Raises:
        NoRightsError: The file may not be read, which is no damage.
    """
    file = address.file
    if file is None:
        return ""
    if not file.is_file():
        return "there is no such file"
    check_readable(file)
    return trouble_of_journal(file) if address.kind is StorageKind.JOURNAL else trouble_of_sqlite(file)


def trouble_of_sqlite(file: Path) -> str:
    """Return the first damage that SQLite finds in a database, or the first row that refers to none; empty if none."""
    try:
        with closing(look_at(file)) as database:
            (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                return shorten(" ".join(str(found).split()), 200)
            orphan = database.execute("PRAGMA foreign_key_check").fetchone()
    except sqlite3.Error as error:
        return str(error)
    return f"table {orphan[0]} has a row that refers to a missing row of {orphan[2]}" if orphan else ""


def trouble_of_journal(file: Path) -> str:
    """Return the first line of a journal that is no entry, or an end that is torn; empty if there is neither."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return f"line {number} is torn: its writer died in the middle; the next one passes over it"
            try:
                is_entry = isinstance(json.loads(line), dict)
            except (ValueError, RecursionError):
                is_entry = False
            if not is_entry:
                return f"line {number} is no entry"
    return ""
