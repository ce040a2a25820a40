"""Measurements of `meshtune calibrate --device`: operators and collectives of a study's candidates on this machine."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cache, partial

from costmodels.job.training_job import NARROW_BYTES
from costmodels.operators.isolated import IsolatedCall
from hardware.device import Device, find_device
from hardware.io.errors import ConfigError
from trials.ranks.contract import RanksLostError
from trials.ranks.processes import RankProcesses
from trials.torch_training.benchmarks.device import DeviceBenchmarks, DeviceType
from trials.torch_training.benchmarks.messages import Refusal, Timing
from trials.torch_training.rank_setup import TORCH_RANKS
from tuner.calibrate.calibration_plan import Wanted, calibration_plan, calls_of
from tuner.calibrate.device_results import CalibrationProgress, DeviceCalibration, OnProgress
from tuner.search.earlier_runs import IsolatedSample
from tuner.storage.history.isolated import keep_isolated, read_isolated
from tuner.storage.history.tables import METADATA, make_tables
from tuner.storage.opening import open_store, storage_errors
from tuner.storage.store import AbstractStore
from tuner.study_file.request import StudyRequest
from tuner.subject.problem import Problem

MOST_CPU_RANKS = 8
"""Largest number of processes of one group on a CPU."""

DEFAULT_SECONDS: dict[DeviceType, float] = {"cpu": 120.0, "cuda": 300.0}
"""Default time budget of a calibration by type of device [s]."""


def calibrate_device(
    request: StudyRequest, *, seconds: float | None, force: bool, on_progress: OnProgress
) -> DeviceCalibration | None:
    """Measure the calls that the study's candidates need most and its storage lacks.

    Every time is stored as soon as it is measured, so an interrupted calibration continues with the next call. The
    result has all known times of the plan; it is None if the study has no candidate.

    Args:
        request: Study whose candidates are measured.
        seconds: Approximate time budget [s]; None takes the device's default.
        force: Whether known times are measured again.
        on_progress: Function called after every measured call.

    Raises:
        ConfigError: The study's device is not in this machine, torch is missing, or the storage cannot be used.
    """
    start_s = time.monotonic()
    setting = request.problem.setting
    device, device_type = _device_of(request)
    _check_torch(request.file)
    space = request.problem.space()
    if not len(space.grid):
        return None
    limit_s = DEFAULT_SECONDS[device_type] if seconds is None else seconds
    with ExitStack() as stack:
        # Starting ranks takes seconds and is not needed if all calls are known already: start them at first use.
        benchmarks = cache(partial(_start_benchmarks, request, device_type, stack))
        most_ranks, notes = _count_ranks(request, device, benchmarks)
        calls = calls_of(setting, space.grid, space.memory, most_ranks=most_ranks)
        plan = calibration_plan(calls.wanted, limit_s)
        stack.enter_context(storage_errors(request.storage))
        store = open_store(request.storage)
        stack.callback(store.close)
        make_tables(store)
        known = _read_known(store, device)
        # Known times are kept unless --force is given, so a repeated command continues the calibration.
        left = [one for one in plan if force or one.call not in known]
        run = _Run(store=store, device=device)

        def tell(now: str) -> None:
            done = len(plan) - len(left) + len(run.measured)
            on_progress(CalibrationProgress(done=done, planned=len(plan), now=now))

        tell("")
        if left:
            run.measure(left, benchmarks(), limit_s, tell)
    found = known | run.measured
    return DeviceCalibration(
        cluster=setting.cluster,
        precision=setting.job.precision,
        storage=str(request.storage),
        planned=len(plan),
        measured=len(run.measured),
        known=len(plan) - len(left),
        refused=run.refused,
        left_out=calls.left_out,
        seconds=time.monotonic() - start_s,
        samples=tuple(found[one.call] for one in plan if one.call in found),
        notes=notes,
    )


class _Run:
    """Measuring run with its results so far."""

    def __init__(self, *, store: AbstractStore, device: Device) -> None:
        self.store = store
        self.device = device
        self.measured: dict[IsolatedCall, IsolatedSample] = {}
        self.refused: dict[str, int] = {}

    def measure(
        self, wanted: Sequence[Wanted], benchmarks: DeviceBenchmarks, limit_s: float, tell: Callable[[str], None]
    ) -> None:
        """Measure the calls until the time is over, one group size after the other: each starts its own ranks."""
        until_s = time.monotonic() + limit_s
        for calls in _group_by_ranks(wanted):
            if time.monotonic() >= until_s:
                return
            with closing(benchmarks.measure(calls)) as measured:
                for call, found in measured:
                    self._keep(call, found)
                    tell(f"{call.kind} {call.role}".strip())
                    if time.monotonic() >= until_s:
                        break

    def _keep(self, call: IsolatedCall, found: Timing | Refusal) -> None:
        if isinstance(found, Refusal):
            self.refused[found.reason] = self.refused.get(found.reason, 0) + 1
            return
        sample = IsolatedSample(device=self.device.name, call=call, time_s=found.time_s, count=found.runs)
        keep_isolated(self.store, sample)
        self.measured[call] = sample


def _group_by_ranks(wanted: Sequence[Wanted]) -> list[list[IsolatedCall]]:
    """Group the calls by the ranks they need, with the group that makes up most of the candidates' steps first."""
    by_ranks: dict[int, list[Wanted]] = {}
    for one in wanted:
        by_ranks.setdefault(one.call.group_size, []).append(one)
    # Starting ranks is slow, so calls with equal numbers of ranks are measured together.
    ordered = sorted(by_ranks.values(), key=lambda some: -sum(one.share for one in some))
    return [[one.call for one in some] for some in ordered]


def _read_known(store: AbstractStore, device: Device) -> dict[IsolatedCall, IsolatedSample]:
    """Read the times that earlier calibrations of the device have stored."""
    with store.connection(METADATA) as connection:
        return {sample.call: sample for sample in read_isolated(connection) if sample.device == device.name}


def _device_of(request: StudyRequest) -> tuple[Device, DeviceType]:
    """Return the only device of the study, and its type for torch."""
    setting = request.problem.setting
    if len(setting.cluster.devices) > 1:
        raise ConfigError(
            "has several kinds of devices, and --device measures only one",
            file=request.file,
            key="cluster",
            value=setting.cluster.device_names,
            nearest="calibrate a study on hosts of one kind",
        )
    if setting.job.precision in NARROW_BYTES:
        raise ConfigError(
            "uses matrix products that --device cannot run yet",
            file=request.file,
            key="job.precision",
            value=setting.job.precision,
            nearest="--set job.precision=bf16 measures everything else",
        )
    device = setting.cluster.devices[0]
    return device, "cpu" if device.is_processor else "cuda"


def _check_torch(file: str) -> None:
    """Check that torch is installed."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "needs torch, which is not installed", file=file, key="--device", nearest="pip install 'meshtune[torch]'"
        )


def _start_benchmarks(file: str, device_type: DeviceType, stack: ExitStack) -> DeviceBenchmarks:
    """Start ranks that measure; they stop when the stack is left."""
    try:
        processes = stack.enter_context(RankProcesses(TORCH_RANKS))
    except RanksLostError as error:
        raise ConfigError(f"cannot start a process with torch: {error}", file=file, key="--device") from None
    return DeviceBenchmarks(processes=processes, device=device_type)


def _count_ranks(
    request: StudyRequest, device: Device, benchmarks: Callable[[], DeviceBenchmarks]
) -> tuple[int, tuple[str, ...]]:
    """Return the size of the largest group that can be formed here, and notes for the user."""
    if device.is_processor:
        return MOST_CPU_RANKS, _note_shared_cores(request.problem)
    found = benchmarks().accelerators()
    if not found.count:
        raise ConfigError(
            "is not in this machine: torch finds no GPU",
            file=request.file,
            key="cluster",
            value=device.name,
            nearest=f"run it on a host with {device.name}, or calibrate a study on cpu-host",
        )
    if _is_called(found.name, device):
        return found.count, ()
    return found.count, (f"torch calls this machine's GPU {found.name}; it is treated as the study's {device.name}",)


def _note_shared_cores(problem: Problem) -> tuple[str, ...]:
    cores = os.cpu_count() or 1
    ranks = min(problem.cluster.devices_per_host, MOST_CPU_RANKS)
    if ranks <= cores:
        return ()
    return (f"collectives of more than {cores} ranks share this machine's {cores} cores and are therefore slower",)


def _is_called(name: str, device: Device) -> bool:
    """Check whether the catalog resolves a GPU's own name to this device."""
    try:
        return find_device(name.removeprefix("NVIDIA ")) == device
    except ConfigError:
        return False
