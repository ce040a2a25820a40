"""Keys of `trial: {backend: jax}`, and the backend that they build."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.jax_training.backend import AbstractJaxBackend, ClockChoice, JaxBackend
from trials.jax_training.own_step.backend import OwnStepBackend
from trials.own_step import World
from trials.plannable import check_plannable
from trials.rank_backend import is_cpu_cluster
from trials.step_options import check_numbers_of_steps
from trials.time_limit import TimeLimit
from trials.trial_keys import AbstractTrialKeys, ProxyOptions, StudyParts


class JaxKeys(AbstractTrialKeys):
    """`trial:` with `backend: jax`."""

    OWN_STEPS: ClassVar[frozenset[World]] = frozenset({"jax"})

    backend: Literal["jax"]
    """Trials run a jitted training step in JAX, sharded by the candidate's plan; see [real training with
    JAX](jax-training.md).
    """

    clock: ClockChoice = "auto"
    """Clock of the step times; `auto` is the wall clock if every device has a core to itself, else `virtual`, on which
    one device runs its share of the step alone and the cluster's links carry its collectives; `cpu` is the CPU time of
    all processes, which is a step's total work and not its layout.
    """

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of weights and data."""

    warmup_steps: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of steps before the first measured one."""

    min_steps: Annotated[int, Field(ge=1, le=1000)] = 5
    """Smallest number of measured steps."""

    max_steps: Annotated[int, Field(ge=1, le=1000)] = 20
    """Largest number of measured steps."""

    precision: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Relative standard error of the median below which measuring ends."""

    hang_limit_s: Annotated[float, Field(gt=0)] = 600.0
    """Silence of all processes after which a trial counts as hanging [s]; they are silent while XLA compiles."""

    time_limit: TimeLimit | None = None
    """Time after which a trial is cut off; the steps that it measured are kept. As in Slurm, `30:00` is minutes and
    `1:30:00` is hours; `2-00:00:00` is days. A plain number is in seconds.
    """

    proxy: ProxyOptions | None = None
    """Smaller jobs that may run in place of candidates; refused for a step of your own."""

    def build(self, study: StudyParts) -> AbstractJaxBackend:
        """Build the backend that trains the study's model.

        Raises:
            ConfigError: This step cannot train the model, the runtime or the devices are others, or two keys
                contradict.
        """
        check_numbers_of_steps(self.min_steps, self.max_steps)
        if study.own_step is not None:
            self._check_cluster(study.setting.cluster)
            return OwnStepBackend(steps=study.own_step, cluster=study.setting.cluster, **self._options())
        runtime = study.setting.runtime
        if runtime.rule_set != "jax-reference":
            raise ConfigError(
                "is not a runtime that the jax backend can train with",
                key="runtime",
                value=runtime.name,
                nearest="runtime: jax-reference",
            )
        self._check_cluster(study.setting.cluster)
        check_plannable(
            study.setting.job,
            backend="jax",
            nearest="trial.backend: torch, or a model with plain attention",
            precisions=("fp32", "bf16"),
        )
        return JaxBackend(
            job=study.setting.job, cluster=study.setting.cluster, planner=study.step_planner, **self._options()
        )

    def _options(self) -> dict[str, Any]:
        """Return the options that every backend in JAX has."""
        names = ("seed", "warmup_steps", "min_steps", "max_steps", "precision", "hang_limit_s")
        return {name: getattr(self, name) for name in names} | {"chosen_clock": self.clock}

    @staticmethod
    def _check_cluster(cluster: Cluster) -> None:
        if not is_cpu_cluster(cluster):
            raise ConfigError(
                "has devices that the jax backend cannot train on",
                key="cluster",
                value=cluster.name,
                nearest="a cluster of processors, for example cluster: {name: cpu-host}",
            )
