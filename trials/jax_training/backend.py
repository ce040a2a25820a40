"""Backend `jax`: a trial runs a jitted training step of the model, sharded by the candidate's plan, on CPUs.

The devices of a host of the cluster are virtual devices of one process, and the processes of all hosts are connected by
gloo. All of them run on one machine. A step time is wall clock if every device has a core. With more devices than
cores, wall clock would only show the total work, and a virtual clock takes its place: the CPU time of one device's
share of the step, alone, and the time of its collectives on the cluster's links. The observation names the clock.

JAX itself is imported by the processes of a trial alone.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from costmodels.job.parallel_config import HAND, ParallelConfig
from costmodels.job.proxy_job import Reduction
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.backend import Clock, HostNeeds, Observation, OnStart, OnStep, TrialAbility
from trials.jax_training.rank_plan import GraphStep, StepWork
from trials.jax_training.rank_watch import watch_ranks
from trials.processor_time import num_cores
from trials.rank_backend import AbstractRankBackend
from trials.ranks.contract import AbstractRanks, RankSetup
from trials.step_options import StepOptions
from trials.step_planner import StepPlanner

ClockChoice = Literal["auto", "wall", "virtual", "cpu"]

JAX_RANKS = RankSetup(
    modules=("jax", "jax.experimental.multihost_utils", "trials.jax_training.rank_program"),
    environment=(("JAX_PLATFORMS", "cpu"),),
)
"""Setup that imports JAX once for all processes; none of its backends starts before they are forked."""


class AbstractJaxBackend(AbstractRankBackend):
    """Backend whose trials run a step in JAX, whatever the step; subclasses are dataclasses with these attributes.

    Attributes:
        cluster: Cluster of the study, whose devices stand for cores.
        chosen_clock: Clock of the step times; `auto` is the wall clock if every device has a core to itself, else the
            virtual one.
        cores: Number of cores of the machine, as the study's driver saw them.
        hang_limit_s: Silence of the processes that means a hang [s].
    """

    __slots__ = ()

    cluster: Cluster
    chosen_clock: ClockChoice
    cores: int
    hang_limit_s: float

    @abstractmethod
    def work(self, config: ParallelConfig) -> StepWork:
        """Return the work of each process in a trial."""

    @property
    @abstractmethod
    def fixed_steps(self) -> int | None:
        """Number of measured steps if it is fixed; None if it depends on the precision."""

    @property
    def clock(self) -> Clock:
        """Clock of the step times: the chosen one, or the wall clock if it is meaningful, else a virtual one."""
        if self.chosen_clock != "auto":
            return self.chosen_clock
        return "wall" if self.cluster.num_devices <= self.cores else "virtual"

    @property
    def hosts(self) -> tuple[HostNeeds, ...]:
        """Resources of a trial: one core per device, on one machine that stands for all hosts."""
        return (HostNeeds(cpus=self.cluster.num_devices, processes=self.cluster.num_hosts),)

    @property
    def rank_setup(self) -> RankSetup:
        """Modules that the processes find imported: JAX and the step."""
        return JAX_RANKS

    def check(self) -> None:
        """Check that JAX is installed."""
        if importlib.util.find_spec("jax") is None:
            raise ConfigError(
                "needs JAX, which is not installed here",
                key="trial.backend",
                value="jax",
                nearest="pip install 'meshtune[jax]'",
            )

    def expected_steps(self, config: ParallelConfig) -> int | None:  # noqa: ARG002 # the contract's
        """Return the number of steps if it is fixed; None if it depends on the precision."""
        return self.fixed_steps

    def describe(self) -> dict[str, Any]:
        """Return the clock that `auto` has become."""
        return {"clock": self.clock}

    def measure_on(
        self,
        ranks: AbstractRanks,
        config: ParallelConfig,
        *,
        trial_number: int,  # noqa: ARG002 # the contract's
        on_step: OnStep,
        on_start: OnStart,  # noqa: ARG002 # no trial waits in a queue
    ) -> Observation:
        """Run some steps with one process per host of the cluster."""
        work = self.work(config)
        num_processes = self.cluster.num_hosts
        ranks.launch("trials.jax_training.rank_program:run_rank", work, num_ranks=num_processes)
        return watch_ranks(
            ranks, work, num_processes=num_processes, cores=num_cores(), hang_limit_s=self.hang_limit_s, on_step=on_step
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JaxBackend(StepOptions, AbstractJaxBackend):
    """Backend that trains a model of the catalog with JAX.

    Attributes:
        job: Training job of the trials.
        cluster: Cluster of the study, whose devices stand for cores.
        planner: Planner of the steps.
        chosen_clock: Clock of the step times; see AbstractJaxBackend.
        cores: Number of cores of the machine, as the study's driver saw them.
        hang_limit_s: Silence of the processes that means a hang [s].
    """

    job: TrainingJob
    cluster: Cluster
    planner: StepPlanner
    chosen_clock: ClockChoice = "auto"
    cores: int = field(default_factory=num_cores)
    hang_limit_s: float = 600.0

    @property
    def abilities(self) -> frozenset[TrialAbility]:
        """Abilities of trials: real training of sharding plans and of proxy jobs."""
        return frozenset({TrialAbility.TRAINING, TrialAbility.PLANS, TrialAbility.PROXIES})

    def reduced(self, to: Reduction) -> Self:
        """Return the backend that trains the proxy job on fewer hosts, by the same clock."""
        return replace(self, job=to.job(self.job), cluster=to.cluster(self.cluster), chosen_clock=self.clock)

    def work(self, config: ParallelConfig) -> StepWork:
        """Return the work of each process in a trial."""
        is_by_hand = config.plan == HAND
        plan = self.planner.plan(self.job, self.cluster, config, is_by_hand=is_by_hand)
        return StepWork(
            **{option.name: getattr(self, option.name) for option in fields(StepOptions)},
            step=GraphStep(top_k=self.job.model.top_k),
            plan=plan,
            is_by_hand=is_by_hand,
            memory_bytes=min(device.memory_bytes for device in self.cluster.devices),
            clock=self.clock,
        )
