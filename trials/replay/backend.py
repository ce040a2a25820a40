"""Backend that replays published measurements as trials: a sweep that somebody ran takes the place of the cluster."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from costmodels.calibration.measured_runs import MeasuredGroup, MeasuredRun, varying_dimensions
from costmodels.job.parallel_config import (
    DEGREES,
    ENUMERATED_DIMENSIONS,
    FURTHER_DIMENSIONS,
    ConfigGrid,
    ParallelConfig,
    Value,
)
from hardware.io.errors import ConfigError
from trials.backend import (
    AbstractBackend,
    Observation,
    OnStart,
    OnStep,
    Origin,
    Status,
    check_seconds_per_trial,
    ignore_start,
    ignore_step,
    tail_of,
)

_OUT_OF_MEMORY = re.compile(r"FAILED\W*(oom|out[ _-]of[ _-]memory)\b(?!.*(not distinguished|\bor\b))", re.I | re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayBackend(AbstractBackend):
    """Backend that answers a trial with the published runs of its configuration.

    Attributes:
        group: Measured runs of one job on one cluster, timed and failed.
        seconds_per_trial: Wall time that each trial takes [s], to rehearse a sweep at its real pace; 0 answers at once.
    """

    group: MeasuredGroup
    seconds_per_trial: float = 0.0

    def __post_init__(self) -> None:
        """Check the wall time of a trial."""
        check_seconds_per_trial(self.seconds_per_trial)

    @property
    def trial_in_words(self) -> str:
        """Sentence on what a trial is."""
        return "A trial of this study starts no program: it reads a measured run from the rows of the study."

    @property
    def origin(self) -> Origin:
        """Origin of the step times: published runs were measured."""
        return "measured"

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of the dimensions that tell the configurations apart: degrees, and further ones that differ."""
        return DEGREES + varying_dimensions(self.group.runs)

    def candidates(self, opened: tuple[str, ...]) -> ConfigGrid:
        """Return the distinct configurations that were run, timed or failed, in file order.

        Raises:
            ConfigError: Runs with equal degrees differ in a further dimension that is not opened.
        """
        for name in self.dimensions:
            if name not in DEGREES + opened:
                values = sorted({str(getattr(run.config, name)) for run in self.group.runs})
                raise ConfigError(
                    f"must be searched, because measured runs with equal degrees differ in it ({', '.join(values)})",
                    key=f"space.{name}",
                    nearest=f"search `{name}`, or choose one value of its column in `where`",
                )
        distinct = {_key(run.config, DEGREES + opened): run.config for run in reversed(self.group.runs)}
        in_file_order = dict.fromkeys(_key(run.config, DEGREES + opened) for run in self.group.runs)
        return ConfigGrid.from_configs([distinct[key] for key in in_file_order], opened)

    def describe(self) -> dict[str, Any]:
        """Return a digest of the rows; a resumed study must replay the same ones."""
        rows = [[*_identifying_values(run.config), run.step_time_s] for run in self.group.runs]
        digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        return {"rows": f"{len(rows)} rows, sha256 {digest[:16]}"}

    def expected_steps(self, config: ParallelConfig) -> int | None:
        """Return the number of timed runs of `config`; 0 if all of them failed.

        Raises:
            ConfigError: Nobody ran this configuration.
        """
        return sum(run.step_time_s is not None for run in self._runs(config))

    def measure(
        self,
        config: ParallelConfig,
        *,
        trial_number: int,  # noqa: ARG002 # the contract's
        on_step: OnStep = ignore_step,
        on_start: OnStart = ignore_start,  # noqa: ARG002 # no trial waits
    ) -> Observation:
        """Return the runs of `config` as an observation.

        Each timed run is a measured step. If all runs failed, so does the trial. The wait is spread over the steps.

        Raises:
            ConfigError: Nobody ran this configuration.
        """
        observation = _observe(self._runs(config))
        wait_s = self.seconds_per_trial / max(len(observation.step_times_s), 1)
        for step_time_s in observation.step_times_s:
            time.sleep(wait_s)
            on_step(step_time_s)
        if not observation.step_times_s:
            time.sleep(wait_s)
        return observation

    def _runs(self, config: ParallelConfig) -> list[MeasuredRun]:
        """Return the runs of `config` in file order."""
        dimensions = self.dimensions
        key = _key(config, dimensions)
        runs = [run for run in self.group.runs if _key(run.config, dimensions) == key]
        if not runs:
            raise ConfigError(
                f"is none of the {len(self.candidates(dimensions[len(DEGREES) :]))} measured configurations",
                key="config",
                value=str(config),
                nearest=f"nearest: {self._nearest(config)}",
            )
        return runs

    def _nearest(self, config: ParallelConfig) -> ParallelConfig:
        """Return the measured configuration that differs in the fewest dimensions."""
        dimensions = self.dimensions
        wanted = _key(config, dimensions)

        def num_differences(run: MeasuredRun) -> int:
            return sum(a != b for a, b in zip(wanted, _key(run.config, dimensions), strict=True))

        return min(self.group.runs, key=num_differences).config


def _identifying_values(config: ParallelConfig) -> tuple[Value, ...]:
    """Return the values that identify a configuration; an even assignment of work needs no value."""
    return _key(config, DEGREES + (FURTHER_DIMENSIONS if config.assignment else ENUMERATED_DIMENSIONS))


def _key(config: ParallelConfig, dimensions: tuple[str, ...]) -> tuple[Value, ...]:
    return tuple(config.values(dimensions).values())


def _observe(runs: list[MeasuredRun]) -> Observation:
    log_tail = tail_of("\n".join(f"{run.place}: {run.notes}" for run in runs))
    timed = [run for run in runs if run.step_time_s is not None]
    if not timed:
        reason = runs[0].notes or "the source gives no result for this run"
        return Observation(status=failure_of(runs), reason=reason, log_tail=log_tail)
    memory = [run.peak_memory_bytes for run in timed if run.peak_memory_bytes is not None]
    failed = len(runs) - len(timed)
    return Observation(
        status=Status.OK,
        step_times_s=tuple(run.step_time_s for run in timed if run.step_time_s is not None),
        peak_memory_bytes=max(memory, default=None),
        reason=f"{failed} of {len(runs)} measured runs failed" if failed else "",
        log_tail=log_tail,
    )


def failure_of(runs: Sequence[MeasuredRun]) -> Status:
    """Return the status of a configuration whose runs all failed.

    It is out of memory only if every note says so and nothing else, because sources often don't tell it from a crash.
    """
    is_memory = all(_OUT_OF_MEMORY.match(run.notes) for run in runs)
    return Status.OUT_OF_MEMORY if is_memory else Status.CRASHED
