"""Timeline of a simulated pipeline as text: a line for each stage, a column for each slice of the step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from costmodels.simulator.stage_rows import StageRow
from costmodels.simulator.step_tasks import Role
from costmodels.step.pipeline.passes import Kind

_LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.WEIGHTS: "W"}
IDLE = "."
LEGEND = "F forward, B backward, W weight gradients, O optimizer, . idle"
NUM_COLUMNS = 96
"""Largest number of columns of a timeline."""
MAX_ROWS = 32
"""Largest number of stages that are shown."""
_GAP = " ... "


def pipeline_lines(rows: Sequence[StageRow], makespan_s: float) -> Iterator[str]:
    """Yield one line per stage, with the share of the step in which the stage is idle.

    A column stands for half of a median forward pass if the step then fits in NUM_COLUMNS, else for a whole one. If the
    step needs more columns, only the first and the last are shown. A column's letter is the activity that fills most of
    it.
    """
    shown = rows[:MAX_ROWS]
    # a tiny forward pass must not make more than 10,000 columns
    column_s = max(_median_forward_s(shown), makespan_s / 10_000)
    number = round(makespan_s / column_s)
    if 2 * number <= NUM_COLUMNS:
        number *= 2
    column_s = makespan_s / max(number, 1)
    unlike = len({row.replica for row in rows}) > 1
    for row in shown:
        name = f"replica {row.replica} stage {row.stage}" if unlike else f"stage {row.stage}"
        drawn = _choose_letters(row, column_s, number)
        if number > NUM_COLUMNS:
            half = (NUM_COLUMNS - len(_GAP)) // 2
            drawn = drawn[:half] + _GAP + drawn[-half:]
        yield f"  {name:<{22 if unlike else 9}} {row.idle_share:6.1%} idle  {drawn}"
    if len(rows) > len(shown):
        yield f"  and {len(rows) - len(shown):,} more; see --trace or --json"


def _median_forward_s(rows: Sequence[StageRow]) -> float:
    """Compute the median time of a forward pass [s]; a pass in several pieces counts as their sum."""
    forward_s: dict[tuple[int, int, int, int], float] = {}
    for row in rows:
        for span in row.computing:
            if span.kind == Kind.FORWARD:
                key = (row.replica, row.stage, span.micro_batch, span.chunk)
                forward_s[key] = forward_s.get(key, 0.0) + span.end_s - span.start_s
    return statistics.median(forward_s.values())


def _choose_letters(row: StageRow, column_s: float, number: int) -> str:
    """Choose the letter of each column: the activity that fills most of it."""
    taken: list[dict[str, float]] = [{} for _ in range(number)]
    for span in row.computing:
        letter = "O" if span.role == Role.OPTIMIZER else _LETTERS[Kind(span.kind)]
        # a span adds to every column it overlaps, in seconds of overlap
        for column in range(int(span.start_s / column_s), min(int(span.end_s / column_s) + 1, number)):
            begin_s = max(span.start_s, column * column_s)
            end_s = min(span.end_s, (column + 1) * column_s)
            taken[column][letter] = taken[column].get(letter, 0.0) + max(end_s - begin_s, 0.0)
    return "".join(
        max(column, key=column.__getitem__) if column and sum(column.values()) >= column_s / 2 else IDLE
        for column in taken
    )
