"""Studies in a SQL database: SQLite or PostgreSQL, through Optuna's RDBStorage."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy import Connection, Engine, MetaData, and_, column, delete, insert, select, table, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import scoped_session, sessionmaker

from tuner.storage.own_file import OwnFile
from tuner.storage.store import AbstractStore, BrokenOffError, Condition, OvertakenError, Rows

_ATTRIBUTES = table("study_user_attributes", column("study_id"), column("key"), column("value_json"))


class SqlStore(AbstractStore):
    """Store in a database.

    In a transaction, Optuna's sessions join one connection, and their commits wait for its end: one flush of the disk
    instead of one for every value.

    Args:
        storage: Studies in the database.
        file: File of the database, which is watched; None for a server, or a database in memory.
    """

    def __init__(self, storage: RDBStorage, file: OwnFile | None = None) -> None:
        self._storage = storage
        self._file = file
        self._joined: Connection | None = None

    @property
    def storage(self) -> RDBStorage:
        """Studies, as the contract says."""
        return self._storage

    @property
    def engine(self) -> Engine:
        """Engine of the database."""
        return self._storage.engine

    def read_attribute(self, study_id: int, key: str) -> tuple[Any, str | None]:
        """Return an attribute and its text, as the contract says."""
        wanted = (_ATTRIBUTES.c.study_id == study_id) & (_ATTRIBUTES.c.key == key)
        with self.engine.connect() as connection:
            text = connection.execute(select(_ATTRIBUTES.c.value_json).where(wanted)).scalar_one_or_none()
        return (None if text is None else json.loads(text)), text

    def replace_attribute(self, condition: Condition, value: Any) -> bool:
        """Set an attribute under a condition, as the contract says."""
        text = json.dumps(value)
        self._check_file()
        try:
            with self.engine.begin() as connection:
                if condition.text is None:
                    connection.execute(
                        insert(_ATTRIBUTES).values(study_id=condition.study_id, key=condition.key, value_json=text)
                    )
                    return True
                return _replace_text(connection, condition, text)
        except IntegrityError:  # another process was first to set it
            return False

    @contextmanager
    def together(self, condition: Condition) -> Iterator[None]:
        """Write everything in the block in one transaction, as the contract says."""
        assert self._joined is None, "transactions do not nest"
        self._check_file()
        ordinary = self._storage.scoped_session
        try:
            with self.engine.begin() as connection:
                self._joined = connection
                self._storage.scoped_session = scoped_session(
                    sessionmaker(bind=connection, join_transaction_mode="rollback_only")
                )
                try:
                    yield
                except (SQLAlchemyError, StorageInternalError):
                    # Optuna tries some writes again, and then all that is told is that the transaction has ended
                    if connection.invalidated:
                        raise BrokenOffError from None
                    raise
                # last, and as a write: whoever wants the claim now waits until this is committed
                if condition.text is None or not _replace_text(connection, condition, condition.text):
                    raise OvertakenError
        finally:
            self._joined = None
            self._storage.scoped_session = ordinary

    def _check_file(self) -> None:
        if self._file is not None:
            self._file.check()

    def replace_rows(self, *changes: Rows) -> None:
        """Write rows, as the contract says."""
        if self._joined is not None:
            _write_rows(self._joined, changes)
            return
        with self.engine.begin() as connection:
            _write_rows(connection, changes)

    def create_tables(self, metadata: MetaData, first: Rows) -> None:
        """Create missing tables, as the contract says."""
        with self.engine.begin() as connection:
            metadata.create_all(connection)
            if first.rows:
                connection.execute(insert(first.table), list(first.rows))

    @contextmanager
    def connection(self, metadata: MetaData) -> Iterator[Connection]:  # noqa: ARG002 # the contract's
        """Return a connection for reading rows, as the contract says."""
        with self.engine.connect() as connection:
            yield connection

    def copy_to(self, path: Path) -> bool:
        """Copy a SQLite database to a new file as far as its open connection still reads it; return whether it does.

        An open database can be read after its file was deleted.
        """
        if self.engine.dialect.name != "sqlite":
            return False
        try:
            with closing(sqlite3.connect(path)) as target, closing(self.engine.raw_connection()) as source:
                driver = source.driver_connection
                assert isinstance(driver, sqlite3.Connection), "the driver of SQLite is Python's own"
                driver.backup(target)
                return bool(target.execute("PRAGMA integrity_check").fetchone() == ("ok",) and _has_studies(target))
        except (sqlite3.Error, SQLAlchemyError):
            return False

    def close(self) -> None:
        """Close connections, as the contract says."""
        self._storage.remove_session()
        self.engine.dispose()


def _has_studies(database: sqlite3.Connection) -> bool:
    return bool(database.execute("SELECT count(*) FROM studies").fetchone()[0])


def _replace_text(connection: Connection, condition: Condition, text: str) -> bool:
    """Set an attribute to `text` if the condition holds; return whether it did."""
    c = _ATTRIBUTES.c
    wanted = (c.study_id == condition.study_id) & (c.key == condition.key) & (c.value_json == condition.text)
    return bool(connection.execute(update(_ATTRIBUTES).where(wanted).values(value_json=text)).rowcount)


def _write_rows(connection: Connection, changes: tuple[Rows, ...]) -> None:
    for change in changes:
        columns = change.table.c
        connection.execute(
            delete(change.table).where(and_(*(columns[name] == value for name, value in change.key.items())))
        )
    for change in changes:
        if change.rows:
            connection.execute(insert(change.table), list(change.rows))
