"""Backend `torch`: a trial trains the real model for some steps, with one process per device.

It runs on CPUs with gloo and on GPUs with NCCL. A step time is wall clock if every rank has its own device or core.
With more ranks than cores, wall clock would only show the total work. A virtual clock (`virtual_clock.py`) or the CPU
time of all ranks then takes its place. The observation names the clock.

torch itself is imported by the ranks alone.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from costmodels.job.parallel_config import HAND, ParallelConfig
from costmodels.job.proxy_job import Reduction
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.backend import Clock, HostNeeds, Observation, OnStart, OnStep, TrialAbility
from trials.processor_time import num_cores
from trials.rank_backend import AbstractRankBackend
from trials.ranks.contract import AbstractRanks, RankSetup
from trials.step_planner import StepPlanner
from trials.torch_training.rank_plan import DeviceKind, OwnRankPlan, RankPlan, TrainingOptions
from trials.torch_training.rank_setup import TORCH_RANKS
from trials.torch_training.rank_watch import watch_ranks

ClockChoice = Literal["auto", "wall", "virtual", "cpu"]


class AbstractTorchBackend(AbstractRankBackend):
    """Backend whose trials train with torch, whatever the step; subclasses are dataclasses with these attributes.

    Attributes:
        cluster: Cluster of the study; on CPUs its devices stand for cores, and the virtual clock uses its links.
        chosen_clock: Clock of the step times; `auto` is the wall clock if every rank has a device or core to itself,
            else the virtual clock.
        cores: Number of cores of a host, as the study's driver saw them.
        spreads: Whether every host of the cluster is a machine of its own on CPUs too.
        hang_limit_s: Silence of the ranks that means a hang [s].
    """

    __slots__ = ()

    cluster: Cluster
    chosen_clock: ClockChoice
    cores: int
    spreads: bool
    hang_limit_s: float

    @property
    @abstractmethod
    def kind(self) -> DeviceKind:
        """Kind of device that ranks compute on."""

    @property
    @abstractmethod
    def launch_limit_bytes(self) -> int | None:
        """Largest amount of data that a rank may add to its memory from its start on [bytes]; None for no limit."""

    @property
    @abstractmethod
    def fixed_steps(self) -> int | None:
        """Number of measured steps if it is fixed; None if it depends on the precision."""

    @abstractmethod
    def plan(self, config: ParallelConfig) -> RankPlan | OwnRankPlan:
        """Return the work of each rank in a trial."""

    @property
    def clock(self) -> Clock:
        """Clock of the step times: the chosen one, or the wall clock if it is meaningful, else the virtual clock."""
        if self.chosen_clock != "auto":
            return self.chosen_clock
        per_machine = self.cluster.devices_per_host if self.spreads else self.cluster.num_devices
        return "wall" if self.kind == "cuda" or per_machine <= self.cores else "virtual"

    @property
    def hosts(self) -> tuple[HostNeeds, ...]:
        """Resources of a trial: one core or GPU per rank. On CPUs one machine stands for all hosts unless spread."""
        if self.kind == "cpu" and not self.spreads:
            return (HostNeeds(cpus=self.cluster.num_devices),)
        per_host = self.cluster.devices_per_host
        needs = HostNeeds(cpus=per_host) if self.kind == "cpu" else HostNeeds(cpus=1, gpus=per_host)
        return (needs,) * self.cluster.num_hosts

    @property
    def wants_hosts_alone(self) -> bool:
        """Whether trials need their hosts alone: with GPUs or several hosts. On one CPU host each rank has a core."""
        return self.kind == "cuda" or len(self.hosts) > 1

    @property
    def rank_setup(self) -> RankSetup:
        """Modules that ranks find imported: torch and the trainer."""
        return TORCH_RANKS

    def check(self) -> None:
        """Check that torch is installed."""
        if importlib.util.find_spec("torch") is None:
            raise ConfigError(
                "needs torch, which is not installed here",
                key="trial.backend",
                value="torch",
                nearest="pip install 'meshtune[torch]'",
            )

    def expected_steps(self, config: ParallelConfig) -> int | None:  # noqa: ARG002 # the contract's
        """Return the number of steps if it is fixed; None if it depends on the precision."""
        return self.fixed_steps

    def describe(self) -> dict[str, Any]:
        """Return the device and the clock that `auto` has become."""
        return {"device": self.kind, "clock": self.clock}

    def measure_on(
        self,
        ranks: AbstractRanks,
        config: ParallelConfig,
        *,
        trial_number: int,  # noqa: ARG002 # the contract's
        on_step: OnStep,
        on_start: OnStart,  # noqa: ARG002 # no trial waits in a queue
    ) -> Observation:
        """Train some steps with one rank per device."""
        plan = self.plan(config)
        ranks.launch(
            "trials.torch_training.rank_program:run_rank",
            plan,
            num_ranks=config.num_devices,
            memory_limit_bytes=self.launch_limit_bytes,
        )
        return watch_ranks(
            ranks,
            plan,
            self.cluster,
            cores=num_cores() if len(self.hosts) == 1 else None,
            hang_limit_s=self.hang_limit_s,
            on_step=on_step,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBackend(TrainingOptions, AbstractTorchBackend):
    """Backend that trains a model of the catalog with torch.

    Attributes:
        cluster: Cluster of the study.
        chosen_clock: Clock of the step times; see AbstractTorchBackend.
        cores: Number of cores of a host, as the study's driver saw them.
        spreads: Whether every host of the cluster is a machine of its own on CPUs too.
        hang_limit_s: Silence of the ranks that means a hang [s].
        planner: Planner of the steps, if ranks execute sharding plans; None if they train with the trainer's modules.
    """

    cluster: Cluster
    chosen_clock: ClockChoice = "auto"
    cores: int = field(default_factory=num_cores)
    spreads: bool = False
    hang_limit_s: float = 120.0
    planner: StepPlanner | None = None

    @property
    def kind(self) -> DeviceKind:
        """Kind of device that ranks compute on: the chosen one."""
        return self.device

    @property
    def launch_limit_bytes(self) -> int | None:
        """Memory of the smallest device on CPUs [bytes]; GPUs have limits of their own."""
        return min(device.memory_bytes for device in self.cluster.devices) if self.device == "cpu" else None

    @property
    def abilities(self) -> frozenset[TrialAbility]:
        """Abilities of trials: real training, of sharding plans or else of proxy jobs.

        Candidates of a smaller job may have several micro-batches, which no plan of a step has.
        """
        return frozenset({TrialAbility.TRAINING, TrialAbility.PROXIES if self.planner is None else TrialAbility.PLANS})

    def reduced(self, to: Reduction) -> Self:
        """Return the backend that trains the proxy job on fewer hosts."""
        return replace(self, job=to.job(self.job), cluster=to.cluster(self.cluster))

    def plan(self, config: ParallelConfig) -> RankPlan:
        """Return the work of each rank in a trial."""
        options = {option.name: getattr(self, option.name) for option in fields(TrainingOptions)}
        if self.planner is None:
            return RankPlan(**options, config=config, clock=self.clock)
        # a study can switch rules off, and a step of another batch would be measured in silence
        assert self.job.global_batch_size == config.dp * config.mbs, f"{config} has one micro-batch as the rules demand"
        is_by_hand = config.plan == HAND
        sharding = self.planner.plan(self.job, self.cluster, config, is_by_hand=is_by_hand)
        return RankPlan(**options, config=config, clock=self.clock, sharding=sharding, is_by_hand=is_by_hand)
