"""Keys of `trial: {backend: torch}`, and the backend that they build."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.own_step import World
from trials.rank_backend import is_cpu_cluster
from trials.torch_training.backend import TorchBackend
from trials.torch_training.framework import TORCH
from trials.torch_training.trainable import check_trainable
from trials.training.backend import AbstractTrainingBackend
from trials.training.framework import Framework
from trials.training.keys import PROCESSORS, AbstractTrainingKeys
from trials.training.plannable import check_plannable
from trials.training.planned import PlannedBackend
from trials.trial_keys import StudyParts

PLANNED = "torch-planned"
"""Rules of the runtime whose candidates run as sharding plans."""

RULE_SETS = ("torch-reference", PLANNED)


class TorchKeys(AbstractTrainingKeys):
    """`trial:` with `backend: torch`."""

    OWN_STEPS: ClassVar[frozenset[World]] = frozenset({"torch"})
    FRAMEWORK: ClassVar[Framework] = TORCH
    FOR_MODELS: ClassVar[tuple[str, ...]] = ("capacity_factor", "profile")

    backend: Literal["torch"]
    """Trials train the model with PyTorch; see [real training](research/real-training.md). With `runtime:
    torch-planned` they execute each candidate's sharding plan operator by operator. A step of your own trains as its
    plans shard it ([own-step.md](own-step.md)).
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks: `cpu` (gloo) or `cuda` (NCCL); `auto` follows the cluster's devices."""

    capacity_factor: Annotated[float, Field(gt=0, le=100)] | None = None
    """Capacity of an expert, relative to its even share of a rank's tokens; it drops the tokens beyond.

    Default: none: nothing is dropped
    """

    spread: bool = False
    """Whether every host is a machine of the Ray cluster on CPUs too; else one machine stands for all hosts."""

    profile: bool = True
    """Whether one more step is profiled for the times of operators."""

    def build_model(self, study: StudyParts) -> AbstractTrainingBackend:
        """Build the backend that trains the study's model.

        Raises:
            ConfigError: This trainer cannot train the model, the runtime is another one, or two keys contradict.
        """
        options, runtime = self.step_options(), study.setting.runtime
        if runtime.rule_set not in RULE_SETS:
            raise ConfigError(
                "is not a runtime that the torch backend can train with",
                key="runtime",
                value=runtime.name,
                nearest="runtime: torch-reference, or torch-planned to run sharding plans",
            )
        options |= {"job": study.setting.job, "cluster": study.cluster, "profiles": self.profile}
        if runtime.rule_set == PLANNED:
            self._check_planned(study)
            return PlannedBackend(framework=TORCH, planner=study.step_planner, **options)
        check_trainable(study.setting.job)
        device = self.device if self.device != "auto" else "cpu" if is_cpu_cluster(study.cluster) else "cuda"
        if device == "cuda" and self.clock == "virtual":
            raise ConfigError(
                "measures CPU time, which says nothing about a GPU",
                key="trial.clock",
                value="virtual",
                nearest="clock: wall",
            )
        return TorchBackend(runtime=runtime, device=device, capacity_factor=self.capacity_factor, **options)

    def step_options(self) -> dict[str, Any]:
        """Return the options that every backend in torch has."""
        return super().step_options() | {"spreads": self.spread}

    def check_processors(self, cluster: Cluster, nearest: str = PROCESSORS) -> None:
        """Check that ranks can run sharding plans on the devices of a cluster.

        Raises:
            ConfigError: They are no processors, or the ranks shall run on others.
        """
        if self.device == "cuda" or not is_cpu_cluster(cluster):
            raise ConfigError(
                "has devices on which the torch backend cannot run sharding plans",
                key="cluster",
                value=cluster.name,
                nearest=nearest,
            )

    def _check_planned(self, study: StudyParts) -> None:
        """Check that ranks can execute the study's plans.

        Raises:
            ConfigError: A part of the model, the devices or a key are not for plans.
        """
        self.check_processors(study.cluster, f"runtime: torch-reference, or {PROCESSORS}")
        if self.capacity_factor is not None:
            raise ConfigError(
                "is for experts, which no plan of the torch backend has",
                key="trial.capacity_factor",
                value=self.capacity_factor,
                nearest="leave it out",
            )
        check_plannable(
            study.setting.job, backend="torch", nearest="a model with plain attention and heads of an even size"
        )
