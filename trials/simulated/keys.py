"""Keys of `trial: {backend: simulated}`, and the backend that they build."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hardware.io.errors import ConfigError
from trials.own_step import OwnStepPlans, World
from trials.simulated.backend import Fidelity, SimulatedBackend
from trials.simulated.own_step import OwnSimulatedBackend
from trials.trial_keys import AbstractTrialKeys, StudyParts


class SimulatedKeys(AbstractTrialKeys):
    """`trial:` with `backend: simulated`."""

    OWN_STEPS: ClassVar[frozenset[World]] = frozenset({"jax", "torch"})

    backend: Literal["simulated"]
    """A simulated world takes the place of trials; it differs from the tuner's cost model on purpose."""

    fidelity: Fidelity = "step_time"
    """Model that computes a step from operators and collectives: `step_time`, the closed form that the tuner uses too,
    or `simulator`, the event simulator, which takes up to some seconds a trial.
    """

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the world's errors."""

    noise: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Standard deviation of a step's time from step to step, as a share of the time."""

    operator_error: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Standard deviation of the cost model's errors about this world, as a share of each time."""

    num_steps: Annotated[int, Field(ge=1, le=1000)] = 5
    """Number of steps that a trial measures."""

    seconds_per_trial: Annotated[float, Field(ge=0)] = 0.0
    """Wall time that each trial pretends to take [s], spread over its steps."""

    def build_model(self, study: StudyParts) -> SimulatedBackend:
        """Build the simulated world of these keys."""
        setting, world = study.setting, self.model_dump(exclude={"backend", "time_limit", "proxy"})
        return SimulatedBackend(
            job=setting.job, cluster=setting.cluster, runtime=setting.runtime, knobs=study.knobs, **world
        )

    def build_own_step(self, study: StudyParts, steps: OwnStepPlans) -> OwnSimulatedBackend:
        """Build the simulated world of a step of the user's own.

        Raises:
            ConfigError: The event simulator is asked for.
        """
        if self.fidelity != "step_time":
            raise ConfigError(
                "cannot run a step of your own",
                key="trial.fidelity",
                value=self.fidelity,
                nearest=f"fidelity: step_time, or backend: {steps.step.world}, which runs it for real",
            )
        errors = self.model_dump(exclude={"backend", "time_limit", "proxy", "fidelity"})
        return OwnSimulatedBackend(steps=steps, cluster=study.cluster, **errors)
