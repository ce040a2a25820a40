"""Synthetic world for trying the tuner: our cost model with errors that the tuner does not know.

The time of every operator is the kernel model's time multiplied by exp(g). There is one g per kind, phase and device,
and each g is a random smooth function of the operator's log sizes. The time of every collective has such a factor too,
one per kind, over the logs of its bytes, ranks and hosts. Other parts of the step and the peak of memory get a factor
over the log degrees. Neighbours in the space therefore have similar errors, as with real kernels and networks, and a
surrogate has something to learn. The world is a function of its seed: repeated trials of one configuration give the
same observation.

A step is computed from these operators and collectives in one of two ways: by the closed form, which the tuner uses
too, or by the event simulator, which is an independent program. The simulator's pipelines and overlap differ from what
the tuner expects.

g is a sum of NUM_WAVES random Fourier features, nearly a draw from a Gaussian process with a squared-exponential kernel
(Rahimi and Recht 2007, section 3). Letters: n configurations or shapes, d features.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

import numpy as np

from costmodels.blocks.operator import Operator, Phase
from costmodels.job.layer_change import LayerChange
from costmodels.job.parallel_config import (
    DEGREES,
    ENUMERATED_DIMENSIONS,
    FURTHER_DIMENSIONS,
    ConfigGrid,
    ParallelConfig,
)
from costmodels.job.proxy_job import Reduction
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import collective_s, kernel_s
from costmodels.operators.layer_operators import Collective
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.executions import collective_executions, operator_executions
from costmodels.step.memory.peak import MemoryEstimate, estimate_memory
from costmodels.step.step_time import StepEstimate, estimate_step
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.device import Device
from hardware.io.errors import ConfigError, did_you_mean
from trials.backend import (
    AbstractBackend,
    Observation,
    OnStart,
    OnStep,
    OperatorSample,
    Origin,
    Status,
    TrialAbility,
    check_seconds_per_trial,
    ignore_start,
    ignore_step,
)
from trials.knobs.knob import Knob, active_knobs
from trials.simulated.knob_world import KnobEffects, hidden_effects

Fidelity = Literal["step_time", "simulator"]
"""Model that computes a step from its operators and collectives: the closed form, or the event simulator."""

NUM_WAVES = 64
LENGTH_SCALE = 4.0
"""Distance in log2 units over which an error changes (assumed): a kernel that is slow at some size is slow at half that
size too."""

MEMORY_ERROR = 0.05
"""Standard deviation of the log error of the peak memory (assumed)."""

ERRING_PARTS = ("host", "optimizer", "overhead")
"""Parts of the step with an error of their own; all others have the errors of their operators and collectives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedBackend(AbstractBackend):
    """Backend that answers a trial from the synthetic world of a seed.

    Attributes:
        job: Training job of the trials.
        cluster: Cluster that the job runs on.
        runtime: Profile of the framework, for example which communication overlaps with computation.
        fidelity: Model that computes a step: the closed form or the event simulator.
        seed: Seed of the world.
        noise: Standard deviation of the log of a step's time from step to step.
        operator_error: Standard deviation of the log error of operators, of collectives and of ERRING_PARTS.
        num_steps: Number of steps that a trial measures.
        seconds_per_trial: Wall time that each trial takes [s], to rehearse a sweep at its real pace; 0 answers at once.
        knobs: Knobs of the study, which have hidden effects too.
    """

    job: TrainingJob
    cluster: Cluster
    runtime: RuntimeProfile
    fidelity: Fidelity = "step_time"
    seed: int = 0
    noise: float = 0.02
    operator_error: float = 0.3
    num_steps: int = 5
    seconds_per_trial: float = 0.0
    knobs: tuple[Knob, ...] = ()

    def __post_init__(self) -> None:
        """Check that every field is in its range."""
        check_seconds_per_trial(self.seconds_per_trial)
        for key in ("noise", "operator_error"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError("must be from 0 to 1", key=key, value=getattr(self, key))
        if self.fidelity not in get_args(Fidelity):
            raise ConfigError(
                "is not a fidelity",
                key="fidelity",
                value=self.fidelity,
                nearest=did_you_mean(self.fidelity, get_args(Fidelity)),
            )
        if self.num_steps < 1:
            raise ConfigError("must be at least 1", key="num_steps", value=self.num_steps)
        if self.seed < 0:
            raise ConfigError("must be at least 0", key="seed", value=self.seed)

    @property
    def setting(self) -> Setting:
        """Setting of the world, before its hidden errors."""
        return Setting(job=self.job, cluster=self.cluster, runtime=self.runtime)

    @property
    def trial_in_words(self) -> str:
        """Sentence on what a trial is."""
        return "A trial of this study starts no program: its step time is computed, in a simulated world."

    @property
    def origin(self) -> Origin:
        """Origin of the step times: synthetic."""
        return "synthetic"

    @property
    def abilities(self) -> frozenset[TrialAbility]:
        """Abilities of trials: all but real training."""
        return frozenset(TrialAbility) - {TrialAbility.TRAINING}

    def expected_steps(self, config: ParallelConfig) -> int | None:  # noqa: ARG002 # the contract's
        """Return the number of steps, which is equal for every configuration."""
        return self.num_steps

    def reduced(self, to: Reduction) -> Self:
        """Return the proxy job in the same world, in which equal operators take equal times."""
        return replace(self, job=to.job(self.job), cluster=to.cluster(self.cluster))

    def with_layer_changes(self, changes: tuple[LayerChange, ...]) -> Self:
        """Return this world with layers that are sharded by the changed plans."""
        return replace(self, runtime=replace(self.runtime, layer_changes=changes))

    def measure(
        self,
        config: ParallelConfig,
        *,
        trial_number: int,  # noqa: ARG002 # the contract's
        on_step: OnStep = ignore_step,
        on_start: OnStart = ignore_start,  # noqa: ARG002 # no trial waits
    ) -> Observation:
        """Return noisy step times of `config` in this world, or out of memory if it does not fit.

        The wait is spread evenly over the steps.
        """
        grid = ConfigGrid.from_configs([config])
        memory = self.hidden_memory(grid)
        of_knobs = self.hidden_knobs(config)
        more = float(np.exp(of_knobs.memory[0]))
        needed, capacity = more * float(memory.needed_bytes[0]), float(memory.capacity_bytes[0])
        if needed > capacity:
            time.sleep(self.seconds_per_trial)
            return Observation(
                status=Status.OUT_OF_MEMORY,
                peak_memory_bytes=round(needed),
                reason=f"needs {needed / 2**30:.1f} GiB of {capacity / 2**30:.1f} GiB",
                origin="synthetic",
            )
        # even work adds nothing to the seed, so that worlds keep the noise that they had before work could be uneven
        dimensions = FURTHER_DIMENSIONS if config.assignment else ENUMERATED_DIMENSIONS
        identity = repr(config.values(DEGREES + dimensions)) + (repr(config.knobs) if config.knobs else "")
        rng = np.random.default_rng([self.seed, code_of(identity)])
        step_time_s = self.hidden_step(grid).step_time_s[0] * np.exp(of_knobs.step[0])
        steps = step_time_s * np.exp(self.noise * rng.standard_normal(self.num_steps))
        for step_time_s in steps.tolist():
            time.sleep(self.seconds_per_trial / self.num_steps)
            on_step(step_time_s)
        return Observation(
            status=Status.OK,
            step_times_s=tuple(steps.tolist()),
            peak_memory_bytes=round(min(more * float(memory.peak_bytes[0]), capacity)),
            operator_samples=self._operator_samples(grid, rng),
            origin="synthetic",
        )

    def hidden_step(self, grid: ConfigGrid) -> StepEstimate:
        """Compute the world's own step times without noise [n], for judging a tuner that never sees them.

        The event simulator takes up to some seconds for each configuration.

        Raises:
            ValueError: The event simulator finds no order in which the passes of a configuration could run.
        """
        believed = self._closed_form(grid) if self.fidelity == "step_time" else self._simulate(grid)
        # other parts depend on the configuration alone, so that their error is a function of its log degrees [n, 8]
        degrees = _log2(grid.matrix(DEGREES))
        # operators and collectives carry their errors already; only parts without either get one here
        parts = {
            part: seconds * np.exp(self._error(f"part {part}", degrees)) if part in ERRING_PARTS else seconds
            for part, seconds in believed.breakdown_s.items()
        }
        return StepEstimate(step_time_s=np.sum(list(parts.values()), axis=0), breakdown_s=parts)

    def hidden_knobs(self, config: ParallelConfig) -> KnobEffects:
        """Return what the knobs of a configuration do in this world, for judging a tuner that never sees it."""
        degrees = _log2(ConfigGrid.from_configs([config]).matrix(DEGREES))
        return hidden_effects(active_knobs(self.knobs, config), degrees, self.seed)

    def _closed_form(self, grid: ConfigGrid) -> StepEstimate:
        return estimate_step(
            self.setting,
            grid,
            kernel_time=self._kernel_s,
            collective_time=self._collective_s,
            memory=self.hidden_memory(grid),
        )

    def _simulate(self, grid: ConfigGrid) -> StepEstimate:
        """Compute the steps [n] with the event simulator, one configuration after the other."""
        from costmodels.simulator.simulated_step import simulate_step  # noqa: PLC0415 # few studies ask for it

        steps = [
            simulate_step(
                self.setting,
                config,
                kernel_time=self._kernel_s,
                collective_time=self._collective_s,
                memory=self.hidden_memory(ConfigGrid.from_configs([config])),
            )
            for config in map(grid.config, range(len(grid)))
        ]
        return StepEstimate(
            step_time_s=np.array([step.step_time_s for step in steps]),
            breakdown_s={part: np.array([step.breakdown_s[part] for step in steps]) for part in BREAKDOWN},
        )

    def hidden_memory(self, grid: ConfigGrid) -> MemoryEstimate:
        """Compute the world's own memory [n], for judging a tuner that never sees it."""
        believed = estimate_memory(self.setting, grid)
        error = np.exp(smooth(_log2(grid.matrix(DEGREES)), MEMORY_ERROR, (self.seed, code_of("memory"))))
        return MemoryEstimate(
            peak_bytes=believed.peak_bytes * error,
            parts_bytes={part: values * error for part, values in believed.parts_bytes.items()},
            capacity_bytes=believed.capacity_bytes,
        )

    def _kernel_s(self, operator: Operator, device: Device, job: TrainingJob, runtime: RuntimeProfile) -> FloatArray:
        label = f"{operator.kind} {operator.phase} {device.name}"
        return kernel_s(operator, device, job, runtime) * np.exp(self._error(label, _log2(operator.shape)))

    def _collective_s(self, collective: Collective) -> FloatArray:
        seconds = collective_s(collective)
        # one error for each row of the last axis: shapes [..., d] become features [n, d], and times keep [...]
        shape = collective.shape
        error = self._error(collective.kind, _log2(shape.reshape(-1, shape.shape[-1])))
        return np.asarray(seconds * np.exp(error.reshape(seconds.shape)))

    def _error(self, label: str, features: FloatArray) -> FloatArray:
        return smooth(features, self.operator_error, (self.seed, code_of(label)))

    def _operator_samples(self, grid: ConfigGrid, rng: np.random.Generator) -> tuple[OperatorSample, ...]:
        """Return the samples that a profiler would show of one configuration, on the cluster's first kind of device."""
        device = self.cluster.devices[0]
        samples = []
        # a profiler would see the times of this world, with their hidden errors
        for operator, count in operator_executions(self.job, self.runtime, grid):
            seconds = self._kernel_s(operator, device, self.job, self.runtime)
            samples += self._samples(operator, operator.phase, operator.shape, seconds, count, rng)
        for collective, phase, count in collective_executions(self.setting, grid):
            messages = collective.messages
            seconds = self._collective_s(collective) / messages
            samples += self._samples(collective, phase, collective.shape, seconds, count * messages, rng)
        return tuple(samples)

    def _samples(
        self,
        call: Operator | Collective,
        phase: Phase,
        shape: FloatArray,
        seconds: FloatArray,
        count: FloatArray,
        rng: np.random.Generator,
    ) -> list[OperatorSample]:
        """Return one sample for each shape [..., d] that is executed, `count` times [...], in `seconds` [...]."""
        executed = np.flatnonzero(count)
        # the mean of many executions: step noise averages out with their number
        spread = self.noise / np.sqrt(count.flat[executed])
        times_s = seconds.flat[executed] * np.exp(spread * rng.standard_normal(len(executed)))
        return [
            OperatorSample(
                kind=call.kind, phase=phase, shape=tuple(sizes), time_s=time_s, count=round(times), name=call.name
            )
            for sizes, time_s, times in zip(
                shape.reshape(-1, shape.shape[-1])[executed].tolist(),
                times_s.tolist(),
                count.flat[executed].tolist(),
                strict=True,
            )
        ]


def smooth(features: FloatArray, amplitude: float, seed: tuple[int, int]) -> FloatArray:
    """Evaluate a random smooth function at `features` [n, d]; it has mean 0 and standard deviation `amplitude`."""
    # f(x) = sqrt(2/W) sum_w cos(x . omega_w + b_w), Rahimi and Recht 2007, algorithm 1, with W = NUM_WAVES
    rng = np.random.default_rng(seed)
    waves = rng.normal(0.0, 1 / LENGTH_SCALE, (features.shape[1], NUM_WAVES))
    phases = rng.uniform(0.0, 2 * np.pi, NUM_WAVES)
    return np.asarray(amplitude * np.sqrt(2 / NUM_WAVES) * np.cos(features @ waves + phases).sum(axis=1))


def _log2(sizes: np.ndarray) -> FloatArray:
    return np.log2(np.maximum(sizes.astype(np.float64), 1.0))


def code_of(label: str) -> int:
    """Return a number that is equal in every process, unlike `hash`."""
    return zlib.crc32(label.encode())
