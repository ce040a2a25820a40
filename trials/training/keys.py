"""Base of the keys of backends that train by themselves."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import Field

from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.own_step import OwnStepPlans
from trials.training.backend import ClockChoice
from trials.training.framework import Framework
from trials.training.planned import OwnStepBackend
from trials.trial_keys import AbstractTrialKeys, StudyParts

PROCESSORS = "a cluster of processors, for example cluster: {name: cpu-host}"
"""What a study with other devices can have instead."""


class AbstractTrainingKeys(AbstractTrialKeys):
    """Keys of measuring, which a subclass adds its own to.

    Attributes:
        FRAMEWORK: Library that trains.
        FOR_MODELS: Names of keys that a step of the user's own has no use for.
    """

    FRAMEWORK: ClassVar[Framework]

    FOR_MODELS: ClassVar[tuple[str, ...]] = ()

    clock: ClockChoice = "auto"
    """Clock of the step times; `auto` is the wall clock if every rank has a device or core to itself, else the virtual
    clock, see [real training](research/real-training.md).
    """

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of weights and data."""

    warmup_steps: Annotated[int, Field(ge=1, le=100)] = 2
    """Number of steps before the first measured one."""

    min_steps: Annotated[int, Field(ge=1, le=1000)] = 5
    """Smallest number of measured steps."""

    max_steps: Annotated[int, Field(ge=1, le=1000)] = 20
    """Largest number of measured steps."""

    precision: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Relative standard error of the median below which measuring ends."""

    hang_limit_s: Annotated[float, Field(gt=0)] = 120.0
    """Silence of all ranks after which a trial counts as hanging [s]."""

    @abstractmethod
    def check_processors(self, cluster: Cluster, nearest: str = PROCESSORS) -> None:
        """Check that trials can run sharding plans on the devices of a cluster.

        Raises:
            ConfigError: They are no processors.
        """

    def build_own_step(self, study: StudyParts, steps: OwnStepPlans) -> OwnStepBackend:
        """Build the backend that runs a step of the user's own.

        Raises:
            ConfigError: The devices are no processors, a key is for models of the catalog, or two keys contradict.
        """
        options = self.step_options()
        self.check_processors(study.cluster)
        for key in self.FOR_MODELS:
            if key in self.model_fields_set:
                raise ConfigError(
                    "is for models of the catalog, not for a step of your own",
                    key=f"trial.{key}",
                    value=getattr(self, key),
                    nearest="leave it out",
                )
        return OwnStepBackend(framework=self.FRAMEWORK, steps=steps, cluster=study.cluster, **options)

    def step_options(self) -> dict[str, Any]:
        """Return the options that every backend of the library has.

        Raises:
            ConfigError: The largest number of measured steps is below the smallest.
        """
        if self.max_steps < self.min_steps:
            rule = f"must be at least min_steps, which is {self.min_steps}"
            raise ConfigError(rule, key="trial.max_steps", value=self.max_steps)
        names = ("seed", "warmup_steps", "min_steps", "max_steps", "precision", "hang_limit_s")
        return {name: getattr(self, name) for name in names} | {"chosen_clock": self.clock}
