"""Keys of `trial: {backend: torch}`, and the backend that they build."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.own_step import OwnStepPlans, World
from trials.plannable import check_plannable
from trials.rank_backend import is_cpu_cluster
from trials.step_options import check_numbers_of_steps
from trials.time_limit import TimeLimit
from trials.torch_training.backend import AbstractTorchBackend, ClockChoice, TorchBackend
from trials.torch_training.own_step.backend import OwnTorchBackend
from trials.torch_training.trainable import check_trainable
from trials.trial_keys import AbstractTrialKeys, ProxyOptions, StudyParts

PLANNED = "torch-planned"
"""Rules of the runtime whose candidates run as sharding plans."""

RULE_SETS = ("torch-reference", PLANNED)


class TorchKeys(AbstractTrialKeys):
    """`trial:` with `backend: torch`."""

    OWN_STEPS: ClassVar[frozenset[World]] = frozenset({"torch"})

    backend: Literal["torch"]
    """Trials train the model with PyTorch; see [real training](real-training.md). With `runtime: torch-planned` they
    execute each candidate's sharding plan operator by operator. A step of your own trains as its plans shard it
    ([own-step.md](own-step.md)).
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks: `cpu` (gloo) or `cuda` (NCCL); `auto` follows the cluster's devices."""

    clock: ClockChoice = "auto"
    """Clock of the step times; `auto` is the wall clock if every rank has a device or core to itself, else the virtual
    clock, see [real training](real-training.md).
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

    capacity_factor: Annotated[float, Field(gt=0, le=100)] | None = None
    """Capacity of an expert, relative to its even share of a rank's tokens; it drops the tokens beyond.

    Default: none: nothing is dropped
    """

    spread: bool = False
    """Whether every host is a machine of the Ray cluster on CPUs too; else one machine stands for all hosts."""

    profile: bool = True
    """Whether one more step is profiled for the times of operators."""

    hang_limit_s: Annotated[float, Field(gt=0)] = 120.0
    """Silence of all ranks after which a trial counts as hanging [s]."""

    time_limit: TimeLimit | None = None
    """Time after which a trial is cut off; the steps that it measured are kept. As in Slurm, `30:00` is minutes and
    `1:30:00` is hours; `2-00:00:00` is days. A plain number is in seconds.
    """

    proxy: ProxyOptions | None = None
    """Smaller jobs that run in place of candidates before any runs at full size; see below."""

    def build(self, study: StudyParts) -> AbstractTorchBackend:
        """Build the backend that trains the study's model.

        Raises:
            ConfigError: This trainer cannot train the model, the runtime is another one, or two keys contradict.
        """
        check_numbers_of_steps(self.min_steps, self.max_steps)
        if study.own_step is not None:
            return self._build_own_step(study.setting.cluster, study.own_step)
        runtime = study.setting.runtime
        if runtime.rule_set not in RULE_SETS:
            raise ConfigError(
                "is not a runtime that the torch backend can train with",
                key="runtime",
                value=runtime.name,
                nearest="runtime: torch-reference, or torch-planned to run sharding plans",
            )
        is_planned = runtime.rule_set == PLANNED
        if is_planned:
            self._check_planned(study)
        else:
            check_trainable(study.setting.job)
        device = self.device if self.device != "auto" else "cpu" if is_cpu_cluster(study.setting.cluster) else "cuda"
        if device == "cuda" and self.clock == "virtual":
            raise ConfigError(
                "measures CPU time, which says nothing about a GPU",
                key="trial.clock",
                value="virtual",
                nearest="clock: wall",
            )
        return TorchBackend(
            job=study.setting.job,
            cluster=study.setting.cluster,
            runtime=runtime,
            device=device,
            capacity_factor=self.capacity_factor,
            profiles=self.profile,
            planner=study.step_planner if is_planned else None,
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        """Return the options that every backend in torch has."""
        names = ("seed", "warmup_steps", "min_steps", "max_steps", "precision", "hang_limit_s")
        options = {name: getattr(self, name) for name in names}
        return options | {"chosen_clock": self.clock, "spreads": self.spread}

    def _build_own_step(self, cluster: Cluster, steps: OwnStepPlans) -> OwnTorchBackend:
        """Return the backend of a user's own step.

        Raises:
            ConfigError: The devices are no processors, or a key is for models of the catalog.
        """
        self._check_processors(cluster, "a cluster of processors, for example cluster: {name: cpu-host}")
        for key in ("capacity_factor", "profile"):
            if key in self.model_fields_set:
                raise ConfigError(
                    "is for models of the catalog, not for a step of your own",
                    key=f"trial.{key}",
                    value=getattr(self, key),
                    nearest="leave it out",
                )
        return OwnTorchBackend(steps=steps, cluster=cluster, **self._options())

    def _check_processors(self, cluster: Cluster, nearest: str) -> None:
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
        self._check_processors(
            study.setting.cluster,
            "runtime: torch-reference, or a cluster of processors, for example cluster: {name: cpu-host}",
        )
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
