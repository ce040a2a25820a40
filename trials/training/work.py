"""Work of the ranks of a trial; nothing here imports torch or JAX."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from costmodels.sharding.plan import Plan
from trials.backend import Clock
from trials.own_step import OwnStep
from trials.training.options import StepOptions

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AbstractWork(StepOptions, ABC):
    """Work of every rank of one trial.

    Attributes:
        clock: Clock of the step times.
        device: Kind of device that ranks compute on.
        profiles: Whether one more step is profiled for operator times, and recorded for communication on CPUs.
        is_by_hand: Whether layers are sharded by hand, and not as the study's planner found.
    """

    clock: Clock
    device: DeviceKind = "cpu"
    profiles: bool = False
    is_by_hand: bool = True

    @property
    @abstractmethod
    def num_devices(self) -> int:
        """Number of devices of all ranks together."""

    @property
    def records(self) -> bool:
        """Whether ranks record their communication: for the virtual clock, or to compare it with predictions."""
        return self.device == "cpu" and (self.clock == "virtual" or self.profiles)


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogStep:
    """Step of a model of the catalog, which the plan's graph describes.

    Attributes:
        top_k: Number of experts that a token of the model chooses; 0 for dense models.
    """

    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedWork(AbstractWork):
    """Work of every rank of one trial that runs a sharding plan, on CPUs.

    Attributes:
        step: Step that is run.
        plan: Plan of the step, whose mesh has the devices of all ranks in their order.
        memory_bytes: Memory of the smallest device [bytes].
    """

    step: CatalogStep | OwnStep
    plan: Plan
    memory_bytes: float

    @property
    def num_devices(self) -> int:
        """Number of devices of the plan's mesh."""
        return self.plan.mesh.num_devices
