"""What the ranks of a trial are to do, and what they tell of it; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from trials.backend import Clock
from trials.profiling.operator_profile import RankProfile
from trials.torch_training.profiling.rank_recording import RankRecording

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """The work of every rank of one trial.

    Attributes:
        job: What is trained.
        runtime: How layers fall to stages.
        config: The configuration.
        device: What ranks compute on.
        clock: What is measured of each step; with the virtual one, ranks record what they do.
        seed: Of weights and data.
        warmup_steps: Steps before the first measured one.
        min_steps: Measured steps at least.
        max_steps: Measured steps at most.
        precision: Measuring ends when the median's relative standard error is below this.
        capacity_factor: Most copies that an expert takes, over its even share; None drops nothing.
        profiles: Whether one more step is profiled for operator times, and on CPUs recorded for what is communicated.
    """

    job: TrainingJob
    runtime: RuntimeProfile
    config: ParallelConfig
    device: DeviceKind
    clock: Clock
    seed: int
    warmup_steps: int
    min_steps: int
    max_steps: int
    precision: float
    capacity_factor: float | None
    profiles: bool

    @property
    def records(self) -> bool:
        """Whether ranks run on process groups that can record."""
        return self.device == "cpu" and (self.clock == "virtual" or self.profiles)


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A rank on a CPU runs.

    Attributes:
        resident_bytes: What its process holds before it trains.
    """

    resident_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A rank has built its part and trained the warm-up steps.

    Attributes:
        group_s: Time until the process group was formed.
        build_s: Time of building the model.
        warmup_s: Time of the warm-up steps.
    """

    group_s: float
    build_s: float
    warmup_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTaken:
    """One measured step of one rank.

    Attributes:
        number: Of the step, from 0.
        wall_s: Wall clock of the slowest rank.
        cpu_s: CPU time of all ranks together, all their threads.
        loss: Mean over the tokens of the batch.
        recording: What this rank did in it; only for the virtual clock.
    """

    number: int
    wall_s: float
    cpu_s: float
    loss: float
    recording: RankRecording | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A rank has done all.

    Attributes:
        peak_bytes: Most memory that training held on its device; without what the process had before on a CPU.
        profile_s: Time of the profiled step.
        profile: Its operators' times; None if nobody asked.
        recording: What this rank did in the profiled step; only on CPUs.
    """

    peak_bytes: int
    profile_s: float
    profile: RankProfile | None
    recording: RankRecording | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A rank could not go on.

    Attributes:
        is_out_of_memory: Whether the error says that it lacked memory.
        is_memory_used_up: Whether it could hardly have had more memory, whatever the error says.
        reason: The error in a line.
        text: The traceback.
        peak_bytes: Most memory that it held until then.
    """

    is_out_of_memory: bool
    is_memory_used_up: bool
    reason: str
    text: str
    peak_bytes: int
