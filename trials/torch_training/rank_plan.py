"""Plan that the ranks of a trial execute, and the messages that they send; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.plan import Plan
from trials.backend import Clock
from trials.own_step import OwnStep
from trials.profiling.operator_profile import RankProfile
from trials.step_options import StepOptions
from trials.torch_training.profiling.rank_recording import RankRecording

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions(StepOptions):
    """Options of training, which a study chooses and every rank follows.

    Attributes:
        job: Training job of the trial.
        runtime: Profile of the framework, which divides the layers into stages.
        device: Kind of device that ranks compute on.
        capacity_factor: Largest number of token copies that an expert takes, over its even share; None drops nothing.
        profiles: Whether one more step is profiled for operator times, and recorded for communication on CPUs.
    """

    job: TrainingJob
    runtime: RuntimeProfile
    device: DeviceKind
    capacity_factor: float | None = None
    profiles: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan(TrainingOptions):
    """Work of every rank of one trial.

    Attributes:
        config: Configuration that the ranks run.
        clock: Clock of the step times; with the virtual clock, ranks record their operations.
        sharding: Plan that the ranks execute operator by operator; None for the trainer's own modules.
        is_by_hand: Whether that plan is the one by hand, and not the one that the study's planner found.
    """

    config: ParallelConfig
    clock: Clock
    sharding: Plan | None = None
    is_by_hand: bool = True

    @property
    def records(self) -> bool:
        """Whether ranks run on process groups that can record."""
        return self.device == "cpu" and (self.clock == "virtual" or self.profiles)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnRankPlan(StepOptions):
    """Work of every rank of one trial of a user's own step.

    Attributes:
        step: Step that the ranks train.
        config: Configuration that the ranks run.
        clock: Clock of the step times; with the virtual clock, ranks record their operations.
        sharding: Plan of the step.
        is_by_hand: Whether it is a plan by hand, and not the one that the study's planner found.
        memory_bytes: Memory of the smallest device [bytes].
        device: Kind of device; such plans run on CPUs.
        profiles: Whether operators are timed; they are the user's.
    """

    step: OwnStep
    config: ParallelConfig
    clock: Clock
    sharding: Plan
    is_by_hand: bool
    memory_bytes: float
    device: ClassVar[DeviceKind] = "cpu"
    profiles: ClassVar[bool] = False

    @property
    def records(self) -> bool:
        """Whether ranks run on process groups that can record."""
        return self.clock == "virtual"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Message of a rank that it has built its part of the model and trained the warm-up steps.

    Attributes:
        group_s: Time until the process group was formed [s].
        build_s: Time of building the model [s].
        warmup_s: Time of the warm-up steps [s].
    """

    group_s: float
    build_s: float
    warmup_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTaken:
    """Message of a rank that it has measured a step.

    Attributes:
        number: Number of the step, from 0.
        wall_s: Wall clock of the slowest rank [s].
        cpu_s: CPU time of all threads of all ranks together [s].
        loss: Mean loss over the tokens of the batch.
        recording: Operations of this rank in the step; only for the virtual clock.
    """

    number: int
    wall_s: float
    cpu_s: float
    loss: float
    recording: RankRecording | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Message of a rank that it has finished its plan.

    Attributes:
        peak_bytes: Peak memory of training on the rank's device [bytes]; on a CPU without the memory before training.
        profile_s: Time of the profiled step [s].
        profile: Operator times of the profiled step; None if the plan does not profile.
        recording: Operations of this rank in the profiled step; only on CPUs.
    """

    peak_bytes: int
    profile_s: float
    profile: RankProfile | None
    recording: RankRecording | None = None
