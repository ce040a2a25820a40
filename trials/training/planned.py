"""Backends whose trials run a step as the candidate's sharding plan shards it, on CPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from costmodels.job.parallel_config import HAND, ParallelConfig
from costmodels.job.proxy_job import Reduction
from costmodels.job.training_job import TrainingJob
from trials.backend import TrialAbility
from trials.own_step import OwnStepPlans
from trials.step_planner import StepPlanner
from trials.training.backend import AbstractTrainingBackend
from trials.training.work import CatalogStep, PlannedWork


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBackend(AbstractTrainingBackend):
    """Backend that trains a model of the catalog.

    Attributes:
        job: Training job of the trials.
        planner: Planner of the steps.
        profiles: Whether communication is recorded in one more step, and compared with the plan's.
    """

    job: TrainingJob
    planner: StepPlanner
    profiles: bool = True

    @property
    def launch_limit_bytes(self) -> int | None:
        """Memory of the smallest device [bytes], unless the library tells beforehand what it needs."""
        return self.memory_bytes if self.framework.limits_memory else None

    @property
    def abilities(self) -> frozenset[TrialAbility]:
        """Abilities of trials: real training of sharding plans, and of proxy jobs if steps may have micro-batches.

        Candidates of a smaller job may have several.
        """
        proxies = [TrialAbility.PROXIES] if self.framework.accumulates else []
        return frozenset({TrialAbility.TRAINING, TrialAbility.PLANS, *proxies})

    def reduced(self, to: Reduction) -> Self:
        """Return the backend that trains the proxy job on fewer hosts, by the same clock."""
        return replace(self, job=to.job(self.job), cluster=to.cluster(self.cluster), chosen_clock=self.clock)

    def work(self, config: ParallelConfig) -> PlannedWork:
        """Return the work of each rank in a trial."""
        is_single = self.job.global_batch_size == config.dp * config.mbs
        # a study can switch rules off, and a step of another batch would be measured in silence
        assert is_single or self.framework.accumulates, f"{config} has one micro-batch as the rules demand"
        is_by_hand = config.plan == HAND
        return PlannedWork(
            **self.step_options(),
            step=CatalogStep(top_k=self.job.model.top_k),
            plan=self.planner.plan(self.job, self.cluster, config, is_by_hand=is_by_hand),
            is_by_hand=is_by_hand,
            memory_bytes=self.memory_bytes,
            clock=self.clock,
            profiles=self.profiles,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnStepBackend(AbstractTrainingBackend):
    """Backend that runs a user's own step.

    Attributes:
        steps: Plans of the user's step, by candidate.
    """

    steps: OwnStepPlans

    def work(self, config: ParallelConfig) -> PlannedWork:
        """Return the work of each rank in a trial."""
        return PlannedWork(
            **self.step_options(),
            step=self.steps.step_of(config),
            plan=self.steps.plan(config),
            is_by_hand=config.plan == HAND,
            memory_bytes=self.memory_bytes,
            clock=self.clock,
        )
