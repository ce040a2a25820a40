"""Reader of published sweeps (CSV files in the form of configs/measured) as past runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from costmodels.calibration.fidelity import group_key, is_clean, settings_of
from costmodels.calibration.measured_runs import MeasuredRun, read_measured_and_skipped
from costmodels.calibration.sources import MeasuredSetting, facts_of, source_of
from trials.backend import Clock, Status
from trials.replay.backend import failure_of
from tuner.search.earlier_runs import Past, PastRun

SUSPECT = "SUSPECT"
"""Tag in the notes of a row whose figures cannot be right; OUTLIER and LOW-MFU rows are true and unlike their
neighbours."""


def read_published(path: Path) -> Past:
    """Return the runs of one CSV file, timed and failed, without those that the notes call wrong.

    Raises:
        ConfigError: The file is missing or malformed.
    """
    found, unusable = read_measured_and_skipped([path], Path())
    past = past_of_runs(found)
    skipped = Counter({f"rows ({reason})": count for reason, count in unusable.items()}) + Counter(past.skipped)
    return replace(past, skipped=dict(skipped))


def past_of_runs(found: Sequence[MeasuredRun]) -> Past:
    """Return published runs as history, without those that the notes call wrong and those of unknown devices."""
    believed = [run for run in found if SUSPECT not in run.notes]
    runs, settings, unknown = settings_of(believed, {})
    skipped = Counter({f"rows ({reason})": count for reason, count in unknown.items()})
    skipped[f"rows tagged {SUSPECT}"] += len(found) - len(believed)
    return Past(
        runs=tuple(_past_run(run, setting) for run, setting in zip(runs, settings, strict=True)),
        skipped={reason: count for reason, count in skipped.items() if count},
    )


def published_group(run: MeasuredRun) -> str:
    """Return `PastRun.group` of a published run."""
    return " | ".join(str(part) for part in group_key(run) if part != "")


def clock_of(run: MeasuredRun) -> Clock:
    """Return the clock of a run's step time: the wall clock, unless its remarks name another one."""
    found = re.search(r"\bclock=(virtual|cpu)\b", run.notes)
    return cast("Clock", found[1]) if found else "wall"


def _past_run(run: MeasuredRun, measured: MeasuredSetting) -> PastRun:
    return PastRun(
        group=published_group(run),
        job=measured.setting.job,
        cluster=measured.setting.cluster,
        runtime=source_of(run).runtime,
        facts=tuple(facts_of(run).items()),
        config=run.config,
        status=failure_of([run]) if run.is_failed else Status.OK,
        step_time_s=run.step_time_s,
        log_spread=0.0,
        num_steps=0 if run.step_time_s is None else 1,
        peak_memory_bytes=run.peak_memory_bytes,
        memory=measured.memory,
        stage=measured.stage,
        origin="measured",
        clock=clock_of(run),
        is_clean=is_clean(run),
    )
