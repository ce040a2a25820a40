"""Storages that a study file or its user names: where the study lies, and whose measurements inform it.

Both functions return notes as well: sentences that begin with the key that they are about.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from hardware.io.config_file import read_text
from hardware.io.errors import ConfigError, shown_url
from hardware.io.input_file import open_input
from hardware.io.looking import NoRightsError, look_at
from tuner.study_file.key_errors import under
from tuner.study_file.paths import StudyPaths
from tuner.study_file.storage_address import StorageAddress, StorageKind

DEFAULT_NAME = "meshtune.db"
"""Name of the database of a study that names no storage."""

HistoryEntry = StorageAddress | str
"""Entry of `history:`: a database, or the path of a CSV file as the study file spells it."""

Notes = list[str]


def storage_of(url: str | None, name: str, paths: StudyPaths) -> tuple[StorageAddress, Notes]:
    """Return the address of a study's storage, which by default is a database beside the study file.

    A relative path begins at the study file's folder if the file names it, and at the working directory if the user
    does. Once it was the working directory for both: a study that was begun there goes on there.

    Args:
        url: URL that the user or the study file gives, or None.
        name: Name of the study.
        paths: Folders of the study.

    Raises:
        ConfigError: The URL is wrong.
    """
    if url is not None and paths.is_users("storage"):
        return _address_of(url, "storage", paths)
    here, told = _address_of(url or f"{StorageKind.SQLITE}:///{DEFAULT_NAME}", "storage", paths)
    beside = here.in_folder(paths.folder)
    if beside.place == here.place or (is_here := _holds(here, name)) is False or _holds(beside, name):
        return beside, told
    if is_here is None:
        unread = (
            f"{here.file} of the working directory cannot be read: if the study was begun there, it begins anew in "
            f"{beside.file}"
        )
        return beside, [*told, f"storage: {unread}"]
    goes_on = (
        f"the study goes on in {here.file} of the working directory, where it was begun; new ones begin in "
        f"{beside.file}"
    )
    return here, [*told, f"storage: {goes_on}"]


def history_of(
    entries: Sequence[str], storage: StorageAddress, paths: StudyPaths
) -> tuple[tuple[HistoryEntry, ...], Notes]:
    """Return the entries of `history:`, each a database or a CSV file that exists; their contents are read later.

    Raises:
        ConfigError: An entry is wrong, or its file does not exist.
    """
    found: list[HistoryEntry] = []
    notes: Notes = []
    for position, entry in enumerate(entries):
        key = f"history.{position}"
        if entry in entries[:position]:
            raise ConfigError("is named twice; keep one", key=key, value=entry)
        if "://" in entry:
            address, told = _address_of(entry, key, paths)
            if not paths.is_users(key):
                beside = address.in_folder(paths.folder)
                address = beside if beside.may_exist or not address.may_exist else address
            # the study's own may not exist yet
            if not address.may_exist and address.place != storage.place:
                raise no_database(shown_url(entry)).under(key)
            found.append(address)
            notes += told
        elif entry.endswith(".csv"):
            under(key, lambda entry=entry: read_text(paths.folder / entry))
            found.append(entry)
        else:
            raise ConfigError(
                "is neither a database URL nor a CSV file of measured runs",
                key=key,
                value=entry,
                nearest="for example sqlite:///meshtune.db, or sweep.csv in the form of configs/measured",
            )
    return tuple(found), notes


def no_database(url: str) -> ConfigError:
    """Return the error for a database file in `history:` that does not exist, with its URL as shown."""
    nearest = "a relative path starts at the study file's folder, as for storage"
    return ConfigError("no such database", value=url, nearest=nearest)


def _address_of(url: str, key: str, paths: StudyPaths) -> tuple[StorageAddress, Notes]:
    """Return the address that a key names, whose server gets no password of the environment unless the user says so."""
    address = StorageAddress.parse(url, key=key)
    if paths.is_users(key):
        return address, []
    address, told = address.without_environments_password()
    return address, [f"{key}: {told}"] if told else []


def _holds(address: StorageAddress, name: str) -> bool | None:
    """Return whether a file of a storage holds the study; None if it cannot be read."""
    file = address.file
    if file is None or not file.is_file():
        return False
    if address.kind is StorageKind.JOURNAL:
        return _journal_holds(file, name)
    try:
        with closing(look_at(file)) as database:
            return database.execute("SELECT 1 FROM studies WHERE study_name = ?", (name,)).fetchone() is not None
    except (sqlite3.Error, NoRightsError, ConfigError):
        return None


def _journal_holds(file: Path, name: str) -> bool | None:
    """Return whether a journal holds the study, by the entries that Optuna writes for its studies."""
    try:
        with open_input(file) as lines:
            # the name is looked for before a line is parsed: most lines are of trials
            return any(b'"study_name"' in line and _names(line, name) for line in lines)
    except (OSError, ConfigError):
        return None


def _names(line: bytes, name: str) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return isinstance(entry, dict) and entry.get("study_name") == name
