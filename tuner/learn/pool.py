"""File of a user's own measured runs, which grows: rows are added and never lost.

Two rows are one run where all that ran is equal, and the steps: either by the identity that `learn` keeps in the
remarks (`run=...`), or by equal results. A row is replaced only by one of the same run that rests on more steps, as the
log of a training has that went on.
"""

from __future__ import annotations

import csv
import fcntl
import io
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from costmodels.calibration.measured_runs import COLUMNS
from hardware.io.config_file import number_in, read_text
from hardware.io.errors import ConfigError
from hardware.io.output_file import check_place, write_output
from tuner.learn.rows import ROW_COLUMNS, Row, csv_text, identity_of

SAME_STEP = 0.03
"""Largest difference of the logarithms of two step times of one run, which ranks time for themselves (assumed)."""

_RUN, _STEPS = re.compile(r"\brun=([0-9a-f]{12})\b"), re.compile(r"\bsteps=(\d{1,9})\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """What a pool made of rows.

    Attributes:
        before: Number of rows that it had.
        added: Rows that it did not have.
        renewed: Rows in place of those of the same runs with fewer steps.
        known: Rows that it has already, or that are twice among the new ones.
    """

    before: int
    added: tuple[Row, ...] = ()
    renewed: tuple[Row, ...] = ()
    known: tuple[Row, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows that it has now."""
        return self.before + len(self.added)


@dataclass(kw_only=True, slots=True)
class _Pool:
    """Rows of a pool's file, by what ran.

    Attributes:
        columns: Columns of the file, the user's own among them.
        rows: Cells of each row.
        at: Positions of the rows that ran the same.
    """

    columns: list[str]
    rows: list[dict[str, str]]
    at: dict[tuple[tuple[str, str], ...], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, cells in enumerate(self.rows):
            self.at.setdefault(identity_of(cells), []).append(position)

    def find(self, row: Row) -> int | None:
        """Return the position of the same run; None if there is none."""
        here = (at for at in self.at.get(row.identity, ()) if _is_same_run(self.rows[at], row.cells))
        return next(here, None)

    def append(self, row: Row) -> None:
        """Add a row at the end."""
        self.at.setdefault(row.identity, []).append(len(self.rows))
        self.rows.append(dict(row.cells))


def models_of(pool: Path) -> str:
    """Return the name of the folder beside a pool's file that holds the files of its models."""
    return f"{pool.stem}-models"


def add_rows(pool: Path, rows: Sequence[Row]) -> Added:
    """Add rows to the file of a pool, which is written anew as a whole, or not at all.

    Raises:
        ConfigError: The file is no file of measured runs, or cannot be written.
    """
    check_place(pool, "--pool")
    with _held(pool):
        kept = _read(pool)
        before = len(kept.rows)
        added, renewed, known = [], [], []
        for row in rows:
            at = kept.find(row)
            if at is None:
                kept.append(row)
                added.append(row)
            elif _steps(row.cells) > _steps(kept.rows[at]):
                kept.rows[at] = {**kept.rows[at], **row.cells}
                renewed.append(row)
            else:
                known.append(row)
        if added or renewed:
            _write(pool, kept, [*added, *renewed])
    return Added(before=before, added=tuple(added), renewed=tuple(renewed), known=tuple(known))


@contextmanager
def _held(pool: Path) -> Iterator[None]:
    """Hold a pool, so that another process that adds rows waits."""
    lock = pool.with_name(f".{pool.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot be written ({error.strerror})", key="--pool", value=str(pool)) from None
    with os.fdopen(descriptor, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(pool: Path) -> _Pool:
    """Return the rows of a pool's file; none if it does not exist.

    Raises:
        ConfigError: It lacks a column, or a row has other cells than the header.
    """
    if not pool.exists():
        return _Pool(columns=list(ROW_COLUMNS), rows=[])
    lines = list(csv.reader(io.StringIO(read_text(pool).removeprefix("\ufeff"), newline="")))
    header = lines[0] if lines else []
    missing = next((column for column in COLUMNS if column not in header), None)
    if missing is not None:
        raise ConfigError(
            "is no file of measured runs: it lacks a column", key=missing, file=str(pool), nearest="another --pool"
        )
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        if cells and len(cells) != len(header):
            raise ConfigError(f"has {len(cells)} cells where the header has {len(header)}", file=f"{pool}:{number}")
        if cells:
            rows.append(dict(zip(header, cells, strict=True)))
    columns = [*header, *(column for column in ROW_COLUMNS if column not in header)]
    return _Pool(columns=columns, rows=rows)


def _write(pool: Path, kept: _Pool, rows: Sequence[Row]) -> None:
    """Write a pool's file, after the files of models that its new rows name."""
    for row in rows:
        if row.model_file:
            file = pool.parent / row.cells["architecture"]
            file.parent.mkdir(exist_ok=True)
            write_output(file, row.model_file, option="--pool")
    filled = (dict.fromkeys(kept.columns, "") | cells for cells in kept.rows)
    write_output(pool, csv_text(filled, kept.columns), option="--pool")


def _is_same_run(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether two rows of the same configuration are one run, of which one may have more steps."""
    ours, theirs = (_RUN.search(cells.get("notes", "")) for cells in (one, other))
    times = [number_in(cells.get("step_seconds", "")) for cells in (one, other)]
    if ours is not None and theirs is not None and times[0] and times[1]:
        return ours[1] == theirs[1] and abs(math.log(times[0] / times[1])) <= SAME_STEP
    peaks = [number_in(cells.get("peak_mem_gib", "")) for cells in (one, other)]
    failed = [cells.get("notes", "").startswith("FAILED") for cells in (one, other)]
    return times[0] == times[1] and peaks[0] == peaks[1] and failed[0] == failed[1]


def _steps(cells: Mapping[str, str]) -> int:
    found = _STEPS.search(cells.get("notes", ""))
    return int(found[1]) if found else 0
