"""Backend `jax` of a study of a user's own step: a trial runs the user's function, sharded by the candidate's plan.

Devices, processes and clocks are those of `trials/jax_training/backend.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from costmodels.job.parallel_config import HAND, ParallelConfig
from hardware.cluster import Cluster
from trials.jax_training.backend import AbstractJaxBackend, ClockChoice
from trials.jax_training.rank_plan import StepWork
from trials.own_step import OwnStepPlans
from trials.processor_time import num_cores
from trials.step_options import StepOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnStepBackend(StepOptions, AbstractJaxBackend):
    """Backend that runs a user's function.

    Attributes:
        steps: Plans of the user's step, by candidate.
        cluster: Cluster of the study, whose devices stand for cores.
        chosen_clock: Clock of the step times; see AbstractJaxBackend.
        cores: Number of cores of the machine, as the study's driver saw them.
        hang_limit_s: Silence of the processes that means a hang [s].
    """

    steps: OwnStepPlans
    cluster: Cluster
    chosen_clock: ClockChoice = "auto"
    cores: int = field(default_factory=num_cores)
    hang_limit_s: float = 600.0

    def work(self, config: ParallelConfig) -> StepWork:
        """Return the work of each process in a trial."""
        return StepWork(
            **{option.name: getattr(self, option.name) for option in fields(StepOptions)},
            step=self.steps.step_of(config),
            plan=self.steps.plan(config),
            is_by_hand=config.plan == HAND,
            memory_bytes=min(device.memory_bytes for device in self.cluster.devices),
            clock=self.clock,
        )
