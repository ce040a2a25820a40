"""Read the measured trials of a study as runs. Trials of simulated worlds and smaller jobs are none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path

from costmodels.job.runtime import RuntimeProfile, find_runtime, runtime_names, shipped_runtimes
from costmodels.job.setting import Setting
from hardware.io.errors import ConfigError
from trials.backend import Status
from tuner.learn.rows import OwnRun
from tuner.search.earlier_runs import PastRun
from tuner.storage.history.stored import group_of, read_stored
from tuner.study_file.config import load_study


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRead:
    """Runs of a study.

    Attributes:
        runs: Runs of its trials.
        left_out: Numbers of trials that are no rows, by reason.
    """

    runs: tuple[OwnRun, ...]
    left_out: dict[str, int]


def read_study(file: Path, *, storage: str | None, source: str) -> StudyRead:
    """Read the trials of a study that has run.

    Args:
        file: Study file.
        storage: Address of its database, if not that of the file.
        source: Name of the runs of one cluster, for the rows.

    Raises:
        ConfigError: The file or its storage cannot be read, or holds no trial.
    """
    request = load_study(file, storage=storage)
    if not request.storage.may_exist:
        raise ConfigError("has not run yet: its storage does not exist", file=str(file))
    label = str(request.storage)
    past = read_stored(request.storage, label, None)
    own = [run for run in past.runs if run.group == group_of(request.name, label)]
    runs: list[OwnRun] = []
    left_out: Counter[str] = Counter()
    for run in own:
        if why := _no_row(run):
            left_out[why] += 1
        else:
            runs.append(_own_run(run, f"{file} ({request.name})", source))
    if not own:
        raise ConfigError("has no trial that ended", file=str(file))
    return StudyRead(runs=tuple(runs), left_out=dict(left_out))


def _no_row(run: PastRun) -> str:
    """Return why a trial is no row; empty if it is one."""
    if run.origin != "measured":
        return "trials of a simulated world"
    if run.clock != "wall":
        return f"trials timed by the {run.clock} clock"
    if run.status == Status.OUT_OF_MEMORY or run.step_time_s is not None:
        return ""
    return f"trials that ended as {run.status.value}"


def _own_run(run: PastRun, place: str, source: str) -> OwnRun:
    return OwnRun(
        setting=Setting(job=run.job, cluster=run.cluster, runtime=_runtime_of(run)),
        config=run.config,
        step_time_s=run.step_time_s,
        peak_memory_bytes=run.peak_memory_bytes,
        memory=run.memory,
        failure="" if run.step_time_s is not None else "out of memory",
        source=source,
        place=place,
        remarks=(f"steps={run.num_steps}",) if run.num_steps else (),
    )


def _runtime_of(run: PastRun) -> RuntimeProfile:
    """Return a profile with the facts of a run; under a name that the catalog lacks if the profile was the user's."""
    known = {field.name for field in fields(RuntimeProfile)}
    stated = {name: value for name, value in run.facts if name in known}
    name = run.runtime if run.runtime in runtime_names() else shipped_runtimes()[0]
    return replace(find_runtime(name), **stated, name=run.runtime)
