"""Backend `torch` of models of the catalog: a trial trains the real model for some steps, with one process per device.

With more ranks than cores, a virtual clock (`virtual_clock.py`) can take the place of the wall clock. With
`runtime: torch-planned`, and for steps of a user's own, trials run sharding plans (`trials/training/planned.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from trials.backend import TrialAbility
from trials.torch_training.framework import TORCH
from trials.torch_training.trainer_work import TrainerWork
from trials.training.backend import AbstractTrainingBackend
from trials.training.framework import Framework
from trials.training.work import DeviceKind


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBackend(AbstractTrainingBackend):
    """Backend that trains a model of the catalog with the trainer's own modules.

    Attributes:
        job: Training job of the trials.
        runtime: Profile of the framework, which divides the layers into stages.
        device: Kind of device that ranks compute on.
        capacity_factor: Largest number of token copies that an expert takes, over its even share; None drops nothing.
        profiles: Whether one more step is profiled for operator times, and recorded for communication on CPUs.
    """

    framework: Framework = TORCH
    job: TrainingJob
    runtime: RuntimeProfile
    device: DeviceKind
    capacity_factor: float | None = None
    profiles: bool = True

    @property
    def kind(self) -> DeviceKind:
        """Kind of device that ranks compute on: the chosen one."""
        return self.device

    @property
    def launch_limit_bytes(self) -> int | None:
        """Memory of the smallest device on CPUs [bytes]; GPUs have limits of their own."""
        return self.memory_bytes if self.device == "cpu" else None

    @property
    def abilities(self) -> frozenset[TrialAbility]:
        """Abilities of trials: real training, of proxy jobs too."""
        return frozenset({TrialAbility.TRAINING, TrialAbility.PROXIES, TrialAbility.LAYERS})

    def reduced(self, to: Reduction) -> Self:
        """Return the backend that trains the proxy job on fewer hosts."""
        return replace(self, job=to.job(self.job), cluster=to.cluster(self.cluster))

    def work(self, config: ParallelConfig) -> TrainerWork:
        """Return the work of each rank in a trial."""
        return TrainerWork(
            **self.step_options(),
            clock=self.clock,
            device=self.device,
            profiles=self.profiles,
            job=self.job,
            runtime=self.runtime,
            config=config,
            capacity_factor=self.capacity_factor,
        )
