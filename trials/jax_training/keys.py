"""Keys of `trial: {backend: jax}`, and the backend that they build."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.jax_training.framework import JAX
from trials.own_step import World
from trials.rank_backend import is_cpu_cluster
from trials.training.backend import ClockChoice
from trials.training.framework import Framework
from trials.training.keys import PROCESSORS, AbstractTrainingKeys
from trials.training.plannable import check_plannable
from trials.training.planned import PlannedBackend
from trials.trial_keys import ProxyOptions, StudyParts


class JaxKeys(AbstractTrainingKeys):
    """`trial:` with `backend: jax`."""

    OWN_STEPS: ClassVar[frozenset[World]] = frozenset({"jax"})
    FRAMEWORK: ClassVar[Framework] = JAX

    backend: Literal["jax"]
    """Trials run a jitted training step in JAX, sharded by the candidate's plan; see [real training with
    JAX](research/jax-training.md).
    """

    clock: ClockChoice = "auto"
    """Clock of the step times; `auto` is the wall clock if every device has a core to itself, else `virtual`, on which
    one device runs its share of the step alone and the cluster's links carry its collectives; `cpu` is the CPU time of
    all processes, which is a step's total work and not its layout.
    """

    warmup_steps: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of steps before the first measured one."""

    hang_limit_s: Annotated[float, Field(gt=0)] = 600.0
    """Silence of all processes after which a trial counts as hanging [s]; they are silent while XLA compiles."""

    proxy: ProxyOptions | None = None
    """Smaller jobs that may run in place of candidates; refused for a step of your own."""

    def build_model(self, study: StudyParts) -> PlannedBackend:
        """Build the backend that trains the study's model.

        Raises:
            ConfigError: This step cannot train the model, the runtime or the devices are others, or two keys
                contradict.
        """
        options, runtime = self.step_options(), study.setting.runtime
        if runtime.rule_set != "jax-reference":
            raise ConfigError(
                "is not a runtime that the jax backend can train with",
                key="runtime",
                value=runtime.name,
                nearest="runtime: jax-reference",
            )
        self.check_processors(study.cluster)
        check_plannable(
            study.setting.job,
            backend="jax",
            nearest="trial.backend: torch, or a model with plain attention",
            precisions=("fp32", "bf16"),
        )
        return PlannedBackend(
            framework=JAX, job=study.setting.job, cluster=study.cluster, planner=study.step_planner, **options
        )

    def check_processors(self, cluster: Cluster, nearest: str = PROCESSORS) -> None:
        """Check that processes can run sharding plans on the devices of a cluster.

        Raises:
            ConfigError: They are no processors.
        """
        if not is_cpu_cluster(cluster):
            raise ConfigError(
                "has devices that the jax backend cannot train on", key="cluster", value=cluster.name, nearest=nearest
            )
