"""A user's own step, and the contract of its plans; the tuner brings them, for backends that run such a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from costmodels.job.parallel_config import ParallelConfig

if TYPE_CHECKING:  # few studies are of a user's own step
    from costmodels.sharding.plan import Plan


World = Literal["jax", "torch"]
"""Library in which a step is written, and key under `model:` that names its factory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnStep:
    """Step that a user's factory returns; the graph of its plans is its trace.

    Attributes:
        world: Library in which it is written.
        factory: Factory as `module:factory`.
        folder: Folder that the module is looked for in first.
        micro_batches: Number of micro-batches of the step; 1 for factories that take no number.
    """

    world: World
    factory: str
    folder: str
    micro_batches: int = 1

    @property
    def key(self) -> str:
        """Key of the study file that names the factory."""
        return f"model.{self.world}"


class OwnStepPlans(Protocol):
    """Plans of the step that a user's factory returns, one for each candidate; it pickles."""

    @property
    def step(self) -> OwnStep:
        """Step of the plans, with one micro-batch."""

    @property
    def rows(self) -> int:
        """Rows of the batch: the first dim of the first input of a step with one micro-batch; 0 without inputs."""

    @property
    def tokens(self) -> int:
        """Number of elements of that input."""

    def step_of(self, config: ParallelConfig) -> OwnStep:
        """Return the step of a candidate."""

    def plan(self, config: ParallelConfig) -> Plan:
        """Return the plan of a candidate, on a mesh of all devices."""

    def step_time_s(self, config: ParallelConfig) -> tuple[float, float]:
        """Return the predicted time of compute and that of all collectives of a candidate [s]."""

    def peak_memory_bytes(self, config: ParallelConfig) -> float:
        """Return the predicted peak memory of a device of a candidate [bytes]."""
