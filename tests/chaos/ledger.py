"""What trials themselves have written of their beginnings and ends, whoever started them and whatever became of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line.

    Attributes:
        event: `begin` and `end`, by the trial; `limited`, by whoever took its memory away.
        trial: The study's number.
        configuration: As `name=value ...`.
        pid: Of the trial's process.
        time_s: Seconds since the epoch.
        step_s: The step time that an end tells [s].
    """

    event: str
    trial: int
    configuration: str
    pid: int
    time_s: float
    step_s: float | None = None


def read_ledger(path: Path) -> tuple[Entry, ...]:
    """All lines in their order; the last one may not be whole yet."""
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return tuple(Entry(**json.loads(line)) for line in lines)


def running(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The beginnings of trials that have not ended and whose process lives."""
    ended = {entry.pid for entry in entries if entry.event == "end"}
    return tuple(e for e in entries if e.event == "begin" and e.pid not in ended and _lives(e))


def _lives(entry: Entry) -> bool:
    try:
        return b"trial_program" in Path(f"/proc/{entry.pid}/cmdline").read_bytes()
    except OSError:
        return False
