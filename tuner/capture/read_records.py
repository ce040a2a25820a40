"""Reader of the records of a capture. A script may write into their folder itself, so each is checked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tuner.capture.record import Record

_RECORD = TypeAdapter(Record)


def read_records(paths: Iterable[Path]) -> tuple[list[Record], list[str]]:
    """Return the records in files, and a sentence for each thing in them that cannot be read."""
    found, unread = [], []
    for path in paths:
        try:
            values = json.loads(path.read_bytes())
            unread += _take_out_bytes(values)
            record = _RECORD.validate_python(values)
            if not record.words or not all(record.through):
                raise ValueError("a command has no words")
            words = [*record.words, *(word for outer in record.through for word in outer), record.directory]
            if odd := next((word for word in words if not _is_text(word)), None):
                raise ValueError(f"{odd!a} of {record.words[0]!a} is no text in UTF-8")
            found.append(record)
        except (OSError, ValueError, RecursionError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            unread.append(f"a record of a command cannot be read: {reason}")
    return found, unread


def _take_out_bytes(values: Any) -> list[str]:
    """Take environment variables out of a record whose values are no text in UTF-8, and return a sentence for each."""
    environment = values.get("environment") if isinstance(values, dict) else None
    if not isinstance(environment, dict):
        return []
    odd = [name for name, value in environment.items() if not _is_text(name) or not _is_text(value)]
    for name in odd:
        del environment[name]
    return [f"the variable {name!a} of a command is left out, because it is no text in UTF-8" for name in odd]


def _is_text(value: object) -> bool:
    """Return whether a value is text without bytes that stand for no character."""
    return isinstance(value, str) and not any("\ud800" <= one <= "\udfff" for one in value)
