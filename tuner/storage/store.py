"""Contract of a store of studies: Optuna's storage, with three additions that a driver needs.

Optuna writes one value at a time, without conditions. A driver needs three things more:

    a claim         an attribute that is set only where it still has its earlier value (`replace_attribute`)
    a transaction   writes that become durable together, and only while the claim holds (`together`)
    rows            tables beside the studies, which later studies read (`replace_rows`, `connection`)

With them a driver that was suspended, and taken for dead, writes nothing more: not one of its writes takes effect after
another process has taken the claim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from optuna.storages import BaseStorage
from sqlalchemy import Connection, MetaData, Table


class OvertakenError(Exception):
    """Condition of a transaction that no longer holds; nothing of the transaction has taken effect."""


class BrokenOffError(Exception):
    """Connection that was lost in the middle of a transaction; nothing of the transaction has taken effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """Attribute of a study that must have its earlier value.

    Attributes:
        study_id: Identifier of the study.
        key: Name of the attribute.
        text: Value as JSON text, as `read_attribute` returns it; None where there must be none.
    """

    study_id: int
    key: str
    text: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of a table under one key, in place of those that were there.

    Attributes:
        table: Table of the rows.
        key: Columns that tell these rows apart from all others.
        rows: All columns of each row.
    """

    table: Table
    key: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]


class AbstractStore(ABC):
    """Place that holds studies, open for writing.

    Everything that a method has written is on the disk when it returns, or when its transaction ends.
    """

    @property
    @abstractmethod
    def storage(self) -> BaseStorage:
        """Studies, as Optuna reads and writes them."""

    @abstractmethod
    def read_attribute(self, study_id: int, key: str) -> tuple[Any, str | None]:
        """Return a study attribute, and its text as JSON; None and None if there is none."""

    @abstractmethod
    def replace_attribute(self, condition: Condition, value: Any) -> bool:
        """Set the attribute that the condition names if it holds; return whether it did.

        Reading and setting in two steps would let two processes both believe that they came first.
        """

    @abstractmethod
    def together(self, condition: Condition) -> AbstractContextManager[None]:
        """Write everything in the block at its end, if the condition then holds.

        A trial that the block creates comes first in it. A process that dies leaves all of a transaction in a database,
        and in a journal perhaps only the first part.

        Raises:
            OvertakenError: The condition does not hold, and nothing was written.
            BrokenOffError: The server was gone before the end, and nothing was written.
            GoneError: The store's file is gone, and nothing was written.
        """

    @abstractmethod
    def replace_rows(self, *changes: Rows) -> None:
        """Write rows, all of them or none."""

    @abstractmethod
    def create_tables(self, metadata: MetaData, first: Rows) -> None:
        """Create the tables that are missing, and write `first`, which may have no rows."""

    @abstractmethod
    def connection(self, metadata: MetaData) -> AbstractContextManager[Connection]:
        """Return a connection for reading rows; nothing is to be written through it."""

    @abstractmethod
    def close(self) -> None:
        """Close connections and files."""
