"""Backend whose trials ask Acme's own performance model."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from costmodels.job.parallel_config import ParallelConfig
from trials.backend import AbstractBackend, Observation, OnStart, OnStep, Origin, Status, ignore_start, ignore_step
from trials.trial_keys import AbstractTrialKeys, ProxyOptions, StudyParts


class AcmeKeys(AbstractTrialKeys):
    """`trial:` with `backend: acme`."""

    backend: Literal["acme"]
    """Acme's performance model takes the place of trials."""

    penalty_s: Annotated[float, Field(ge=0)] = 0.5
    """Time that each pipeline stage and each rank of tp costs [s]."""

    proxy: ProxyOptions | None = None
    """Refused: the model knows full jobs only."""

    def build_model(self, study: StudyParts) -> AbstractBackend:
        """Build the backend of a study."""
        return AcmeBackend(penalty_s=self.penalty_s, num_devices=study.cluster.num_devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class AcmeBackend(AbstractBackend):
    """Performance model that likes neither pipelines nor tensor parallelism."""

    penalty_s: float
    num_devices: int

    @property
    def origin(self) -> Origin:
        """No device has measured these steps."""
        return "synthetic"

    def expected_steps(self, config: ParallelConfig) -> int:  # noqa: ARG002 # all have as many
        """Return the number of steps of a trial."""
        return 3

    def measure(
        self,
        config: ParallelConfig,
        *,
        trial_number: int,  # noqa: ARG002 # no file or log has it in its name
        on_step: OnStep = ignore_step,
        on_start: OnStart = ignore_start,  # noqa: ARG002 # no trial waits in a queue
    ) -> Observation:
        """Return the steps of a configuration."""
        step_time_s = 1 + self.penalty_s * (config.pp + config.tp - 2)
        for _ in range(3):
            on_step(step_time_s)
        return Observation(status=Status.OK, step_times_s=(step_time_s,) * 3, origin=self.origin)
