"""Opens the database that holds all durable state of a study: SQLite or PostgreSQL, through Optuna."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from typing import Any

import optuna
from optuna.storages import RDBStorage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from hardware.errors import ConfigError

SQLITE_WAIT_S = 60
"""How long one process waits for another's write before it gives up."""


def shown_url(url: str) -> str:
    """The URL without its password, for messages and reports."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)


def open_storage(url: str) -> RDBStorage:
    """The storage at `url`, created if it does not exist.

    SQLite is set to write-ahead logging, where readers do not block the writer, and keeps its default of flushing every
    commit to the disk, so that a finished trial survives the machine's death.

    Raises:
        ConfigError: the URL is malformed, its driver is not installed, or the database does not answer.
    """
    try:
        parsed = make_url(url)
        connect_args: dict[str, Any] = {}
        if parsed.get_backend_name() == "sqlite":
            connect_args = {"timeout": SQLITE_WAIT_S}
        elif parsed.get_backend_name() == "postgresql":
            connect_args = {"connect_timeout": 10}
        if parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
            _use_write_ahead_log(str(parsed.database))
        return RDBStorage(url, engine_kwargs={"connect_args": connect_args})
    except ImportError as error:
        raise ConfigError(
            f"needs a database driver that is not installed ({error.name})",
            key="storage",
            value=shown_url(url),
            nearest="pip install psycopg2-binary for PostgreSQL",
        ) from None
    except (ArgumentError, SQLAlchemyError, sqlite3.Error) as error:
        raise ConfigError(
            f"cannot be opened ({str(error.__cause__ or error).strip().splitlines()[0]})",
            key="storage",
            value=shown_url(url),
        ) from None


def _use_write_ahead_log(file: str) -> None:
    """Sets the journal mode, which stays with the file."""
    with closing(sqlite3.connect(file, timeout=SQLITE_WAIT_S)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")


def load_study(storage: RDBStorage, name: str) -> optuna.Study | None:
    """The study of that name, or None if the storage holds none."""
    try:
        return optuna.load_study(study_name=name, storage=storage)
    except KeyError:
        return None
