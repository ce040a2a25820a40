"""Contract of a trial: the backend that measures a configuration, and the observation that comes back.

A backend is a frozen dataclass that describes how one configuration is measured. The executor pickles it into a worker
process and calls `measure` there, once per trial. An exception in `measure`, or the death of its process, reaches the
tuner as an Observation, never as an exception.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.layer_change import LayerChange
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.proxy_job import Reduction
from hardware.io.errors import ConfigError
from trials.ranks.contract import AbstractRanks, RankSetup
from trials.started import Started

Origin = Literal["measured", "synthetic"]
"""Origin of step times: measured on real devices, or computed by a simulated world."""

Clock = Literal["wall", "virtual", "cpu"]
"""Clock of a step time: the wall clock; a virtual clock, on which every rank has a core or device to itself and the
cluster's links between them; or the CPU time of all ranks together, which is a step's total work."""

CLOCK_WORDS: dict[Clock, str] = {"wall": "wall clock", "virtual": "virtual clock", "cpu": "CPU seconds of all ranks"}

OnStep = Callable[[float], None]
"""Callback that is given the time of each measured step [s] as it ends."""

OnStart = Callable[[], None]
"""Callback that is told once when a trial that waited in a queue has got its devices."""

PROGRAM_SIGNALS = frozenset({"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV"})
"""Signals that a program's own fault raises; all other signals come from outside."""

MAX_LOSSES = 500
"""Number of losses that an observation keeps."""

MAX_LOG_TAIL = 8_000
"""Number of characters that an observation keeps of a log. It keeps the end, which states the reason."""


class Status(StrEnum):
    """Outcome of a trial, which decides what the tuner learns from it.

    A failed trial never counts as a slow one: only OK carries a step time, and only OUT_OF_MEMORY and CRASHED speak
    against the candidate.
    """

    OK = "ok"
    """The trial measured its steps, which enter the surrogate."""
    OUT_OF_MEMORY = "out_of_memory"
    """The configuration does not fit: the candidate is removed."""
    TIMEOUT = "timeout"
    """The trial was cut off at the time limit. It is a censored observation, see `Observation.censored_above_s`: the
    candidate stays in the model, and is not tried again under the same limit."""
    CRASHED = "crashed"
    """The program itself failed, with its own traceback or again and again: the candidate is removed."""
    INCIDENT = "incident"
    """The machine failed (a killed worker, a lost node) or the queue refused the job, again after one retry. This says
    nothing about the candidate, which may be tried again. Incidents are counted separately."""
    PRUNED = "pruned"
    """The trial was stopped early because it was clearly slower than the best. Its steps are valid measurements, but
    they are too few for a step time."""
    CANCELLED = "cancelled"
    """The trial was stopped because the study ended. This says nothing about the candidate."""

    @property
    def in_words(self) -> str:
        """Status in a sentence."""
        return self.value.replace("_", " ")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSample:
    """Measured time of one operator of the trial's configuration.

    Attributes:
        kind: Kind of operator, which selects the kernel model.
        phase: Phase of the step: forward or backward.
        shape: Sizes of the operator [d], in the order of `costmodels.operators.layer_operators.Operator.shape`.
        time_s: Time of one execution [s].
        count: Executions in one step on one pipeline, over all its stages and micro-batches.
        name: Role as in `costmodels.operators.layer_operators.Operator.name`; empty if the trace doesn't tell.
    """

    kind: OpKind
    phase: Phase
    shape: tuple[float, ...]
    time_s: float
    count: int
    name: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the sample as JSON types."""
        return asdict(self) | {"kind": str(self.kind), "phase": str(self.phase), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> OperatorSample:
        """Return the sample that `as_json` wrote."""
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
    """Result of one trial.

    Attributes:
        status: Outcome of the trial.
        step_times_s: Time of each measured step on `clock`, warm-up excluded [s]. An unfinished trial has the steps
            that it had measured.
        expected_steps: Number of steps that a stopped trial would have measured; None if unknown.
        elapsed_s: Wall clock of the trial in its worker, start-up and warm-up included [s]; None if unknown.
        measured_after_s: Part of `elapsed_s` before the first measured step began [s]. If steps are not timed by the
            wall clock, it is the part before that step ended. None if no step was measured, or if unknown.
        lost_s: Wall clock of earlier attempts at the trial, whose worker or ranks died [s].
        time_limit_s: Limit at which the trial was cut off [s]; None unless it was.
        peak_memory_bytes: Peak device memory of the fullest rank [bytes]; None if unknown.
        operator_samples: Times of operators, if the backend measures them.
        log_tail: End of the trial's log or traceback, at most MAX_LOG_TAIL characters.
        reason: One sentence on the cause of the outcome or on something unusual; empty if there is nothing to say.
        killed_by: Signal that killed a process of the trial, for example `SIGSEGV`; empty if none did, or if unknown.
        origin: Origin of the step times: measured or synthetic.
        clock: Clock of the step times.
        taken_from: Source of a measurement that no trial made, such as the user's log; empty for trials.
        conditions: Numbers on the conditions of the measurement and on further costs of the trial, by name: `ranks`,
            `cores`, `others_cpu_share`, `group_s`, ...
        losses: Steps of the training that the trial has brought forward, each with its loss as the log tells it; at
            most MAX_LOSSES of them. Empty outside of a training that goes on.
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
    taken_from: str = ""
    conditions: tuple[tuple[str, float], ...] = ()
    losses: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        assert self.step_times_s or self.status is not Status.OK, "a trial that ended well has measured a step"
        assert all(0 < seconds < math.inf for seconds in self.step_times_s), f"step times {self.step_times_s}"
        assert len(self.log_tail) <= MAX_LOG_TAIL, "cut the log with `tail_of` first"
        assert len(self.losses) <= MAX_LOSSES, "thin the losses first"

    @property
    def step_time_s(self) -> float | None:
        """Median time of the measured steps [s]; None unless the trial ended well."""
        return self.median_s if self.status is Status.OK else None

    @property
    def median_s(self) -> float | None:
        """Median time of the measured steps [s], however the trial ended; None without any."""
        return statistics.median(self.step_times_s) if self.step_times_s else None

    @property
    def timed_samples(self) -> tuple[OperatorSample, ...]:
        """Operator times above 0; a profiler that misses an operator may say 0 or nan."""
        return tuple(sample for sample in self.operator_samples if 0 < sample.time_s < math.inf)

    @property
    def saved_s(self) -> float:
        """Time that stopping early has saved [s]: the steps not measured, at the median of those that were."""
        if self.status is not Status.PRUNED or self.expected_steps is None or not self.step_times_s:
            return 0.0
        return max(self.expected_steps - len(self.step_times_s), 0) * statistics.median(self.step_times_s)

    @property
    def startup_s(self) -> float | None:
        """Time of the trial's start-up and warm-up [s]; None unless it ended well."""
        if self.status is not Status.OK or self.elapsed_s is None:
            return None
        return max(self.elapsed_s - sum(self.step_times_s), 0.0)

    def censored_above_s(self, startup_s: float) -> float | None:
        """Return a lower bound on the step time [s], if the time limit came before the first measured step ended.

        Steps that ended before the limit are measurements, which are better than any bound: then the result is None, as
        for every trial that was not cut off. Otherwise start-up, warm-up and one step together took longer than the
        limit. Start-up and warm-up take `startup_s` in this study [s], for example the median.
        """
        if self.status is not Status.TIMEOUT or self.time_limit_s is None or self.step_times_s:
            return None
        bound_s = self.time_limit_s - startup_s
        return bound_s if bound_s > 0 else None

    def as_json(self) -> dict[str, Any]:
        """Return the observation as JSON types; `from_json` gives an equal one back."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {
            "status": str(self.status),
            "step_times_s": list(self.step_times_s),
            "operator_samples": [sample.as_json() for sample in self.operator_samples],
            "conditions": dict(self.conditions),
            "losses": [list(each) for each in self.losses],
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Observation:
        """Return the observation that `as_json` wrote, also in versions without limits, signals and lost attempts."""
        return cls(
            **{field.name: entry[field.name] for field in fields(cls) if field.name in entry}
            | {
                "status": Status(entry["status"]),
                "step_times_s": tuple(float(seconds) for seconds in entry["step_times_s"]),
                "operator_samples": tuple(OperatorSample.from_json(sample) for sample in entry["operator_samples"]),
                "conditions": tuple(entry.get("conditions", {}).items()),
                "losses": tuple((int(step), float(loss)) for step, loss in entry.get("losses", ())),
            }
        )


def tail_of(log: str) -> str:
    """Return the end of `log`, cut to the length that an observation may keep."""
    return log if len(log) <= MAX_LOG_TAIL else f"...{log[3 - MAX_LOG_TAIL :]}"


def ignore_step(step_time_s: float) -> None:
    """Do nothing; for callers that wait for the end of a trial and don't follow its steps."""


def ignore_start() -> None:
    """Do nothing; for callers that do not ask how long a trial waits in a queue."""


def check_seconds_per_trial(seconds: float) -> None:
    """Check the wall time that a replayed or simulated trial pretends to take.

    Raises:
        ConfigError: It is negative, or longer than a day.
    """
    if not 0 <= seconds <= 86_400:
        raise ConfigError("must be from 0 to 86400 seconds", key="seconds_per_trial", value=seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNeeds:
    """Resources that a trial occupies on one host.

    Attributes:
        cpus: Number of cores of the host.
        gpus: Number of GPUs of the host.
        processes: Largest number of ranks on the host; None for one per GPU, or per core if there are no GPUs.
    """

    cpus: int = 1
    gpus: int = 0
    processes: int | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks of a trial that has the host to itself."""
        return self.processes or self.gpus or self.cpus


class TrialAbility(StrEnum):
    """Ability of trials that a study may need, and that some backends lack."""

    TRAINING = "training"
    """Training for real, so that a second trial of the same configuration adds information."""
    PROXIES = "proxies"
    """Measuring a smaller job on fewer hosts."""
    PLANS = "plans"
    """Sharding layers by any plan, and not only as the framework does by hand."""
    KNOBS = "knobs"
    """Setting the knobs of a study, settings beside the layout; see trials/knobs/."""
    IDLE_HOSTS = "idle hosts"
    """Running on some of the cluster's hosts, those that a configuration lists."""
    LAYERS = "layers"
    """Giving each virtual stage the number of layers that a configuration says."""


class AbstractBackend(ABC):
    """Backend that measures configurations.

    Concrete backends are frozen dataclasses that pickle. The executor calls `measure` for each trial in a worker
    process. If the process dies, it calls `measure` once more in a fresh one. Several workers may measure at once.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def origin(self) -> Origin:
        """Origin of this backend's step times: measured or synthetic."""

    @property
    def clock(self) -> Clock:
        """Clock of this backend's step times."""
        return "wall"

    @property
    def source_in_words(self) -> str:
        """Origin of the step times in words, and their clock unless it is the wall clock."""
        return self.origin if self.clock == "wall" else f"{self.origin}, {CLOCK_WORDS[self.clock]}"

    @property
    def trial_in_words(self) -> str:
        """Sentence on what a trial of this backend is."""
        return "A trial of this study starts no command of yours: Meshtune answers it by itself."

    @property
    def abilities(self) -> frozenset[TrialAbility]:
        """Abilities of the trials beyond measuring configurations of their own job."""
        return frozenset()

    @property
    def hosts(self) -> tuple[HostNeeds, ...]:
        """Resources that a trial occupies, host by host. A trial gets all of them or does not run."""
        return (HostNeeds(),)

    @property
    def wants_hosts_alone(self) -> bool:
        """Whether a second trial on the same hosts would slow a trial down, because both share adapters and buses."""
        return False

    @property
    def goes_on(self) -> bool:
        """Whether a trial begins with what the one before has left, so that only one may run at a time."""
        return False

    @property
    def waits_in_queue(self) -> bool:
        """Whether a trial waits for its devices in a queue, and says when it has them; its time begins then."""
        return False

    @property
    def rank_setup(self) -> RankSetup:
        """Modules and variables that the processes of a trial find ready, if it starts any."""
        return RankSetup()

    def check(self) -> None:  # noqa: B027 # most backends need nothing
        """Check before the first trial whether trials can run at all.

        Raises:
            ConfigError: No trial can run.
        """

    def end_left_over(self) -> int:
        """End what trials of this study that nobody follows any more have left on other machines; return how many.

        Only the driver of a study may call this, while none of its trials runs.

        Raises:
            ConfigError: The other machines cannot be asked.
        """
        return 0

    def opened(self, ranks: AbstractRanks) -> AbstractBackend:  # noqa: ARG002 # most backends start no processes
        """Return this backend with everything that it keeps warm between trials; called once in every worker.

        `ranks` can start processes on the hosts of a trial, and are not started yet.
        """
        return self

    @abstractmethod
    def expected_steps(self, config: ParallelConfig) -> int | None:
        """Return how many steps a trial of `config` measures if it is not stopped; None if not known beforehand."""

    def reduced(self, to: Reduction) -> Self:
        """Return the backend of a proxy job on fewer hosts, otherwise the same; asked only of those with PROXIES."""
        raise AssertionError(f"{type(self).__name__} measures its own job only, not one on {to.hosts} hosts")

    def with_layer_changes(self, changes: tuple[LayerChange, ...]) -> Self:  # noqa: ARG002 # most backends ignore them
        """Return this backend with layers sharded by other plans; asked only of those with PLANS.

        Backends that plan the step of each trial by themselves stay as they are.
        """
        return self

    def candidates(self, opened: tuple[str, ...]) -> ConfigGrid | None:  # noqa: ARG002 # most backends measure all
        """Return the only configurations that this backend can measure; None if it can measure any valid one.

        Raises:
            ConfigError: The configurations differ in a further dimension that is not in `opened`, those that the study
                searches.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """Return what gives trials their meaning besides the study's keys, as JSON, for example resolved defaults."""
        return {}

    def kept_logs(self) -> dict[int, tuple[Path, ...]]:
        """Return the whole logs of trials that this machine keeps, in the order of hosts, by the trial's number."""
        return {}

    def starts(self, config: ParallelConfig, *, trial_number: int) -> Started:  # noqa: ARG002 # most start no command
        """Return what a trial of a configuration would start, without starting it."""
        return Started(in_words=self.trial_in_words)

    def loading_nothing(self) -> Self:
        """Return this backend with trials that load no checkpoint, as a rehearsal runs them."""
        return self

    def in_training(self) -> Mapping[str, Any] | None:
        """Return the state of the training in which the trials run, as JSON; None if what they train is thrown away.

        It holds the `step` and the `checkpoint` that the training has come to, the `trials` whose steps count, and all
        that `in_words`.

        Raises:
            ConfigError: The state cannot be read.
        """
        return None

    def keeping_logs(self, folder: Path) -> Self:  # noqa: ARG002 # most backends keep no logs
        """Return this backend with whole logs of trials kept in a folder, unless they are kept already."""
        return self

    @abstractmethod
    def measure(
        self,
        config: ParallelConfig,
        *,
        trial_number: int,
        on_step: OnStep = ignore_step,
        on_start: OnStart = ignore_start,
    ) -> Observation:
        """Run one trial and return its observation.

        It prints nothing, because standard output belongs to the command's result. Failures that the backend
        understands come back as an Observation with their status. Any exception becomes `crashed` with its traceback. A
        trial that is clearly slower than the best, or takes too long, is killed with its process; the steps that it
        reported before are kept.

        Args:
            config: Valid configuration of the study's job on its cluster.
            trial_number: Number of this trial in the study, for file names and logs.
            on_step: Callback that is given the time of each measured step [s] when it ends, in the order of the
                observation's `step_times_s`. It returns at once.
            on_start: Callback that is told when the trial has got its devices, if the backend waits in a queue.
        """
