"""Answers of rehearsals in a study's storage: one row for each candidate, the latest in place of earlier ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, inspect, select

from tuner.storage.history.tables import METADATA, REHEARSALS
from tuner.storage.opening import reading
from tuner.storage.store import AbstractStore, Rows
from tuner.study_file.storage_address import StorageAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRehearsal:
    """Answer of a rehearsal as a storage holds it.

    Attributes:
        config: Values that identify the candidate.
        answer: Answer as JSON types.
    """

    config: Mapping[str, Any]
    answer: Mapping[str, Any]


def keep_rehearsal(store: AbstractStore, study: str, config: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Keep the answer of a candidate in place of an earlier one; the tables must exist (`make_tables`).

    Args:
        store: Store of the study.
        study: Name of the study.
        config: Values that identify the candidate.
        answer: Answer as JSON types.
    """
    same = json.dumps(dict(config), sort_keys=True)
    key = {"study": study, "candidate": hashlib.sha256(same.encode()).hexdigest()}
    row = {**key, "config": json.dumps(dict(config)), "answer": json.dumps(dict(answer))}
    store.replace_rows(Rows(table=REHEARSALS, key=key, rows=[row]))


def kept_rehearsals(store: AbstractStore, study: str) -> list[KeptRehearsal]:
    """Return the answers that an open store holds of a study; the tables must exist."""
    with store.connection(METADATA) as connection:
        return _rows(connection, study)


def read_rehearsals(address: StorageAddress, study: str) -> list[KeptRehearsal]:
    """Return the answers that the storage at an address holds of a study; looking for them creates nothing.

    Raises:
        ConfigError: The storage cannot be read.
    """
    if not address.may_exist:
        return []
    with reading(address, METADATA) as connection:
        return _rows(connection, study) if inspect(connection).has_table(REHEARSALS.name) else []


def _rows(connection: Connection, study: str) -> list[KeptRehearsal]:
    """Return the rows of a study in the order of their candidates, without those that are no JSON objects."""
    wanted = select(REHEARSALS.c.config, REHEARSALS.c.answer).where(REHEARSALS.c.study == study)
    found = []
    for texts in connection.execute(wanted.order_by(REHEARSALS.c.candidate)):
        try:
            config, answer = map(json.loads, texts)
        except (RecursionError, TypeError, ValueError):
            continue  # somebody's hand has written it
        if isinstance(config, dict) and isinstance(answer, dict):
            found.append(KeptRehearsal(config=config, answer=answer))
    return found
