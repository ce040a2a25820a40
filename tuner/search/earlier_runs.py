"""Past: runs and operator times of earlier studies and of published sweeps, in one form."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from costmodels.calibration.fitting import TimedRun
from costmodels.calibration.sources import NO_FACTS, MeasuredSetting
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.isolated import LoneCall
from costmodels.operators.layer_operators import OpKind, Phase
from costmodels.step.memory import MemoryMeaning, WhichStage
from hardware.cluster import Cluster
from trials.backend import Clock, Observation, OperatorSample, Origin, Status

Fact = tuple[str, Any]
"""A field of a RuntimeProfile that says what the runtime does, and its value."""

SYNTHETIC = "of a simulated world, which say nothing of real devices"


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """One run that has ended, in whatever way.

    Attributes:
        group: What it shares with the runs of the same job on the same cluster.
        job: What it trained.
        cluster: Where.
        runtime: Name of its runtime's profile.
        facts: What is known to have been otherwise than that profile says, or all that the runtime did.
        config: Its configuration.
        status: How it ended.
        step_time_s: Median of its measured steps; None unless it ended well and published one.
        log_spread: Standard deviation of the logarithm of its steps; 0 with one step or where it is unknown.
        num_steps: Steps that were measured.
        peak_memory_bytes: Its peak of memory, where known.
        memory: What that peak counts.
        stage: Of which pipeline stage.
        origin: Where its times come from.
        clock: What its step time counts.
        is_clean: Whether its source holds its time to be what the configuration explains, and no outlier.
    """

    group: str
    job: TrainingJob
    cluster: Cluster
    runtime: str
    facts: tuple[Fact, ...]
    config: ParallelConfig
    status: Status
    step_time_s: float | None
    log_spread: float
    num_steps: int
    peak_memory_bytes: int | None
    memory: MemoryMeaning = "reserved"
    stage: WhichStage = "fullest"
    origin: Origin
    clock: Clock = "wall"
    is_clean: bool = True

    def measured_setting(self, profile: RuntimeProfile) -> MeasuredSetting:
        """What predicts the run with the constants of `profile`: the facts stay the run's own."""
        return MeasuredSetting(
            setting=Setting(job=self.job, cluster=self.cluster, runtime=replace(profile, **dict(self.facts))),
            memory=self.memory,
            stage=self.stage,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PastSample:
    """The time of one operator in an earlier trial.

    Attributes:
        group: As in PastRun.
        device: Name of the device; those of unlike hosts are joined by ` + `.
        runtime: Name of the runtime's profile.
        precision: Of the job.
        origin: Where the time comes from.
        kind: Which kernel model applies.
        phase: Forward or backward.
        shape: Its sizes in the order of `costmodels.operators.layer_operators.Operator.shape`.
        time_s: Time of one execution [s].
        count: Executions in one step.
        name: Its role; empty where a trace didn't tell.
    """

    group: str
    device: str
    runtime: str
    precision: str
    origin: Origin
    kind: OpKind
    phase: Phase
    shape: tuple[float, ...]
    time_s: float
    count: int
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoneSample:
    """The time of one operator or collective outside of any training step.

    Attributes:
        device: Name of the device.
        call: What ran.
        time_s: Median time of one execution [s].
        count: How often it ran.
    """

    device: str
    call: LoneCall
    time_s: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """All that the entries of `history:` hold.

    Attributes:
        runs: The runs, entry by entry.
        samples: Their operator times.
        alone: Operator times that calibrations measured; the last one of each call.
        skipped: What was left out, by reason.
        warnings: What a user should know.
    """

    runs: tuple[PastRun, ...] = ()
    samples: tuple[PastSample, ...] = ()
    alone: tuple[LoneSample, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def in_words(self) -> str:
        """One line on how much there is; empty where there was nothing to read."""
        if not self.runs and not self.skipped and not self.alone:
            return ""
        read = f"history: {len(self.runs):,} runs and {len(self.samples):,} operator times"
        read += f", and {len(self.alone):,} of a calibration" if self.alone else ""
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.items())
        return f"{read}; left out: {left_out}" if left_out else read

    @property
    def measured(self) -> Past:
        """The same without what simulated worlds invented, with a warning if that leaves something out."""
        runs = tuple(run for run in self.runs if run.origin == "measured")
        num_left_out = len(self.runs) - len(runs)
        if not num_left_out:
            return self
        return replace(
            self,
            runs=runs,
            samples=tuple(sample for sample in self.samples if sample.origin == "measured"),
            skipped={**self.skipped, f"runs {SYNTHETIC}": num_left_out},
            warnings=(*self.warnings, f"{num_left_out:,} runs of the history are left out: they are {SYNTHETIC}"),
        )

    def on_clock(self, clock: Clock) -> Past:
        """The same without runs whose step times count something else: seconds of two clocks do not compare.

        What operators took is the same on all of them.
        """
        runs = tuple(run for run in self.runs if run.clock == clock)
        if len(runs) == len(self.runs):
            return self
        return replace(self, runs=runs, skipped={**self.skipped, "runs by another clock": len(self.runs) - len(runs)})

    def without_groups(self, groups: Collection[str], reason: str) -> Past:
        """The same without the runs of those groups; `reason` says why."""
        runs = tuple(run for run in self.runs if run.group not in groups)
        if len(runs) == len(self.runs):
            return self
        samples = tuple(sample for sample in self.samples if sample.group not in groups)
        return replace(self, runs=runs, samples=samples, skipped={**self.skipped, reason: len(self.runs) - len(runs)})

    def timed(self, profile: RuntimeProfile) -> tuple[TimedRun, ...]:
        """The clean, timed runs of that runtime, as `costmodels.calibration.fitting.calibrate_timed` takes them."""
        return tuple(
            TimedRun(
                group=run.group,
                source=run.group,
                measured=run.measured_setting(profile),
                config=run.config,
                step_time_s=run.step_time_s,
            )
            for run in self.runs
            if run.runtime == profile.name and run.is_clean and run.step_time_s is not None
        )


def together(parts: Iterable[Past]) -> Past:
    """All parts as one."""
    kept = list(parts)
    skipped = sum((Counter(part.skipped) for part in kept), Counter[str]())
    return Past(
        runs=tuple(run for part in kept for run in part.runs),
        samples=tuple(sample for part in kept for sample in part.samples),
        alone=tuple({(sample.device, sample.call): sample for part in kept for sample in part.alone}.values()),
        skipped=dict(skipped),
        warnings=tuple(warning for part in kept for warning in part.warnings),
    )


def facts_of_profile(runtime: Mapping[str, Any]) -> tuple[Fact, ...]:
    """What a profile, as a mapping of its fields, says that its runtime does; fields of other versions are left out."""
    known = [field.name for field in fields(RuntimeProfile) if field.name not in NO_FACTS]
    values = [(name, runtime[name]) for name in known if name in runtime]
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in values)


def log_spread(step_times_s: Sequence[float]) -> float:
    """Standard deviation of the logarithm of the steps; 0 for fewer than two."""
    return statistics.stdev(map(math.log, step_times_s)) if len(step_times_s) > 1 else 0.0


def timed_samples(observation: Observation) -> list[OperatorSample]:
    """The operator times of a trial that are times at all: a profiler that misses an operator may say 0 or nan."""
    return [sample for sample in observation.operator_samples if 0 < sample.time_s < math.inf]
