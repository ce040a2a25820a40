"""Contract of the plans of a user's own step; the tuner brings them, for backends that run such a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from costmodels.job.parallel_config import ParallelConfig

if TYPE_CHECKING:  # few studies are of a user's own step
    from costmodels.sharding.plan import Plan


class OwnStepPlans(Protocol):
    """Plans of the step that a user's factory returns, one for each candidate; it pickles."""

    @property
    def factory(self) -> str:
        """Factory of the step, as `module:function`."""

    @property
    def folder(self) -> str:
        """Folder in which the factory's module is looked for first."""

    def plan(self, config: ParallelConfig) -> Plan:
        """Return the plan of a candidate, on a mesh of all devices."""

    def step_time_s(self, config: ParallelConfig) -> tuple[float, float]:
        """Return the predicted time of compute and that of all collectives of a candidate [s]."""

    def peak_memory_bytes(self, config: ParallelConfig) -> float:
        """Return the predicted peak memory of a device of a candidate [bytes]."""
