"""Studies in a journal file, through Optuna's JournalStorage: for a file system that several hosts share, as NFS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from sqlalchemy import Connection, MetaData, and_, create_engine, delete, insert

from hardware.io.looking import check_readable
from tuner.storage.journal_file import NOTHING, SET_STUDY_ATTRIBUTE, JournalFile, foreign_entries, rows_in
from tuner.storage.own_file import OwnFile
from tuner.storage.store import AbstractStore, Condition, OvertakenError, Rows


class JournalStore(AbstractStore):
    """Store in a journal file. Its rows are entries of their own; readers get them in a database in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = JournalFile(path)
        self._own = OwnFile(path)
        with foreign_entries(path):
            self._storage = JournalStorage(self._file)  # which reads them all

    @property
    def storage(self) -> JournalStorage:
        """Studies, as the contract says."""
        return self._storage

    def read_attribute(self, study_id: int, key: str) -> tuple[Any, str | None]:
        """Return an attribute and its text, as the contract says."""
        attributes = self._storage.get_study_user_attrs(study_id)
        return (attributes[key], json.dumps(attributes[key])) if key in attributes else (None, None)

    def replace_attribute(self, condition: Condition, value: Any) -> bool:
        """Set an attribute under a condition, as the contract says."""
        entry = {
            "op_code": SET_STUDY_ATTRIBUTE,
            "worker_id": "",
            "study_id": condition.study_id,
            "user_attr": {condition.key: value},
        }
        try:
            with self.together(condition):
                self._file.append_logs([entry])
        except OvertakenError:
            return False
        return True

    @contextmanager
    def together(self, condition: Condition) -> Iterator[None]:
        """Write everything in the block as one batch, as the contract says."""
        self._own.check()
        with self._file.together(condition):
            yield
        self._read()
        if self._file.was_dropped(self._file.batch):
            raise OvertakenError

    def _read(self) -> None:
        """Read the entries that this process and others have appended since."""
        self._storage.get_all_studies()

    def replace_rows(self, *changes: Rows) -> None:
        """Write rows, as the contract says."""
        told = [
            {"table": change.table.name, "key": dict(change.key), "rows": [dict(row) for row in change.rows]}
            for change in changes
        ]
        self._file.append_logs([{**NOTHING, "rows": told}])

    def create_tables(self, metadata: MetaData, first: Rows) -> None:  # noqa: ARG002 # the contract's
        """Write `first`, as the contract says; a journal has no tables."""
        if first.rows:
            self.replace_rows(first)

    @contextmanager
    def connection(self, metadata: MetaData) -> Iterator[Connection]:
        """Return a connection for reading rows, as the contract says."""
        with rows_of_journal(self._path, metadata) as connection:
            yield connection

    def close(self) -> None:
        """Do nothing, as the contract allows; no file is open between two calls."""


def journal_to_look_at(path: Path) -> JournalStorage:
    """Open the studies of an existing journal, which need not be writable; reading takes no lock."""
    check_readable(path)
    with foreign_entries(path):
        return JournalStorage(JournalFile(path))


@contextmanager
def rows_of_journal(path: Path, metadata: MetaData) -> Iterator[Connection]:
    """Read the rows of an existing journal into a database in memory."""
    check_readable(path)
    engine = create_engine("sqlite://")
    try:
        with engine.begin() as connection:
            metadata.create_all(connection)
            with foreign_entries(path):
                for change in chain.from_iterable(rows_in(path)):
                    table = metadata.tables[change["table"]]
                    wanted = and_(*(table.c[name] == value for name, value in change["key"].items()))
                    connection.execute(delete(table).where(wanted))
                    if change["rows"]:
                        connection.execute(insert(table), change["rows"])
            yield connection
    finally:
        engine.dispose()
