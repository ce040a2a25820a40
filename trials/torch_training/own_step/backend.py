"""Backend `torch` of a study of a user's own step: a trial trains the user's module as the candidate's plan shards it.

Ranks, clocks and memory are those of `trials/torch_training/backend.py`, on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from costmodels.job.parallel_config import HAND, ParallelConfig
from hardware.cluster import Cluster
from trials.own_step import OwnStepPlans
from trials.processor_time import num_cores
from trials.step_options import StepOptions
from trials.torch_training.backend import AbstractTorchBackend, ClockChoice
from trials.torch_training.rank_plan import DeviceKind, OwnRankPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTorchBackend(StepOptions, AbstractTorchBackend):
    """Backend that trains a user's module.

    Attributes:
        steps: Plans of the user's step, by candidate.
        cluster: Cluster of the study, whose devices stand for cores.
        chosen_clock: Clock of the step times; see AbstractTorchBackend.
        cores: Number of cores of a host, as the study's driver saw them.
        spreads: Whether every host of the cluster is a machine of its own.
        hang_limit_s: Silence of the ranks that means a hang [s].
    """

    steps: OwnStepPlans
    cluster: Cluster
    chosen_clock: ClockChoice = "auto"
    cores: int = field(default_factory=num_cores)
    spreads: bool = False
    hang_limit_s: float = 120.0

    @property
    def kind(self) -> DeviceKind:
        """Kind of device that ranks compute on: CPUs."""
        return "cpu"

    @property
    def launch_limit_bytes(self) -> None:
        """No limit: ranks first import and trace the user's program, and then limit what training takes."""

    def plan(self, config: ParallelConfig) -> OwnRankPlan:
        """Return the work of each rank in a trial."""
        return OwnRankPlan(
            **{option.name: getattr(self, option.name) for option in fields(StepOptions)},
            step=self.steps.step_of(config),
            config=config,
            clock=self.clock,
            sharding=self.steps.plan(config),
            is_by_hand=config.plan == HAND,
            memory_bytes=min(device.memory_bytes for device in self.cluster.devices),
        )
