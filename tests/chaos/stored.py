"""What a storage holds of a study, read past Meshtune and Optuna: SQLite and PostgreSQL by SQL, a journal line by line.

The tables and the operations of a journal are Optuna's; that an entry of a journal may have a condition, and that
entries of rows mean nothing to Optuna, is documented in tuner/storage/journal_file.py.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

STATES = ("RUNNING", "COMPLETE", "PRUNED", "FAIL", "WAITING")
"""Of trials, in the order of the numbers that a journal has for them."""

SET_STUDY_ATTRIBUTE, CREATE_TRIAL, SET_STATE_AND_VALUES, SET_TRIAL_ATTRIBUTE = 2, 4, 6, 8

TRIALS = "SELECT trial_id, number, state, datetime_complete FROM trials ORDER BY number"
VALUES = "SELECT trial_id, value FROM trial_values"
PARAMS = "SELECT trial_id, param_name, param_value FROM trial_params ORDER BY param_id"
ATTRIBUTES = "SELECT trial_id, key, value_json FROM trial_user_attributes WHERE key IN ('observation', 'prediction')"
KEPT = "SELECT trial FROM meshtune_runs"
CLAIM = "SELECT value_json FROM study_user_attributes WHERE key = 'driver'"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTrial:
    """One trial.

    Attributes:
        number: In its study.
        state: Optuna's word.
        configuration: As `name=value ...`; empty if it never got one.
        value: Its step time [s], where it completed.
        status: Of its observation; empty without one.
        reason: Of its observation.
        ended_s: Seconds since the epoch, where it has ended.
    """

    number: int
    state: str
    configuration: str
    value: float | None = None
    status: str = ""
    reason: str = ""
    ended_s: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether its end is recorded."""
        return self.state not in {"RUNNING", "WAITING"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One study.

    Attributes:
        trials: In the order of their numbers.
        kept: The trials of which a row is kept for later studies, one each.
        claim: JSON text of the driver's claim; empty where nobody claims the study.
    """

    trials: tuple[StoredTrial, ...] = ()
    kept: tuple[int, ...] = ()
    claim: str = ""


EMPTY = Stored()


def read_stored(url: str) -> Stored:
    """The only study of a storage, as it stands now; nothing where there is nothing yet."""
    kind, _, place = url.partition(":///")
    if kind == "journal":
        return _of_journal(Path(place))
    if kind == "sqlite":
        return _of_sqlite(Path(place))
    import psycopg2

    with closing(psycopg2.connect(url)) as connection, connection.cursor() as cursor:
        connection.set_session(isolation_level="REPEATABLE READ", readonly=True)  # all at one moment

        def rows(query: str) -> list[tuple[Any, ...]]:
            cursor.execute(query)
            return cursor.fetchall()

        cursor.execute("SELECT to_regclass('meshtune_runs')")
        return _of_tables(rows) if cursor.fetchone() != (None,) else EMPTY


def _of_sqlite(path: Path) -> Stored:
    if not path.exists():
        return EMPTY
    with closing(sqlite3.connect(path, timeout=60)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meshtune_runs'").fetchone():
            return EMPTY
        connection.execute("BEGIN")  # all at one moment
        return _of_tables(lambda query: connection.execute(query).fetchall())


def _of_tables(rows: Any) -> Stored:
    params: dict[int, dict[str, float]] = {}
    for trial, name, value in rows(PARAMS):
        params.setdefault(trial, {})[name] = value
    values = dict(rows(VALUES))
    attributes = {(trial, key): json.loads(text) for trial, key, text in rows(ATTRIBUTES)}
    return Stored(
        trials=tuple(
            _trial(number, state, params.get(key, {}), values.get(key), attributes.get((key, "observation")), ended)
            for key, number, state, ended in rows(TRIALS)
        ),
        kept=tuple(trial for (trial,) in rows(KEPT)),
        claim="".join(text for (text,) in rows(CLAIM) if text != "null"),
    )


def _of_journal(path: Path) -> Stored:
    if not path.exists():
        return EMPTY
    attributes: dict[str, str] = {}
    trials: list[dict[str, Any]] = []
    kept: list[int] = []
    for entry in _entries(path):
        condition = entry.get("only_if")
        if condition is not None and attributes.get(condition["key"]) != condition["text"]:
            continue
        operation = entry["op_code"]
        if "rows" in entry:
            kept = _with_rows(kept, entry["rows"])
        elif operation == SET_STUDY_ATTRIBUTE and entry["study_id"] == 0:
            attributes |= {key: json.dumps(value) for key, value in entry["user_attr"].items()}
        elif operation == CREATE_TRIAL:
            trials.append({**entry, "user_attrs": dict(entry.get("user_attrs", {})), "ended": None})
        elif operation == SET_STATE_AND_VALUES:
            trials[entry["trial_id"]] |= {
                "state": entry["state"],
                "values": entry["values"],
                "ended": entry.get("datetime_complete"),
            }
        elif operation == SET_TRIAL_ATTRIBUTE:
            trials[entry["trial_id"]]["user_attrs"] |= entry["user_attr"]
    return Stored(
        trials=tuple(
            _trial(
                number,
                STATES[told["state"]],
                told.get("params", {}),
                (told["values"] or [None])[0],
                told["user_attrs"].get("observation"),
                told["ended"],
            )
            for number, told in enumerate(trials)
        ),
        kept=tuple(kept),
        claim="" if attributes.get("driver") == "null" else attributes.get("driver", ""),
    )


def _entries(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n")[:-1]:  # behind the last end of a line is what nobody finished
        yield json.loads(line)


def _with_rows(kept: list[int], changes: Iterable[Mapping[str, Any]]) -> list[int]:
    for change in changes:
        if change["table"] == "meshtune_runs":
            kept = [trial for trial in kept if trial != change["key"]["trial"]]
            kept += [row["trial"] for row in change["rows"]]
    return kept


def _trial(
    number: int,
    state: str,
    params: Mapping[str, float],
    value: float | None,
    observation: Mapping[str, Any] | None,
    ended: datetime | str | None,
) -> StoredTrial:
    moment = datetime.fromisoformat(ended) if isinstance(ended, str) else ended
    return StoredTrial(
        number=number,
        state=state,
        configuration=" ".join(f"{name}={value:g}" for name, value in params.items()),
        value=value,
        status=observation["status"] if observation else "",
        reason=observation["reason"] if observation else "",
        ended_s=moment.timestamp() if moment else None,
    )
