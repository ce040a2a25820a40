"""Keys of `trial: {backend: simulated}`, and the backend that they build."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hardware.io.errors import ConfigError
from trials.own_step import World
from trials.simulated.backend import Fidelity, SimulatedBackend
from trials.simulated.own_step import OwnSimulatedBackend
from trials.time_limit import TimeLimit
from trials.trial_keys import AbstractTrialKeys, ProxyOptions, StudyParts


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

    time_limit: TimeLimit | None = None
    """Time after which a trial is cut off; the steps that it measured are kept. As in Slurm, `30:00` is minutes and
    `1:30:00` is hours; `2-00:00:00` is days. A plain number is in seconds.
    """

    proxy: ProxyOptions | None = None
    """Smaller jobs that run in place of candidates before any runs at full size; see below."""

    def build(self, study: StudyParts) -> SimulatedBackend | OwnSimulatedBackend:
        """Build the simulated world of these keys.

        Raises:
            ConfigError: The event simulator is asked for a step of the user's own.
        """
        if study.own_step is not None:
            if self.fidelity != "step_time":
                raise ConfigError(
                    "cannot run a step of your own",
                    key="trial.fidelity",
                    value=self.fidelity,
                    nearest=f"fidelity: step_time, or backend: {study.own_step.step.world}, which runs it for real",
                )
            errors = self.model_dump(exclude={"backend", "time_limit", "proxy", "fidelity"})
            return OwnSimulatedBackend(steps=study.own_step, cluster=study.setting.cluster, **errors)
        setting, world = study.setting, self.model_dump(exclude={"backend", "time_limit", "proxy"})
        return SimulatedBackend(
            job=setting.job, cluster=setting.cluster, runtime=setting.runtime, knobs=study.knobs, **world
        )
