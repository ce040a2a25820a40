"""What a study's state is kept in, as the tuner sees it: Optuna's storage, and what Optuna's contract lacks.

Optuna writes one thing at a time and asks nobody. A driver needs three things more:

    a claim         an attribute that is set only where it still is what it was (`replace_attribute`)
    a transaction   writes that become durable together, and only while the claim holds (`together`)
    rows            what later studies read, beside the studies (`replace_rows`, `connection`)

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
    """The condition of a transaction no longer holds; nothing of it has taken effect."""


class BrokenOffError(Exception):
    """The connection was lost in the middle of a transaction; nothing of it has taken effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """An attribute of a study that must be what it was.

    Attributes:
        study_id: The study.
        key: The attribute.
        text: Its value as JSON text, as `read_attribute` tells it; None where there must be none.
    """

    study_id: int
    key: str
    text: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of a table under one key, in place of those that were there.

    Attributes:
        table: The table.
        key: Columns that tell these rows apart from all others.
        rows: All columns of each row.
    """

    table: Table
    key: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]


class AbstractStore(ABC):
    """One place that holds studies, open for writing.

    What a method has written is on the disk when it returns, or when its transaction ends.
    """

    @property
    @abstractmethod
    def storage(self) -> BaseStorage:
        """The studies, as Optuna reads and writes them."""

    @abstractmethod
    def read_attribute(self, study_id: int, key: str) -> tuple[Any, str | None]:
        """A study attribute, and its text as JSON; None and None if there is none."""

    @abstractmethod
    def replace_attribute(self, condition: Condition, value: Any) -> bool:
        """Sets the attribute that the condition names if it holds; whether it did.

        Reading and setting in two steps would let two processes both believe that they came first.
        """

    @abstractmethod
    def together(self, condition: Condition) -> AbstractContextManager[None]:
        """What the block writes through this store becomes durable at its end, if the condition then holds.

        A trial that the block creates comes first in it. A process that dies leaves all of a transaction in a database,
        and in a journal perhaps only the first part.

        Raises:
            OvertakenError: the condition does not hold, and nothing was written.
            BrokenOffError: the server was gone before the end, and nothing was written.
        """

    @abstractmethod
    def replace_rows(self, *changes: Rows) -> None:
        """Writes rows, all of them or none."""

    @abstractmethod
    def create_tables(self, metadata: MetaData, first: Rows) -> None:
        """Makes the tables that are not there, and writes `first`."""

    @abstractmethod
    def connection(self, metadata: MetaData) -> AbstractContextManager[Connection]:
        """A connection to read rows through, of which nothing is to be written."""

    @abstractmethod
    def close(self) -> None:
        """Closes connections and files."""
