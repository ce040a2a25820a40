"""Write rows that name nobody: each is built anew from the numbers of a run, and nothing of its text is copied.

Names of sources, models, files and hosts, paths, addresses and remarks are left out. What a row keeps are sizes,
degrees, facts, times, memory, and names of the catalog: devices, links, runtimes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from costmodels.calibration.fidelity import UNCLEAN
from costmodels.calibration.measured_runs import MeasuredRun, read_measured_and_skipped
from costmodels.calibration.sources import setting_of
from hardware.device import shipped_devices
from hardware.io.errors import ConfigError
from hardware.io.output_file import check_place, write_output
from trials.backend import Status
from trials.replay.backend import failure_of
from tuner.learn.from_studies import read_study
from tuner.learn.pool import models_of
from tuner.learn.rows import OwnRun, Row, csv_text, row_of

ANONYMOUS = "anonymous"

LEFT_OUT = {
    "source": "names of people and projects; rows of one source stay together under a number",
    "source_url_or_repo_path": "paths, addresses, and names of hosts and users",
    "model": "names; the sizes say what ran",
    "notes": "free text; what it says of the model and the layout is written anew",
}
"""Columns whose texts are not copied, with what they may hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Rows that were written.

    Attributes:
        out: File of the rows.
        rows: Rows.
        skipped: Numbers of rows that were left out as a whole, by reason.
    """

    out: Path
    rows: tuple[Row, ...]
    skipped: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of `meshtune share --json`."""
        return {
            "written": str(self.out),
            "rows": len(self.rows),
            "models": sorted({row.cells["architecture"] for row in self.rows} - {""}),
            "left_out": dict(LEFT_OUT),
            "skipped": self.skipped,
        }


def share(given: Sequence[Path], out: Path, *, storage: str | None = None) -> Shared:
    """Write the rows of pools, and the measured trials of studies, without anything that names anybody.

    Args:
        given: Files of measured runs, and studies.
        out: CSV file to write.
        storage: Address of the database of studies, if not that of their files.

    Raises:
        ConfigError: A file cannot be read or written, or there is no row.
    """
    check_place(out)
    skipped: Counter[str] = Counter()
    sources: dict[tuple[str, str], str] = {}
    rows: list[Row] = []
    shipped = {*shipped_devices()}
    for path in given:
        for run in _runs_of(path, storage, skipped):
            if {device.name for device in run.setting.cluster.devices} - shipped:
                skipped["rows of devices that stand in no catalog but your own"] += 1
                continue
            key = (str(path), run.source)
            source = sources.setdefault(key, f"{ANONYMOUS}-{len(sources) + 1}")
            try:
                rows.append(row_of(_nameless(run, source), models_of(out)))
            except ConfigError as error:
                skipped[f"rows whose {error.key} {error.rule}"] += 1
    if not rows:
        listed = tuple(f"{count:,} {reason}" for reason, count in skipped.items())
        raise ConfigError("there is nothing to share: no row is left", key="FILES", listed=listed)
    for row in rows:
        if row.model_file:
            file = out.parent / row.cells["architecture"]
            file.parent.mkdir(exist_ok=True)
            write_output(file, row.model_file)
    write_output(out, csv_text(row.cells for row in rows))
    return Shared(out=out, rows=tuple(rows), skipped=dict(skipped))


def _runs_of(path: Path, storage: str | None, skipped: Counter[str]) -> list[OwnRun]:
    if path.suffix.lower() != ".csv":
        study = read_study(path, storage=storage, source=str(path))
        skipped.update(study.left_out)
        return list(study.runs)
    runs, unusable = read_measured_and_skipped([path], Path())
    skipped.update({f"rows ({reason})": count for reason, count in unusable.items()})
    found = []
    for run in runs:
        try:
            found.append(_own_run(run))
        except ConfigError as error:
            skipped[f"rows whose {error.key} {error.rule}"] += 1
    return found


def _own_run(run: MeasuredRun) -> OwnRun:
    """Return a row's run.

    Raises:
        ConfigError: Its device is not in the catalog.
    """
    measured = setting_of(run, {})
    of_all = measured.stage == "fullest" or run.config.pp == 1
    lacks = run.is_failed and failure_of([run]) == Status.OUT_OF_MEMORY
    return OwnRun(
        setting=measured.setting,
        config=run.config,
        step_time_s=run.step_time_s,
        peak_memory_bytes=run.peak_memory_bytes if of_all else None,
        memory=measured.memory,
        failure="" if not run.is_failed else "out of memory" if lacks else "of a reason that is not stated",
        source=run.source,
        place=run.place,
        remarks=tuple(tag for tag in UNCLEAN if tag in run.notes),
    )


def _nameless(run: OwnRun, source: str) -> OwnRun:
    kept = tuple(remark for remark in run.remarks if remark in UNCLEAN)
    return replace(run, source=source, place="", remarks=kept)
