"""Trials of a study as plain rows: for tables, CSV files and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from costmodels.job.parallel_config import Value
from tuner.answers.comparison import Comparison
from tuner.answers.trial_parts import parts_of
from tuner.storage.record import TrialRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow:
    """One trial, by the keys of JSON and the columns of CSV files.

    Attributes:
        trial: Number of the trial.
        config: Value of each dimension of its candidate.
        status: Outcome in one word: a value of `trials.backend.Status`, `running`, or `waiting` for the next driver.
        is_proxy: Whether a smaller job ran in place of the candidate.
        step_time_s: Median of the measured steps, also of a trial that was stopped early or ran a proxy [s]; None
            without one.
        speedup: Ratio of the compared configuration's step time to this one; None unless the trial completed.
        predicted_s: Step time that the cost model predicted [s].
        peak_memory_bytes: Measured peak memory of the fullest device; None if unknown.
        elapsed_s: Wall clock of the trial, lost attempts included [s]; None if unknown.
        queued_s: Time in the queue, before that [s]; None without one.
        start_s: Part of it before the program's first step [s]; None if unknown.
        warmup_s: Part of it to compile and in the steps before the measured ones [s]; None if unknown.
        steps_s: Part of it from the first measured step on [s]; None if unknown.
        reason: Sentence on the outcome; empty if there is nothing to say.
        losses: Steps of the training that the trial has brought forward, each with its loss; CSV files leave them out.
    """

    trial: int
    config: dict[str, Value]
    status: str
    is_proxy: bool
    step_time_s: float | None
    speedup: float | None
    predicted_s: float | None
    peak_memory_bytes: int | None
    elapsed_s: float | None
    queued_s: float | None
    start_s: float | None
    warmup_s: float | None
    steps_s: float | None
    reason: str
    losses: tuple[tuple[int, float], ...] = ()


def trial_rows(records: Sequence[TrialRecord], compared: Comparison | None) -> list[TrialRow]:
    """Return the rows of trials.

    Args:
        records: Records of the trials.
        compared: Configuration that speed-ups are relative to; None without one.
    """
    return [_row(record, compared) for record in records]


def csv_of(rows: Sequence[TrialRow], dimensions: Sequence[str]) -> str:
    """Return the rows as the text of a CSV file, with a column for each dimension.

    Args:
        rows: Rows of the trials.
        dimensions: Names of the dimensions of a candidate.
    """
    out = io.StringIO()
    further = [name for name in TrialRow.__dataclass_fields__ if name not in ("trial", "config", "losses")]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["trial", *dimensions, *further])
    for row in rows:
        cells = [row.trial, *(row.config[name] for name in dimensions), *(getattr(row, name) for name in further)]
        writer.writerow([str(cell).lower() if isinstance(cell, bool) else cell for cell in cells])
    return out.getvalue()


def _row(record: TrialRecord, compared: Comparison | None) -> TrialRow:
    observation = record.observation if record.finished else None
    elapsed_s = observation.elapsed_s if observation else None
    return TrialRow(
        trial=record.number,
        config=dict(record.params),
        status=record.status.value if record.status else record.unfinished_in_words,
        is_proxy=record.is_proxy,
        step_time_s=observation.median_s if observation else record.step_time_s,
        speedup=compared.speedup(record.step_time_s) if compared else None,
        predicted_s=record.predicted_s,
        peak_memory_bytes=observation.peak_memory_bytes if observation else None,
        elapsed_s=None if observation is None or elapsed_s is None else elapsed_s + observation.lost_s,
        **asdict(parts_of(observation)),
        reason=observation.reason if observation else "",
        losses=observation.losses if observation else (),
    )
