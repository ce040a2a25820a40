"""Runs and operator times of earlier studies and of published sweeps, in one form."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from costmodels.blocks.operator import OpKind, Phase
from costmodels.calibration.fitting import TimedRun
from costmodels.calibration.sources import NO_FACTS, MeasuredSetting
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.isolated import IsolatedCall
from costmodels.step.memory.peak import MemoryMeaning, WhichStage
from hardware.cluster import Cluster
from trials.backend import Clock, Origin, Status

Fact = tuple[str, Any]
"""Field of a RuntimeProfile that says what the runtime does, and its value."""

SYNTHETIC = "of a simulated world, which say nothing of real devices"


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """One run that has ended, in whatever way.

    Attributes:
        group: Key that it shares with the runs of the same job on the same cluster.
        job: Training job of the run.
        cluster: Cluster of the run.
        runtime: Name of its runtime's profile.
        facts: Known differences from that profile, or all that the runtime did.
        config: Configuration of the run.
        status: Status at its end.
        step_time_s: Median of its measured steps [s]; None unless it ended well and published one.
        log_spread: Standard deviation of the logarithm of its steps; 0 with one step or where it is unknown.
        num_steps: Number of measured steps.
        peak_memory_bytes: Peak of its memory, where known [bytes].
        memory: Meaning of that peak.
        stage: Pipeline stage of that peak.
        origin: Origin of its times.
        clock: Clock that counts its step time.
        is_clean: Whether its source takes its time to be explained by the configuration, and no outlier.
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
        """Return the setting that predicts the run with the constants of `profile`; the facts stay the run's own."""
        return MeasuredSetting(
            setting=Setting(job=self.job, cluster=self.cluster, runtime=replace(profile, **dict(self.facts))),
            memory=self.memory,
            stage=self.stage,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PastSample:
    """Time of one operator in an earlier trial.

    Attributes:
        group: Key of the job on its cluster, as in PastRun.
        device: Name of the device; those of unlike hosts are joined by ` + `.
        runtime: Name of the runtime's profile.
        precision: Precision of the job.
        origin: Origin of the time.
        kind: Kind of operator, which names its kernel model.
        phase: Forward or backward pass.
        shape: Sizes in the order of `costmodels.operators.layer_operators.Operator.shape`.
        time_s: Time of one execution [s].
        count: Number of executions in one step.
        name: Role of the operator; empty where a trace didn't tell.
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
class IsolatedSample:
    """Time of one operator or collective outside of any training step.

    Attributes:
        device: Name of the device.
        call: Operator or collective that ran.
        time_s: Median time of one execution [s].
        count: Number of executions.
    """

    device: str
    call: IsolatedCall
    time_s: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """All that the entries of `history:` hold.

    Attributes:
        runs: Earlier runs, entry by entry.
        samples: Operator times of the runs.
        alone: Operator times that calibrations measured; the last one of each call.
        skipped: Numbers of runs that were left out, by reason.
        warnings: Sentences that a user should know.
    """

    runs: tuple[PastRun, ...] = ()
    samples: tuple[PastSample, ...] = ()
    alone: tuple[IsolatedSample, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def in_words(self) -> str:
        """One line on the size of the history; empty where there was nothing to read."""
        if not self.runs and not self.skipped and not self.alone:
            return ""
        read = f"history: {len(self.runs):,} runs and {len(self.samples):,} operator times"
        read += f", and {len(self.alone):,} of a calibration" if self.alone else ""
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.items())
        return f"{read}; left out: {left_out}" if left_out else read

    @property
    def measured(self) -> Past:
        """History without the runs of simulated worlds, with a warning if that leaves something out."""
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
        """Return the history without runs whose step times count another clock: seconds of two clocks do not compare.

        Operator times are equal on all clocks.
        """
        runs = tuple(run for run in self.runs if run.clock == clock)
        if len(runs) == len(self.runs):
            return self
        return replace(self, runs=runs, skipped={**self.skipped, "runs by another clock": len(self.runs) - len(runs)})

    def without_groups(self, groups: Collection[str], reason: str) -> Past:
        """Return the history without the runs of those groups; `reason` says why."""
        runs = tuple(run for run in self.runs if run.group not in groups)
        if len(runs) == len(self.runs):
            return self
        samples = tuple(sample for sample in self.samples if sample.group not in groups)
        return replace(self, runs=runs, samples=samples, skipped={**self.skipped, reason: len(self.runs) - len(runs)})

    def timed(self, profile: RuntimeProfile) -> tuple[TimedRun, ...]:
        """Return the clean, timed runs of that runtime, in the form of `costmodels.calibration.fitting`."""
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
    """Return all parts as one history."""
    kept = list(parts)
    skipped = sum((Counter(part.skipped) for part in kept), Counter[str]())
    return Past(
        runs=tuple(run for part in kept for run in part.runs),
        samples=tuple(sample for part in kept for sample in part.samples),
        alone=tuple({(sample.device, sample.call): sample for part in kept for sample in part.alone}.values()),
        skipped=dict(skipped),
        warnings=tuple(warning for part in kept for warning in part.warnings),
    )


def facts_of(setting: Setting) -> tuple[Fact, ...]:
    """Return the facts of a setting's runtime, without that on documents where all sequences fill their rows."""
    facts = facts_of_profile(asdict(setting.runtime))
    return tuple(fact for fact in facts if fact[0] != "splits_documents" or setting.job.sequences is not None)


def facts_of_profile(runtime: Mapping[str, Any]) -> tuple[Fact, ...]:
    """Return the fields of a profile that say what its runtime does; leave out fields of other versions.

    A fact that an earlier version did not know has the value that it assumed.
    """
    runtime = {**RuntimeProfile.later_fields(), **runtime}
    known = [field.name for field in fields(RuntimeProfile) if field.name not in NO_FACTS]
    values = [(name, runtime[name]) for name in known if name in runtime]
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in values)


def log_spread(step_times_s: Sequence[float]) -> float:
    """Return the standard deviation of the logarithm of the steps; 0 for fewer than two."""
    return statistics.stdev(map(math.log, step_times_s)) if len(step_times_s) > 1 else 0.0
