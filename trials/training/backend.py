"""Shared part of the backends that train by themselves, with torch or JAX.

A step time is wall clock if every device has a core or is a GPU. With more devices than cores, wall clock would only
show the total work. A virtual clock or the CPU time of all ranks then takes its place. The observation names the clock.

The library itself is imported by the ranks alone.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from costmodels.job.parallel_config import ParallelConfig
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from hardware.launched_hosts import launched
from trials.backend import Clock, HostNeeds, Observation, OnStart, OnStep
from trials.rank_backend import AbstractRankBackend
from trials.ranks.contract import AbstractRanks, RankSetup
from trials.training.framework import Framework
from trials.training.options import StepOptions
from trials.training.processor_time import num_cores
from trials.training.watch import watch_ranks
from trials.training.work import AbstractWork, DeviceKind

ClockChoice = Literal["auto", "wall", "virtual", "cpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AbstractTrainingBackend(StepOptions, AbstractRankBackend):
    """Backend whose trials train with a library, whatever the step.

    Attributes:
        framework: Library that trains.
        cluster: Cluster of the study; on CPUs its devices stand for cores, and the virtual clock uses its links.
        chosen_clock: Clock of the step times; `auto` is the wall clock if every device has a core to itself or is a
            GPU, else the virtual clock.
        cores: Number of cores of a host, as the study's driver saw them.
        spreads: Whether every host of the cluster is a machine of its own on CPUs too.
        hang_limit_s: Silence of the ranks that means a hang [s].
    """

    framework: Framework
    cluster: Cluster
    chosen_clock: ClockChoice = "auto"
    cores: int = field(default_factory=num_cores)
    spreads: bool = False
    hang_limit_s: float = 120.0

    @property
    def trial_in_words(self) -> str:
        """Sentence on what a trial is: processes of ours that train."""
        return (
            f"A trial of this study starts no command of yours: Meshtune trains with {self.framework.title}, in one "
            "process for each device, which Ray's workers start."
        )

    @abstractmethod
    def work(self, config: ParallelConfig) -> AbstractWork:
        """Return the work of each rank in a trial."""

    @property
    def kind(self) -> DeviceKind:
        """Kind of device that ranks compute on: CPUs, unless the backend knows others."""
        return "cpu"

    @property
    def launch_limit_bytes(self) -> int | None:
        """Largest amount of data that a rank may add to its memory from its start on [bytes]; None for no limit."""
        return None

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest device [bytes]."""
        return min(device.memory_bytes for device in self.cluster.devices)

    @property
    def clock(self) -> Clock:
        """Clock of the step times: the chosen one, or the wall clock if it is meaningful, else the virtual clock."""
        if self.chosen_clock != "auto":
            return self.chosen_clock
        per_machine = self.cluster.devices_per_host if self.spreads else self.cluster.num_devices
        return "wall" if self.kind == "cuda" or per_machine <= self.cores else "virtual"

    @property
    def hosts(self) -> tuple[HostNeeds, ...]:
        """Resources of a trial: one core or GPU per device. On CPUs one machine stands for all hosts unless spread."""
        if self.kind == "cpu" and not self.spreads:
            processes = self.cluster.num_hosts if self.framework.has_rank_per_host else None
            return (HostNeeds(cpus=self.cluster.num_devices, processes=processes),)
        started = launched(self.cluster)
        per_host = started.devices_per_host
        needs = HostNeeds(cpus=per_host) if self.kind == "cpu" else HostNeeds(cpus=1, gpus=per_host)
        return (needs,) * started.num_hosts

    @property
    def wants_hosts_alone(self) -> bool:
        """Whether trials need their hosts alone: with GPUs or several hosts. On one CPU host each device has a core."""
        return self.kind == "cuda" or len(self.hosts) > 1

    @property
    def rank_setup(self) -> RankSetup:
        """Modules that ranks find imported: the library and the program."""
        return self.framework.ranks

    def check(self) -> None:
        """Check that the library is installed."""
        name, title = self.framework.name, self.framework.title
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"needs {title}, which is not installed here",
                key="trial.backend",
                value=name,
                nearest=f"pip install 'meshtune[{name}]'",
            )

    def expected_steps(self, config: ParallelConfig) -> int | None:  # noqa: ARG002 # the contract's
        """Return the number of steps if it is fixed; None if it depends on the precision."""
        return self.fixed_steps

    def describe(self) -> dict[str, Any]:
        """Return the clock that `auto` has become, and the device where the library has several kinds."""
        device = {"device": self.kind} if len(self.framework.devices) > 1 else {}
        return device | {"clock": self.clock}

    def measure_on(
        self,
        ranks: AbstractRanks,
        config: ParallelConfig,
        *,
        trial_number: int,  # noqa: ARG002 # the contract's
        on_step: OnStep,
        on_start: OnStart,  # noqa: ARG002 # no trial waits in a queue
    ) -> Observation:
        """Run some steps with one rank per device, or per host of the cluster."""
        work = self.work(config)
        num_ranks = launched(self.cluster).num_hosts if self.framework.has_rank_per_host else config.num_devices
        ranks.launch(self.framework.program, work, num_ranks=num_ranks, memory_limit_bytes=self.launch_limit_bytes)
        return watch_ranks(
            ranks,
            work,
            self.framework,
            self.cluster,
            num_ranks=num_ranks,
            cores=num_cores() if len(self.hosts) == 1 else None,
            hang_limit_s=self.hang_limit_s,
            on_step=on_step,
        )

    def step_options(self) -> dict[str, Any]:
        """Return the options of measuring by name."""
        return {option.name: getattr(self, option.name) for option in fields(StepOptions)}
