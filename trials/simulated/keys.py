"""Keys of `trial: {backend: simulated}`, and the backend that they build."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trials.simulated.backend import Fidelity, SimulatedBackend
from trials.trial_keys import AbstractTrialKeys, ProxyKeys, TrialSetting


class SimulatedKeys(AbstractTrialKeys):
    """`trial:` with `backend: simulated`."""

    backend: Literal["simulated"]
    """Trials are answered by a simulated world, which the tuner's model gets wrong on purpose."""

    fidelity: Fidelity = "step_time"
    """What makes a step of operators and collectives: `step_time`, the closed form that the tuner believes in too, or
    `simulator`, the event simulator, which takes up to some seconds a trial.
    """

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Which world."""

    noise: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Spread of one step's time from step to step, as a share of it."""

    operator_error: Annotated[float, Field(ge=0, le=1)] = 0.3
    """How wrong the cost model is about this world, as a share of each time."""

    num_steps: Annotated[int, Field(ge=1, le=1000)] = 5
    """Steps that a trial measures."""

    seconds_per_trial: Annotated[float, Field(ge=0)] = 0.0
    """Wall time that each trial pretends to take [s], spread over its steps."""

    time_limit_s: Annotated[float, Field(gt=0)] | None = None
    """A trial is cut off after this [s]; the steps that it measured are kept."""

    proxy: ProxyKeys | None = None
    """Smaller jobs that run in place of candidates before any runs at full size; see below."""

    def build(self, setting: TrialSetting) -> SimulatedBackend:
        """Build the simulated world of these keys."""
        return SimulatedBackend(
            job=setting.job,
            cluster=setting.cluster,
            runtime=setting.runtime,
            fidelity=self.fidelity,
            seed=self.seed,
            noise=self.noise,
            operator_error=self.operator_error,
            num_steps=self.num_steps,
            seconds_per_trial=self.seconds_per_trial,
        )
