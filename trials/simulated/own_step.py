"""Synthetic world for a study of a user's own step: the planner's predictions with errors that the tuner does not know.

The times of compute and of collectives and the peak of memory have a factor each, a random smooth function of the mesh
and of the kind of plan. The world is a function of its seed, as that of models of the catalog (`backend.py`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from costmodels.job.parallel_config import DIMENSIONS, ParallelConfig
from hardware.cluster import Cluster
from trials.backend import AbstractBackend, Observation, OnStart, OnStep, Origin, Status, ignore_start, ignore_step
from trials.own_step import OwnStepPlans
from trials.simulated.backend import MEMORY_ERROR, code_of, smooth


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSimulatedBackend(AbstractBackend):
    """Backend that answers a trial of a user's own step from the synthetic world of a seed.

    Attributes:
        steps: Plans of the user's step, by candidate.
        cluster: Cluster of the study.
        seed: Seed of the world.
        noise: Standard deviation of the log of a step's time from step to step.
        operator_error: Standard deviation of the log errors of compute and of collectives.
        num_steps: Number of steps that a trial measures.
        seconds_per_trial: Wall time that each trial takes [s].
    """

    steps: OwnStepPlans
    cluster: Cluster
    seed: int = 0
    noise: float = 0.02
    operator_error: float = 0.3
    num_steps: int = 5
    seconds_per_trial: float = 0.0

    @property
    def trial_in_words(self) -> str:
        """Sentence on what a trial is."""
        return "A trial of this study starts no program: its step time is computed, in a simulated world."

    @property
    def origin(self) -> Origin:
        """Origin of the step times: synthetic."""
        return "synthetic"

    def expected_steps(self, config: ParallelConfig) -> int | None:  # noqa: ARG002 # the contract's
        """Return the number of steps, which is equal for every candidate."""
        return self.num_steps

    def hidden_step_s(self, config: ParallelConfig) -> float:
        """Return the world's own step time without noise [s], for judging a tuner that never sees it."""
        compute_s, collectives_s = self.steps.step_time_s(config)
        return compute_s * self._factor(config, "compute") + collectives_s * self._factor(config, "collectives")

    def measure(
        self,
        config: ParallelConfig,
        *,
        trial_number: int,  # noqa: ARG002 # the contract's
        on_step: OnStep = ignore_step,
        on_start: OnStart = ignore_start,  # noqa: ARG002 # no trial waits
    ) -> Observation:
        """Return noisy step times of a candidate in this world, or out of memory if it does not fit."""
        peak_bytes = self.steps.peak_memory_bytes(config) * self._factor(config, "memory", MEMORY_ERROR)
        capacity_bytes = min(device.memory_bytes for device in self.cluster.devices)
        if peak_bytes > capacity_bytes:
            time.sleep(self.seconds_per_trial)
            return Observation(
                status=Status.OUT_OF_MEMORY,
                peak_memory_bytes=round(peak_bytes),
                reason=f"needs {peak_bytes / 2**30:.3g} GiB of {capacity_bytes / 2**30:.3g} GiB",
                origin="synthetic",
            )
        rng = np.random.default_rng([self.seed, code_of(str(self._features(config).tolist()))])
        steps = self.hidden_step_s(config) * np.exp(self.noise * rng.standard_normal(self.num_steps))
        for step_time_s in steps.tolist():
            time.sleep(self.seconds_per_trial / self.num_steps)
            on_step(step_time_s)
        return Observation(
            status=Status.OK,
            step_times_s=tuple(steps.tolist()),
            peak_memory_bytes=round(peak_bytes),
            origin="synthetic",
        )

    def _features(self, config: ParallelConfig) -> np.ndarray:
        """Return the mesh, the ZeRO stage and the planner of a candidate as numbers [1, 4]."""
        planner = DIMENSIONS["plan"].code_of(config.plan)
        return np.array([[math.log2(config.dp), math.log2(config.tp), float(config.zero_stage), float(planner)]])

    def _factor(self, config: ParallelConfig, label: str, amplitude: float | None = None) -> float:
        error = self.operator_error if amplitude is None else amplitude
        return float(np.exp(smooth(self._features(config), error, (self.seed, code_of(label)))[0]))
