"""Table of a study's trials, cut to the width of a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.job.parallel_config import Value
from hardware.rounding import measured, predicted
from tuner.answers.comparison import Comparison
from tuner.answers.trial_rows import TrialRow
from tuner.terminal.console import in_words, printable, value_in_words
from tuner.terminal.tables import BEST, WORSE

OUTCOME_WIDTH = 24
"""Width of the column of outcomes below which other columns are left out, if outcomes are that long."""

MISSING = "-"

_FURTHER = ("step [s]", "speed-up", "GiB", "predicted [s]")
"""Columns beside the dimensions, of which the last ones are left out first."""


def table_lines(rows: Sequence[TrialRow], compared: Comparison | None, best: int | None, width: int) -> list[str]:
    """Return the lines of the table of trials, none of them wider than `width` if that can be.

    Dimensions that have one value in all trials stand below the table, as do the names of columns without room.

    Args:
        rows: Rows of the trials, at least one.
        compared: Configuration that speed-ups are relative to.
        best: Number of the trial of the best configuration, which is marked; None without one.
        width: Width of the terminal in characters.
    """
    dimensions = list(rows[0].config)
    varying = [name for name in dimensions if len({row.config[name] for row in rows}) > 1]
    further = [name for name in _FURTHER if any(_cell(row, name) != MISSING for row in rows)]
    outcomes, dropped = [_outcome(row, compared) for row in rows], list[str]()
    needed = min(max(map(len, outcomes)), OUTCOME_WIDTH)
    while True:
        header = ["trial", *varying, *further]
        cells = [_cells(row, varying, further, best) for row in rows]
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        room = width - sum(widths) - 2 * len(widths)
        if room >= needed or len(further) <= 1:
            break
        dropped.insert(0, further.pop())
    room = max(room, len("outcome"))
    lines = [
        "  ".join([*(cell.rjust(size) for cell, size in zip(line, widths, strict=True)), _cut(told, room)]).rstrip()
        for line, told in zip([header, *cells], ["outcome", *outcomes], strict=True)
    ]
    same = {name: rows[0].config[name] for name in dimensions if name not in varying and rows[0].config[name] != 1}
    if same:
        lines.append(f"In all trials: {in_words(same)}")
    if best is not None:
        lines.append("* the best configuration")
    if compared is not None and "speed-up" in further:
        lines.append(f"speed-up: times as fast as {compared.name}")
    if dropped:
        lines.append(f"Without room here: {', '.join(dropped)}; --csv and --json have them.")
    return lines


def style_of(row: TrialRow, best: int | None) -> str:
    """Return the style of a trial's row: that of the best one, or of one that failed; empty for others."""
    if row.trial == best:
        return BEST
    return WORSE if row.status not in ("ok", "running", "waiting", "pruned") else ""


def _cells(row: TrialRow, varying: Sequence[str], further: Sequence[str], best: int | None) -> list[str]:
    number = f"{'*' if row.trial == best else ''}{row.trial}"
    return [number, *(_value(row.config[name]) for name in varying), *(_cell(row, name) for name in further)]


def _value(value: Value) -> str:
    return value_in_words(value) if value != "" else "even"


def _cell(row: TrialRow, column: str) -> str:
    """Return the text of one cell; MISSING where nothing is known."""
    if column == "step [s]":
        return MISSING if row.step_time_s is None else measured(row.step_time_s)
    if column == "speed-up":
        return MISSING if row.speedup is None else f"{row.speedup:.3f}"
    if column == "GiB":
        return MISSING if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**30:.1f}"
    return MISSING if row.predicted_s is None else predicted(row.predicted_s)


def _outcome(row: TrialRow, compared: Comparison | None) -> str:
    """Return the outcome of a trial in words, with the reason last because it is what gets cut."""
    if row.status == "ok":
        is_compared = compared is not None and row.config == compared.values
        told = [compared.name] if compared is not None and is_compared else []
        return ", ".join([*told, *(["as a proxy job"] if row.is_proxy else []), *filter(None, [row.reason])])
    status = "stopped early" if row.status == "pruned" else row.status.replace("_", " ")
    return status if row.status in ("out_of_memory", "pruned") or not row.reason else f"{status}: {row.reason}"


def _cut(text: str, room: int) -> str:
    text = printable(text)
    return text if len(text) <= room else f"{text[: room - 3]}..."
