"""Learn from logs and studies: rows for the pool, and a profile fitted to it, with its errors on runs left out."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from costmodels.calibration.fidelity import is_clean
from costmodels.calibration.fitting import MIN_RUNS
from costmodels.calibration.measured_runs import MeasuredRun, read_measured_and_skipped
from costmodels.calibration.sources import is_known_source, source_of
from costmodels.job.runtime import find_runtime, read_profile
from hardware.io.errors import ConfigError
from tuner.calibrate.measured_steps import CalibratedFile, calibrate_file
from tuner.learn.from_logs import read_runs
from tuner.learn.from_studies import read_study
from tuner.learn.held_out import Check, check_held_out
from tuner.learn.pool import Added, add_rows
from tuner.learn.rows import OwnRun, Row, row_of
from tuner.study_file.answers import Added as Answers
from tuner.study_file.cluster_keys import StatedHosts, cluster_keys

STUDIES = (".yaml", ".yml")
LOGS = ("", ".log", ".txt", ".out", ".err", ".stdout", ".stderr", ".gz")
"""Ends of the names of files in a folder that may be logs; a job's number behind a dot counts as none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """File, or run of a file, that gave no row.

    Attributes:
        file: Path of the file.
        reason: Reason.
    """

    file: str
    reason: str


@dataclass(kw_only=True, slots=True)
class Gathered:
    """What files gave.

    Attributes:
        rows: Rows of their runs.
        unsure: Sentences by file on what it does not state, or what was not read of it.
        refused: Files that gave no row, with the reasons.
        left_out: Numbers of trials of studies that are no rows, and of files that no log is called like, by reason.
    """

    rows: list[Row] = field(default_factory=list)
    unsure: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refitted:
    """Fit to a pool.

    Attributes:
        check: Errors on parts that were left out.
        fit: Fit that was written; None where it predicts what it has not seen no better than the catalog.
    """

    check: Check
    fit: CalibratedFile | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """Result of learning from files.

    Attributes:
        pool: File of the pool.
        gathered: What the files gave.
        added: What the pool made of it.
        runtime: Runtime that was fitted; empty if none was.
        refitted: Fit to the pool; None where there was none.
        why_not: Reason why there was no fit, or none was written; empty otherwise.
    """

    pool: Path
    gathered: Gathered
    added: Added
    runtime: str = ""
    refitted: Refitted | None = None
    why_not: str = ""

    @property
    def written(self) -> Path | None:
        """Profile that was written."""
        return self.refitted.fit.out if self.refitted and self.refitted.fit else None

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of `meshtune learn --json`."""
        check = self.refitted.check if self.refitted else None
        return {
            "pool": str(self.pool),
            "rows": self.added.rows,
            "added": [dict(row.cells) for row in self.added.added],
            "renewed": [dict(row.cells) for row in self.added.renewed],
            "known": [row.cells["source_url_or_repo_path"] for row in self.added.known],
            "unsure": {file: list(told) for file, told in self.gathered.unsure.items()},
            "refused": [asdict(one) for one in self.gathered.refused],
            "left_out": dict(self.gathered.left_out),
            "runtime": self.runtime or None,
            "held_out": check and asdict(check),
            "profile": None if self.written is None else str(self.written),
            "fit": self.refitted.fit.as_json() if self.refitted and self.refitted.fit else None,
            "why_not": self.why_not or None,
        }


def gather(
    given: Sequence[Path], answers: Answers, *, source: str | None, models: str, storage: str | None = None
) -> Gathered:
    """Read files and folders of logs, and studies.

    Args:
        given: Paths as the user gives them; each is a source of its own.
        answers: What the user says of all logs, where they do not say it themselves.
        source: Name of the source in place of the paths' names.
        models: Folder of model files, as the rows shall name it.
        storage: Address of the database of studies, if not that of their files.

    Raises:
        ConfigError: A path does not exist, or the source is one of the catalog's.
    """
    found = Gathered()
    _check_cluster(answers.cluster)
    if source is not None and is_known_source(source):
        rule = "is the name of a published source, whose properties the catalog states"
        raise ConfigError(rule, key="--source", value=source, nearest="another name")
    for path in given:
        if not path.exists():
            raise ConfigError("no such file or folder", file=str(path))
        for file in _files_of(path, found):
            _read(file, answers, source or _source_name(path), models, storage, found)
    return found


def _check_cluster(words: str | None) -> None:
    """Check once that there is such a cluster, before any log is read.

    Raises:
        ConfigError: The catalog has none of that name, or the file cannot be read.
    """
    if words is not None:
        cluster_keys(words, StatedHosts(), Path())


def _files_of(path: Path, found: Gathered) -> Iterator[Path]:
    """Yield the logs under a folder, in the order of their names; a file as it is."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in files if not name.startswith(".")):
            if re.sub(r"\.[oe]?\d+$", "", Path(name).suffix.lower()) in LOGS:
                yield Path(folder) / name
            else:
                found.left_out[f"files called *{Path(name).suffix} in a folder"] += 1


def _read(file: Path, answers: Answers, source: str, models: str, storage: str | None, found: Gathered) -> None:
    """Read one file, and keep what it gave or why it gave nothing."""

    def refuse(error: ConfigError) -> None:
        found.refused.append(Refused(file=str(file), reason=_reason(error, file)))

    runs: list[OwnRun] = []
    if file.suffix.lower() in STUDIES:
        try:
            study = read_study(file, storage=storage, source=source)
            runs += study.runs
            found.left_out.update(study.left_out)
        except ConfigError as error:
            refuse(error)
    else:
        for log in read_runs(file, answers, source=source, on_refused=refuse):
            runs.append(log.run)
            if log.unsure:
                found.unsure[log.run.place] = log.unsure
    for run in runs:
        try:
            found.rows.append(row_of(run, models))
        except ConfigError as error:
            refuse(error)


def _reason(error: ConfigError, file: Path) -> str:
    """Return an error's words without the file, and what it lists."""
    words = str(error).removeprefix(f"{file}: ")
    return "; ".join((words, *error.listed))


def _source_name(path: Path) -> str:
    """Return the name of a path as that of a source, which is none of the catalog's."""
    name = re.sub(r"[^A-Za-z0-9.]+", "_", path.resolve().stem).strip("_") or "runs"
    return f"{name}_runs" if is_known_source(name) else name


def learn(
    gathered: Gathered, pool: Path, out: Path, *, runtime: str | None, force: bool, on_progress: Callable[[str], None]
) -> Learned:
    """Add rows to the pool, and fit a profile to it.

    Args:
        gathered: What was read.
        pool: File of the pool.
        out: Profile to write.
        runtime: Runtime to fit; None takes that of the rows, if it is one.
        force: Whether a profile is written that predicts runs left out no better than the catalog's.
        on_progress: Callback with a line of text before each fit.

    Raises:
        ConfigError: No row was read, or a file cannot be written.
    """
    if not gathered.rows:
        listed = tuple(f"{one.file}: {one.reason}" for one in gathered.refused)
        others = tuple(f"{count:,} {what}" for what, count in gathered.left_out.items())
        raise ConfigError("nothing was learned: no file gives a row", key="LOGS", listed=(*listed, *others))
    _check_profile(out)
    added = add_rows(pool, gathered.rows)
    runs, _ = read_measured_and_skipped([pool], Path())
    name = runtime or _runtime_of(gathered.rows)
    told: dict[str, Any] = {"pool": pool, "gathered": gathered, "added": added}
    if not name:
        return Learned(**told, why_not="the rows are of several runtimes: choose one with --runtime")
    own = timed_of(runs, name)
    if not own:
        return Learned(**told, runtime=name, why_not=f"no run of {name} is timed")
    check = check_held_out(own, find_runtime(name), on_progress=on_progress)
    why = ""
    if len(own) < MIN_RUNS:
        why = f"a fit needs {MIN_RUNS} timed runs of {name}, and the pool has {len(own)}"
    elif check.helps is False and not force:
        why = f"it predicts {check.part}s left out no better than the catalog's {name}; --force writes it"
    if why:
        return Learned(**told, runtime=name, refitted=Refitted(check=check, fit=None), why_not=why)
    fit = calibrate_file([pool], out, runtime=name, overwrite=True, on_progress=on_progress)
    return Learned(**told, runtime=name, refitted=Refitted(check=check, fit=fit))


def timed_of(runs: Sequence[MeasuredRun], runtime: str) -> list[MeasuredRun]:
    """Return the clean, timed runs of a runtime."""
    own = (run for run in runs if source_of(run).runtime == runtime)
    return [run for run in own if run.step_time_s is not None and is_clean(run)]


def _runtime_of(rows: Sequence[Row]) -> str:
    """Return the runtime of rows; empty if they are of several."""
    names: Mapping[str, int] = Counter(row.cells["runtime"] for row in rows)
    return next(iter(names)) if len(names) == 1 else ""


def _check_profile(out: Path) -> None:
    """Check that a file may be replaced: it is a profile, which each call writes anew, or does not exist.

    Raises:
        ConfigError: It is something else.
    """
    if not out.exists():
        return
    try:
        read_profile(out)
    except ConfigError:
        rule = "exists and is no runtime profile"
        raise ConfigError(rule, key="--out", value=str(out), nearest="another name") from None
