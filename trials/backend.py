"""The contract of a trial: what a backend measures, what comes back, and what each outcome means for the tuner.

A backend is a frozen dataclass that says how one configuration is measured. The executor pickles it into a worker
process and calls `measure` there, once per trial; whatever `measure` raises, and whatever kills its process, reaches
the tuner as an Observation, never as an exception.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from costmodels.job.layer_change import LayerChange
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.proxy_job import Reduction
from costmodels.operators.layer_operators import OpKind, Phase
from hardware.io.errors import ConfigError
from trials.ranks.contract import AbstractRanks, RankSetup

Origin = Literal["measured", "synthetic"]
"""Whether step times were measured on real devices, or invented by a simulated world."""

Clock = Literal["wall", "virtual", "cpu"]
"""What a step time counts: the wall clock; a virtual clock, on which every rank has a core or device to itself and the
cluster's links between them; or the CPU time of all ranks together, a step's total work."""

CLOCK_WORDS: dict[Clock, str] = {"wall": "wall clock", "virtual": "virtual clock", "cpu": "CPU seconds of all ranks"}

OnStep = Callable[[float], None]
"""Hears each measured step's time [s] as it ends."""

PROGRAM_SIGNALS = frozenset({"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV"})
"""Signals by which a program's own fault ends it; the others come from outside."""

MAX_LOG_TAIL = 8_000
"""Characters of a log that an observation keeps; its end, where the reason stands."""


class Status(StrEnum):
    """How a trial ended, and what the tuner learns from it.

    A failed trial never counts as a slow one: only OK carries a step time, and only OUT_OF_MEMORY and CRASHED say
    anything against the candidate.
    """

    OK = "ok"
    """Step times were measured; they enter the surrogate."""
    OUT_OF_MEMORY = "out_of_memory"
    """The configuration does not fit: the candidate is removed."""
    TIMEOUT = "timeout"
    """Cut off at the time limit. Censored, see `Observation.censored_above_s`: the candidate stays in the model, and is
    not tried again under the same limit."""
    CRASHED = "crashed"
    """The program itself failed, with its own traceback or again and again: the candidate is removed."""
    INCIDENT = "incident"
    """The machine failed (a killed worker, a lost node), again after one retry. It says nothing about the candidate,
    is counted apart, and the candidate may be tried again."""
    PRUNED = "pruned"
    """Stopped early because it was clearly slower than the best. Its steps so far are true, but fewer than those of a
    trial that ended well, so that they give no step time."""
    CANCELLED = "cancelled"
    """Stopped because the study ended; it says nothing about the candidate."""

    @property
    def removes_candidate(self) -> bool:
        """Whether the candidate must not be tried again in this study."""
        return self in (Status.OUT_OF_MEMORY, Status.CRASHED)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSample:
    """The measured time of one operator of the trial's configuration.

    Attributes:
        kind: Which kernel model applies.
        phase: Forward or backward.
        shape: Its sizes in the order of `costmodels.operators.layer_operators.Operator.shape`.
        time_s: Time of one execution [s].
        count: Executions in one step on one pipeline, over all its stages and micro-batches.
        name: Role as in `costmodels.operators.layer_operators.Operator.name`; empty where a trace doesn't tell.
    """

    kind: OpKind
    phase: Phase
    shape: tuple[float, ...]
    time_s: float
    count: int
    name: str = ""

    def as_json(self) -> dict[str, Any]:
        """The sample as JSON types."""
        return {
            "kind": str(self.kind),
            "phase": str(self.phase),
            "shape": list(self.shape),
            "time_s": self.time_s,
            "count": self.count,
            "name": self.name,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> OperatorSample:
        """The sample that `as_json` wrote."""
        return cls(
            kind=OpKind(entry["kind"]),
            phase=Phase(entry["phase"]),
            shape=tuple(float(size) for size in entry["shape"]),
            time_s=float(entry["time_s"]),
            count=int(entry["count"]),
            name=entry["name"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What one trial found.

    Attributes:
        status: How it ended.
        step_times_s: Each measured step on `clock`, warm-up excluded [s]; of an unfinished trial what there was.
        expected_steps: Steps that the trial would have measured; None if unknown. Told of a trial that was stopped.
        elapsed_s: Wall clock of the trial in its worker, start-up and warm-up included [s]; None if unknown.
        measured_after_s: Of this, what had passed when the first measured step began; where steps are not told by the
            wall clock, when it ended [s]. None if there was none, or nobody knows.
        lost_s: Wall clock of earlier attempts at the trial, whose worker or ranks died [s].
        time_limit_s: The limit at which it was cut off [s]; None unless it was.
        peak_memory_bytes: Peak device memory of the fullest rank; None if unknown.
        operator_samples: Operator times, if the backend measures them.
        log_tail: The end of the trial's log or traceback, at most MAX_LOG_TAIL characters.
        reason: One sentence on why it ended so, or what was unusual; empty if there is nothing to say.
        killed_by: The signal that killed a process of the trial, as `SIGSEGV`; empty if none did, or nobody knows.
        origin: Where the times come from.
        clock: What the step times count.
        conditions: Numbers that say under which conditions they were measured, and what the trial took besides:
            `ranks`, `cores`, `others_cpu_share`, `group_s`, ...
    """

    status: Status
    step_times_s: tuple[float, ...] = ()
    expected_steps: int | None = None
    elapsed_s: float | None = None
    measured_after_s: float | None = None
    lost_s: float = 0.0
    time_limit_s: float | None = None
    peak_memory_bytes: int | None = None
    operator_samples: tuple[OperatorSample, ...] = ()
    log_tail: str = ""
    reason: str = ""
    killed_by: str = ""
    origin: Origin = "measured"
    clock: Clock = "wall"
    conditions: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        assert self.step_times_s or self.status is not Status.OK, "a trial that ended well has measured a step"
        assert all(0 < seconds < math.inf for seconds in self.step_times_s), f"step times {self.step_times_s}"
        assert len(self.log_tail) <= MAX_LOG_TAIL, "cut the log with `tail_of` first"

    @property
    def step_time_s(self) -> float | None:
        """Median of the measured steps; None unless the trial ended well."""
        return statistics.median(self.step_times_s) if self.status is Status.OK else None

    @property
    def saved_s(self) -> float:
        """Seconds of steps that stopping early has saved: those not measured, at the median of those that were."""
        if self.status is not Status.PRUNED or self.expected_steps is None or not self.step_times_s:
            return 0.0
        return max(self.expected_steps - len(self.step_times_s), 0) * statistics.median(self.step_times_s)

    @property
    def startup_s(self) -> float | None:
        """What the trial took besides its measured steps: start-up and warm-up; None unless it ended well."""
        if self.status is not Status.OK or self.elapsed_s is None:
            return None
        return max(self.elapsed_s - sum(self.step_times_s), 0.0)

    def censored_above_s(self, startup_s: float) -> float | None:
        """What a step of this trial took at least, where its limit came before the first measured step ended.

        Steps that ended before the limit are measurements, and better than any bound: None with one of them, as for
        every trial that was not cut off. Without any, all that is known is that start-up, warm-up and one step together
        took longer than the limit.

        Args:
            startup_s: What trials of this study take for start-up and warm-up, for example the median `startup_s`.
        """
        if self.status is not Status.TIMEOUT or self.time_limit_s is None or self.step_times_s:
            return None
        bound_s = self.time_limit_s - startup_s
        return bound_s if bound_s > 0 else None

    def as_json(self) -> dict[str, Any]:
        """The observation as JSON types; `from_json` gives an equal one back."""
        return {
            "status": str(self.status),
            "step_times_s": list(self.step_times_s),
            "expected_steps": self.expected_steps,
            "elapsed_s": self.elapsed_s,
            "measured_after_s": self.measured_after_s,
            "lost_s": self.lost_s,
            "time_limit_s": self.time_limit_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "operator_samples": [sample.as_json() for sample in self.operator_samples],
            "log_tail": self.log_tail,
            "reason": self.reason,
            "killed_by": self.killed_by,
            "origin": self.origin,
            "clock": self.clock,
            "conditions": dict(self.conditions),
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Observation:
        """The observation that `as_json` wrote, now or before it knew of limits, signals and lost attempts."""
        return cls(
            status=Status(entry["status"]),
            step_times_s=tuple(float(seconds) for seconds in entry["step_times_s"]),
            expected_steps=entry.get("expected_steps"),
            elapsed_s=entry.get("elapsed_s"),
            measured_after_s=entry.get("measured_after_s"),
            lost_s=entry.get("lost_s", 0.0),
            time_limit_s=entry.get("time_limit_s"),
            peak_memory_bytes=entry["peak_memory_bytes"],
            operator_samples=tuple(OperatorSample.from_json(sample) for sample in entry["operator_samples"]),
            log_tail=entry["log_tail"],
            reason=entry["reason"],
            killed_by=entry.get("killed_by", ""),
            origin=entry["origin"],
            clock=entry.get("clock", "wall"),
            conditions=tuple(entry.get("conditions", {}).items()),
        )


def tail_of(log: str) -> str:
    """The end of `log` that an observation may keep."""
    return log if len(log) <= MAX_LOG_TAIL else f"...{log[3 - MAX_LOG_TAIL :]}"


def ignore_step(step_time_s: float) -> None:
    """Do nothing; for callers that wait for the end of a trial and don't follow its steps."""


def check_seconds_per_trial(seconds: float) -> None:
    """Check the wall time that a replayed or simulated trial pretends to take.

    Raises:
        ConfigError: It is negative, or longer than a day.
    """
    if not 0 <= seconds <= 86_400:
        raise ConfigError("must be from 0 to 86400 seconds", key="seconds_per_trial", value=seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNeeds:
    """What a trial occupies on one host.

    Attributes:
        cpus: Cores.
        gpus: GPUs.
        processes: Ranks that the trial has here at most; None for one per GPU, or per core where there are no GPUs.
    """

    cpus: int = 1
    gpus: int = 0
    processes: int | None = None

    @property
    def num_ranks(self) -> int:
        """The ranks of a trial that has the host to itself."""
        return self.processes or self.gpus or self.cpus


class AbstractBackend(ABC):
    """Measures configurations.

    Concrete backends are frozen dataclasses that pickle. For one trial the executor calls `measure` in a worker
    process, possibly a second time in a fresh one if the first dies; several workers may measure at once.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def origin(self) -> Origin:
        """Where the step times of this backend come from."""

    @property
    def clock(self) -> Clock:
        """What the step times of this backend count."""
        return "wall"

    @property
    def source_in_words(self) -> str:
        """Where the step times come from and, unless it is the wall clock, what they count."""
        return self.origin if self.clock == "wall" else f"{self.origin}, {CLOCK_WORDS[self.clock]}"

    @property
    def trains(self) -> bool:
        """Whether a trial trains for real, so that a second one of the same configuration tells more."""
        return False

    @property
    def hosts(self) -> tuple[HostNeeds, ...]:
        """What a trial occupies, host by host; a trial gets all of it or does not run."""
        return (HostNeeds(),)

    @property
    def wants_hosts_alone(self) -> bool:
        """Whether a second trial on its hosts would slow a trial down, by the adapters and buses that they share."""
        return False

    @property
    def rank_setup(self) -> RankSetup:
        """What the processes of a trial find ready, where there are any."""
        return RankSetup()

    def check(self) -> None:  # noqa: B027 # most backends need nothing
        """Looks whether trials can run at all, before the first one.

        Raises:
            ConfigError: they cannot.
        """

    def opened(self, ranks: AbstractRanks) -> AbstractBackend:  # noqa: ARG002 # most backends start no processes
        """This backend with all that it keeps warm between trials; asked for once in every worker.

        Args:
            ranks: Starts processes on the hosts of a trial; not started itself.
        """
        return self

    @abstractmethod
    def expected_steps(self, config: ParallelConfig) -> int | None:
        """Steps that a trial of `config` measures if nobody stops it; None if the backend can't tell beforehand."""

    @abstractmethod
    def reduced(self, to: Reduction) -> AbstractBackend | None:
        """The backend of a smaller job on fewer hosts, otherwise the same; None if it can measure its own job only."""

    def with_layer_changes(
        self,
        changes: tuple[LayerChange, ...],  # noqa: ARG002 # most backends shard by hand
    ) -> AbstractBackend | None:
        """Return this backend with layers sharded by other plans; None if its trials shard layers as Megatron does.

        Args:
            changes: Changes of the cost model's layers that the plans make.
        """
        return None

    def candidates(self, opened: tuple[str, ...]) -> ConfigGrid | None:  # noqa: ARG002 # most backends measure all
        """Return the only configurations that this backend can measure; None if it can measure any valid one.

        Args:
            opened: Names of the further dimensions that the study searches.

        Raises:
            ConfigError: The configurations differ in a dimension that the study does not search.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """Return what gives trials their meaning besides the study's keys, as JSON, for example resolved defaults."""
        return {}

    def kept_logs(self) -> dict[int, tuple[Path, ...]]:
        """Return the whole logs of trials that this machine keeps, in the order of hosts, by the trial's number."""
        return {}

    @abstractmethod
    def measure(self, config: ParallelConfig, *, trial_number: int, on_step: OnStep = ignore_step) -> Observation:
        """Runs one trial and says how it ended.

        It prints nothing: standard output belongs to the command's result. Failures that the backend understands come
        back as an Observation with their status; anything it raises becomes `crashed` with the traceback. A trial that
        is clearly slower than the best is killed with its process after some of its steps; so is one that takes too
        long. What was reported till then is kept.

        Args:
            config: A valid configuration of the study's job on its cluster.
            trial_number: The study's number of this trial, for file names and logs.
            on_step: Called with the time of each measured step when it has ended, in the order of the observation's
                `step_times_s`; it returns at once.
        """
