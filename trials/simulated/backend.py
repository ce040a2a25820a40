"""A synthetic world to try the tuner in: our cost model, made wrong in ways that it doesn't know.

Every operator's time is the kernel model's times exp(g), where g is a random smooth function of the operator's log
sizes, one per kind, phase and device; so is every collective's, over the logs of its bytes, ranks and hosts, one per
kind. What is neither gets such a factor over the log degrees, and so does the peak of memory. So neighbours in the
space err alike, as real kernels and networks do, and a surrogate has something to learn. The world is a function of its
seed; repeated trials of one configuration give the same observation.

What such operators and collectives add up to is told by the closed form of a step, which the tuner believes in too, or
by the event simulator, which is another program: its pipelines and its overlap differ from what the tuner expects.

g is a sum of NUM_WAVES random Fourier features, nearly a draw from a Gaussian process with a squared-exponential kernel
(Rahimi and Recht 2007, section 3). Letters: n configurations or shapes, d features.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from costmodels.job.parallel_config import (
    DEGREES,
    ENUMERATED_DIMENSIONS,
    FURTHER_DIMENSIONS,
    ConfigGrid,
    ParallelConfig,
)
from costmodels.job.proxy_job import Reduction
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import collective_s, kernel_s
from costmodels.operators.layer_operators import Collective, Operator, Phase
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.executions import collective_executions, operator_executions
from costmodels.step.memory import MemoryEstimate, estimate_memory
from costmodels.step.step_time import StepEstimate, estimate_step
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.device import Device
from hardware.io.errors import ConfigError, did_you_mean
from trials.backend import AbstractBackend, Observation, OnStep, OperatorSample, Origin, Status, unheard
from trials.replay.backend import check_seconds_per_trial

Fidelity = Literal["step_time", "simulator"]
"""What computes a step from its operators and collectives: the closed form, or the event simulator."""

NUM_WAVES = 64
LENGTH_SCALE = 4.0
"""Distance in log2 units over which an error changes: a kernel that is slow at some size is slow at half that size too
(assumed)."""

MEMORY_ERROR = 0.05
"""Standard deviation of the log error of the peak memory (assumed)."""

ERRING_PARTS = ("host", "optimizer", "overhead")
"""Parts of the step that get an error of their own; that of all others is that of their operators and collectives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedBackend(AbstractBackend):
    """Answers a trial from the synthetic world of a seed.

    Attributes:
        job: What is trained.
        cluster: Where.
        runtime: What overlaps with what.
        fidelity: What computes a step.
        seed: Which world.
        noise: Standard deviation of the log of a step's time from step to step.
        operator_error: Standard deviation of the log error of operators, of collectives and of ERRING_PARTS.
        num_steps: Steps that a trial measures.
        seconds_per_trial: Wall time that each trial takes, to rehearse a sweep at its real pace; 0 answers at once.
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

    def __post_init__(self) -> None:
        """Refuses a world that makes no sense."""
        check_seconds_per_trial(self.seconds_per_trial)
        for key in ("noise", "operator_error"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError("must be from 0 to 1", key=key, value=getattr(self, key))
        if self.fidelity not in get_args(Fidelity):
            raise ConfigError(
                "is no fidelity",
                key="fidelity",
                value=self.fidelity,
                nearest=did_you_mean(self.fidelity, get_args(Fidelity)),
            )
        if self.num_steps < 1:
            raise ConfigError("must be at least 1", key="num_steps", value=self.num_steps)
        if self.seed < 0:
            raise ConfigError("must be at least 0", key="seed", value=self.seed)

    @property
    def origin(self) -> Origin:
        """Nothing here was measured."""
        return "synthetic"

    def expected_steps(self, config: ParallelConfig) -> int | None:  # noqa: ARG002 # the contract's
        """The same for every configuration."""
        return self.num_steps

    def reduced(self, to: Reduction) -> SimulatedBackend:
        """The same world, in which equal operators take equal times."""
        return replace(self, job=to.job(self.job), cluster=to.cluster(self.cluster))

    def measure(
        self,
        config: ParallelConfig,
        *,
        trial_number: int,  # noqa: ARG002 # the contract's
        on_step: OnStep = unheard,
    ) -> Observation:
        """The step times of `config` in this world, with noise; out of memory where it does not fit there.

        The wait is spread evenly over the steps.
        """
        grid = ConfigGrid.from_configs([config])
        memory = self.hidden_memory(grid)
        needed, capacity = float(memory.needed_bytes[0]), float(memory.capacity_bytes[0])
        if needed > capacity:
            time.sleep(self.seconds_per_trial)
            return Observation(
                status=Status.OUT_OF_MEMORY,
                peak_memory_bytes=round(needed),
                reason=f"needs {needed / 2**30:.1f} GiB of {capacity / 2**30:.1f} GiB",
                origin="synthetic",
            )
        refusal = self._refusal(config)
        if refusal:
            return Observation(status=Status.CRASHED, reason=refusal, origin="synthetic")
        dimensions = FURTHER_DIMENSIONS if config.assignment else ENUMERATED_DIMENSIONS
        rng = np.random.default_rng([self.seed, _code(repr(config.values(DEGREES + dimensions)))])
        steps = self.hidden_step(grid).step_time_s[0] * np.exp(self.noise * rng.standard_normal(self.num_steps))
        for step_time_s in steps.tolist():
            time.sleep(self.seconds_per_trial / self.num_steps)
            on_step(step_time_s)
        return Observation(
            status=Status.OK,
            step_times_s=tuple(steps.tolist()),
            peak_memory_bytes=round(min(float(memory.peak_bytes[0]), capacity)),
            operator_samples=self._operator_samples(grid, rng),
            origin="synthetic",
        )

    def hidden_step(self, grid: ConfigGrid) -> StepEstimate:
        """The world's own step times without noise [n]; for judging a tuner, which never sees them.

        The event simulator takes up to some seconds for each configuration.

        Raises:
            ValueError: the event simulator has no order in which the passes of a configuration could run.
        """
        believed = self._closed_form(grid) if self.fidelity == "step_time" else self._simulated(grid)
        degrees = _log2(grid.matrix(DEGREES))
        parts = {
            part: seconds * np.exp(self._error(f"part {part}", degrees)) if part in ERRING_PARTS else seconds
            for part, seconds in believed.breakdown_s.items()
        }
        return StepEstimate(step_time_s=np.sum(list(parts.values()), axis=0), breakdown_s=parts)

    def _refusal(self, config: ParallelConfig) -> str:
        """Why no order of its passes can be had; empty if one can, or where nobody asks for one."""
        if self.fidelity == "step_time":
            return ""
        # every study file names this backend, and few ask for the simulator
        from costmodels.simulator.passes import pass_order  # noqa: PLC0415

        even = self.job.global_batch_size // (config.dp * config.mbs)
        try:
            for num_micro_batches in config.assignment.micro_batches or (even,):
                pass_order("1f1b", config.pp, config.vpp, num_micro_batches)
        except ValueError as error:
            return str(error)
        return ""

    def _closed_form(self, grid: ConfigGrid) -> StepEstimate:
        return estimate_step(
            self.job,
            self.cluster,
            self.runtime,
            grid,
            kernel_time=self._kernel_s,
            collective_time=self._collective_s,
            memory=self.hidden_memory(grid),
        )

    def _simulated(self, grid: ConfigGrid) -> StepEstimate:
        """Simulate one configuration after the other."""
        from costmodels.simulator.simulated_step import simulate_step  # noqa: PLC0415 # as in `_refusal`

        steps = [
            simulate_step(
                self.job,
                self.cluster,
                self.runtime,
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
        """The world's own memory [n]; for judging a tuner, which never sees it."""
        believed = estimate_memory(self.job, self.cluster, self.runtime, grid)
        error = np.exp(_smooth(_log2(grid.matrix(DEGREES)), MEMORY_ERROR, (self.seed, _code("memory"))))
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
        shape = collective.shape
        error = self._error(collective.kind, _log2(shape.reshape(-1, shape.shape[-1])))
        return np.asarray(seconds * np.exp(error.reshape(seconds.shape)))

    def _error(self, label: str, features: FloatArray) -> FloatArray:
        return _smooth(features, self.operator_error, (self.seed, _code(label)))

    def _operator_samples(self, grid: ConfigGrid, rng: np.random.Generator) -> tuple[OperatorSample, ...]:
        """What a profiler would show of one configuration, on the cluster's first kind of device."""
        device = self.cluster.devices[0]
        samples = []
        for operator, count in operator_executions(self.job, self.runtime, grid):
            seconds = self._kernel_s(operator, device, self.job, self.runtime)
            samples += self._samples(operator, operator.phase, operator.shape, seconds, count, rng)
        for collective, phase, count in collective_executions(self.job, self.cluster, self.runtime, grid):
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
        """One sample for each shape [..., d] that is executed at all, `count` times [...]."""
        executed = np.flatnonzero(count)
        # the mean of many executions: step noise averages out with their number
        spread = self.noise / np.sqrt(count.flat[executed])
        times_s = seconds.flat[executed] * np.exp(spread * rng.standard_normal(len(executed)))
        return [
            OperatorSample(
                kind=call.kind,
                phase=phase,
                shape=tuple(sizes),
                time_s=time_s,
                count=round(times),
                name=call.name,
            )
            for sizes, time_s, times in zip(
                shape.reshape(-1, shape.shape[-1])[executed].tolist(),
                times_s.tolist(),
                count.flat[executed].tolist(),
                strict=True,
            )
        ]


def _smooth(features: FloatArray, amplitude: float, seed: tuple[int, int]) -> FloatArray:
    """A random smooth function of `features` [n, d] with mean 0 and standard deviation `amplitude` [n]."""
    rng = np.random.default_rng(seed)
    waves = rng.normal(0.0, 1 / LENGTH_SCALE, (features.shape[1], NUM_WAVES))
    phases = rng.uniform(0.0, 2 * np.pi, NUM_WAVES)
    return np.asarray(amplitude * np.sqrt(2 / NUM_WAVES) * np.cos(features @ waves + phases).sum(axis=1))


def _log2(sizes: np.ndarray) -> FloatArray:
    return np.log2(np.maximum(sizes.astype(np.float64), 1.0))


def _code(label: str) -> int:
    """A number that is the same in every process, which `hash` is not."""
    return zlib.crc32(label.encode())
