"""Read the log of a training as runs: the study that `meshtune init --from-log` would write of it, and its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from costmodels.job.parallel_config import DEGREES, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import MemoryMeaning
from hardware.device import find_device
from hardware.io.errors import ConfigError
from hardware.io.temporary import temporary_folder
from trials.command.log_pattern import StepSize
from tuner.imports import Imported
from tuner.imports.log import Measured, NoConfigurationError
from tuner.learn.log_checks import contradiction, device_of, identity_of, lack_of_memory, ranks_with_memory
from tuner.learn.rows import OwnRun
from tuner.study_file.answers import Added
from tuner.study_file.config import load_study
from tuner.study_file.new_study import NewStudy, new_study, read_log

_COUNTS: Mapping[str, MemoryMeaning] = {"deepspeed": "allocated", "nemo": "allocated"}
"""What the memory of a log counts, by its pattern (trials/command/log_pattern.py); others print what is reserved."""


MOST_OF_DEVICE = 1.02
"""Largest share of a device's memory that a log may state: devices of one name differ in what their drivers keep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRead:
    """Run that a log tells of.

    Attributes:
        run: Run.
        steps: Number of readings that its step time is the median of.
        unsure: Sentences on what the log does not state, or what was not read of it.
    """

    run: OwnRun
    steps: int
    unsure: tuple[str, ...]


def read_runs(file: Path, added: Added, *, source: str, on_refused: Callable[[ConfigError], None]) -> Iterator[LogRead]:
    """Yield the runs of a log, which may hold several starts of a program, one behind the other.

    Args:
        file: Log.
        added: What its user says; the log's own words come first.
        source: Name of the runs of one cluster, for the rows.
        on_refused: Called with the reason why a start gives no run: it is not understood, leaves something open,
            contradicts itself, or has no step that counts.
    """
    try:
        device = device_of(file)
    except ConfigError as error:
        on_refused(error)
        return
    after = 0
    while True:
        try:
            imported = read_log(file, after=after)
        except ConfigError as error:
            if not after or not isinstance(error, NoConfigurationError):
                on_refused(error)
            return
        try:
            yield _read_run(imported, file, added, device, source, after)
        except ConfigError as error:
            on_refused(error)
        if imported.steps is None or not imported.steps.lines:
            return
        after += imported.steps.lines[-1].number


def _read_run(imported: Imported, file: Path, added: Added, device: str, source: str, after: int) -> LogRead:
    """Return the run of one start, which begins behind so many lines.

    Raises:
        ConfigError: It is no run.
    """
    added = _with_device(_beyond(added, imported), device, file)
    with temporary_folder("reading a log as a study") as folder:
        study = folder / "study.yaml"
        made = new_study(imported, added, file=file, out=study)
        study.write_text(made.text, encoding="utf-8")
        if made.model_file:
            (folder / made.model_file).write_text(made.model_text, encoding="utf-8")
        problem = load_study(study).problem
    assert problem.current is not None, "a log states its degrees"
    _check_device(problem.setting, device, file)
    place = f"{file}, behind line {after}" if after else str(file)
    return _with_steps(made, problem.setting, problem.current, file, place, source)


def _beyond(added: Added, imported: Imported) -> Added:
    """Return what a user says beyond the log: several logs may differ in what they state themselves."""
    stated = {*imported.degrees, *imported.job} - imported.open.keys()
    stated |= {"hosts"} if "dp" in stated else set()
    stated |= {"global_batch_size"} if imported.micro_batches is not None else set()
    stated |= {"vocab_size"} if "vocab_size" not in imported.missing else set()
    has_model = bool(imported.model) or imported.model_name != "" or imported.named is not None
    return replace(
        added,
        model=None if has_model and not imported.missing else added.model,
        answers={key: value for key, value in added.answers.items() if key not in stated},
    )


def _with_device(added: Added, device: str, file: Path) -> Added:
    """Return the answers with the device that the log names, unless the user names a cluster."""
    if added.cluster is not None or not device:
        return added
    try:
        return replace(added, cluster=find_device(device).name)
    except ConfigError as error:
        raise ConfigError(
            "names a device that is not in the catalog", key="device", value=device, nearest=error.nearest
        ).in_file(str(file)) from None


def _check_device(setting: Setting, device: str, file: Path) -> None:
    """Check that the cluster has the device that the log names.

    Raises:
        ConfigError: It has another one.
    """
    if not device:
        return
    try:
        named = find_device(device)
    except ConfigError:
        return  # the user's cluster says what it is
    if named not in setting.cluster.devices:
        raise ConfigError(
            f"names {named.name}, and the cluster has {setting.cluster.device_names}",
            key="--cluster",
            nearest="leave the option out, or name the cluster of this log",
        ).in_file(str(file))


def _with_steps(
    made: NewStudy, setting: Setting, config: ParallelConfig, file: Path, place: str, source: str
) -> LogRead:
    steps = made.imported.steps
    if steps is None or made.steps is None:
        raise ConfigError("its steps are not those of the configuration that options make of it", file=str(file))
    size = StepSize(
        samples=setting.job.global_batch_size,
        tokens=setting.job.global_batch_size * setting.job.sequence_length,
        devices=config.num_devices,
    )
    assert math.prod(getattr(config, name) for name in DEGREES[:5]) == size.devices, "checked with the study"
    measured = made.steps.measured
    if measured is None and not lack_of_memory(file):
        raise ConfigError("; ".join(made.steps.notes).removeprefix("measured: "), file=str(file))
    if why := contradiction(steps, size) or (measured is not None and _beyond_devices(measured, setting)):
        raise ConfigError(why, file=str(file))
    unsure = [str(one) for one in made.imported.unread]
    peak = None if measured is None else measured.peak_memory_bytes
    if peak is not None and config.pp > 1 and ranks_with_memory(steps.lines) < config.pp:
        unsure.append(f"memory: not that of all {config.pp} stages, so it is left out")
        peak = None
    remarks = [f"run={identity_of(steps, size)}", f"steps={measured.readings}"] if measured else []
    return LogRead(
        run=OwnRun(
            setting=setting,
            config=config,
            step_time_s=measured.step_time_s if measured else None,
            peak_memory_bytes=peak,
            memory=_COUNTS.get(steps.framework, "reserved"),
            failure="" if measured else "out of memory",
            source=source,
            place=place,
            remarks=tuple(remarks),
        ),
        steps=measured.readings if measured else 0,
        unsure=tuple(unsure),
    )


def _beyond_devices(measured: Measured, setting: Setting) -> str:
    """Return in words that no such device computes or holds so much; empty if it may."""
    cluster, job = setting.cluster, setting.job
    peak_bytes = measured.peak_memory_bytes or 0
    most = max(device.memory_bytes for device in cluster.devices)
    if peak_bytes > MOST_OF_DEVICE * most:
        held, has = peak_bytes / 2**30, most / 2**30
        return f"its peak is {held:.1f} GiB, and {cluster.device_names} has {has:.1f}: is it another device?"
    able = sum(group.num_devices * group.device.peak_flop_per_s(job.precision) for group in cluster.groups)
    share = job.model_flops_per_step / (able * measured.step_time_s)
    if share > 1:
        return f"its steps are {share:.2g} times as fast as {cluster.device_names} can be: is it another device?"
    return ""
