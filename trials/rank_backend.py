"""Shared part of backends whose trials start processes.

A rank is one process of a trial: one for each device if we train ourselves, one for each host if a user's command
trains. The executor opens a backend once in every worker; the opened backend keeps a server of ranks warm between
trials.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from hardware.cluster import Cluster
from trials.backend import (
    AbstractBackend,
    Clock,
    Observation,
    OnStart,
    OnStep,
    Origin,
    TrialAbility,
    ignore_start,
    ignore_step,
)
from trials.ranks.contract import AbstractRanks, RankSetup
from trials.ranks.processes import RankProcesses


def is_cpu_cluster(cluster: Cluster) -> bool:
    """Return whether all devices of a cluster are processors."""
    return all(device.is_processor for device in cluster.devices)


class AbstractRankBackend(AbstractBackend):
    """Backend whose trials train for real, in processes that a trial starts."""

    __slots__ = ()

    @property
    def origin(self) -> Origin:
        """Origin of the step times: real training."""
        return "measured"

    @property
    def abilities(self) -> frozenset[TrialAbility]:
        """Abilities of trials: real training."""
        return frozenset({TrialAbility.TRAINING})

    @property
    @abstractmethod
    def rank_setup(self) -> RankSetup:
        """Modules and variables that the processes of a trial find ready."""

    @abstractmethod
    def measure_on(
        self, ranks: AbstractRanks, config: ParallelConfig, *, trial_number: int, on_step: OnStep, on_start: OnStart
    ) -> Observation:
        """Run one trial as `measure` does, in ranks that are started; the caller ends those that run afterwards."""

    def opened(self, ranks: AbstractRanks) -> OpenBackend:
        """Return this backend with its ranks started."""
        return OpenBackend(backend=self, ranks=ranks.start())

    def measure(
        self,
        config: ParallelConfig,
        *,
        trial_number: int,
        on_step: OnStep = ignore_step,
        on_start: OnStart = ignore_start,
    ) -> Observation:
        """Run one trial in ranks of its own on this host; `opened` keeps them for many trials."""
        with RankProcesses(self.rank_setup) as ranks:
            opened = OpenBackend(backend=self, ranks=ranks)
            return opened.measure(config, trial_number=trial_number, on_step=on_step, on_start=on_start)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenBackend(AbstractBackend):
    """Backend in a worker, with its ranks started.

    Attributes:
        backend: Backend that runs the trials.
        ranks: Started ranks, which one trial after the other uses.
    """

    backend: AbstractRankBackend
    ranks: AbstractRanks

    @property
    def origin(self) -> Origin:
        """Origin of the backend's step times."""
        return self.backend.origin

    @property
    def clock(self) -> Clock:
        """Clock of the backend's step times."""
        return self.backend.clock

    @property
    def abilities(self) -> frozenset[TrialAbility]:
        """Abilities of the backend's trials."""
        return self.backend.abilities

    @property
    def waits_in_queue(self) -> bool:
        """Whether the backend's trials wait in a queue."""
        return self.backend.waits_in_queue

    def expected_steps(self, config: ParallelConfig) -> int | None:
        """Return the number of steps that the backend expects."""
        return self.backend.expected_steps(config)

    def reduced(self, to: Reduction) -> Self:
        """Return the backend of the proxy job, which shares these ranks."""
        return replace(self, backend=self.backend.reduced(to))

    def measure(
        self,
        config: ParallelConfig,
        *,
        trial_number: int,
        on_step: OnStep = ignore_step,
        on_start: OnStart = ignore_start,
    ) -> Observation:
        """Run one trial, and end the ranks that it leaves behind."""
        try:
            return self.backend.measure_on(
                self.ranks, config, trial_number=trial_number, on_step=on_step, on_start=on_start
            )
        finally:
            self.ranks.kill()
