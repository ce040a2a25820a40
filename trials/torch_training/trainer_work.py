"""Work of the ranks that train with the trainer's own modules; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from trials.training.work import AbstractWork


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainerWork(AbstractWork):
    """Work of every rank of one trial of the trainer.

    Attributes:
        job: Training job of the trial.
        runtime: Profile of the framework, which divides the layers into stages.
        config: Configuration that the ranks run.
        capacity_factor: Largest number of token copies that an expert takes, over its even share; None drops nothing.
    """

    job: TrainingJob
    runtime: RuntimeProfile
    config: ParallelConfig
    capacity_factor: float | None = None

    @property
    def num_devices(self) -> int:
        """Number of devices of the configuration."""
        return self.config.num_devices
