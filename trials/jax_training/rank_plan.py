"""Work of the processes of a trial, and the messages that they send; nothing here imports JAX."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.sharding.plan import Plan
from trials.backend import Clock
from trials.own_step import OwnStep
from trials.step_options import StepOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphStep:
    """Step of a model of the catalog, which the plan's graph describes.

    Attributes:
        top_k: Number of experts that a token of the model chooses; 0 for dense models.
    """

    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepWork(StepOptions):
    """Work of every process of one trial.

    Attributes:
        step: Step that is run.
        plan: Plan of the step, whose mesh has the devices of all processes in their order.
        is_by_hand: Whether it is the plan by hand, and not the one that the study's planner found.
        memory_bytes: Memory of the smallest device [bytes].
        clock: Clock of the step times.
    """

    step: GraphStep | OwnStep
    plan: Plan
    is_by_hand: bool
    memory_bytes: float
    clock: Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Message of a process that it has compiled the step and run the warm-up steps.

    Attributes:
        group_s: Time until all processes were connected and JAX had its devices [s].
        compile_s: Time of tracing and compiling the step [s].
        build_s: Time of making weights and data, and of compiling the share of one device [s].
        warmup_s: Time of the warm-up steps [s].
        collectives_s: Time of the step's collectives on the links of the plan's cluster [s]; 0 on other clocks.
    """

    group_s: float
    compile_s: float
    build_s: float
    warmup_s: float
    collectives_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTaken:
    """Message of a process that it has measured a step.

    Attributes:
        wall_s: Wall clock of the slowest process [s].
        cpu_s: CPU time of all threads of all processes together [s].
        virtual_s: CPU time of the share of one device, alone, and the time of the step's collectives [s]; 0 on
            other clocks.
        loss: Mean loss over the tokens of the batch, before the step; of a user's step, the first number that it
            returns, and None if it returns none.
    """

    wall_s: float
    cpu_s: float
    virtual_s: float
    loss: float | None

    def seconds(self, clock: Clock) -> float:
        """Return the step time by a clock [s]."""
        return {"wall": self.wall_s, "cpu": self.cpu_s, "virtual": self.virtual_s}[clock]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Message of a process that it has finished its work.

    Attributes:
        peak_bytes: Memory of one device by XLA's analysis of the compiled step [bytes].
    """

    peak_bytes: int
