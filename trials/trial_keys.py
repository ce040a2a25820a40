"""Contract of a study file's `trial:` section: every backend brings the keys that configure it.

A backend's folder holds a subclass of `AbstractTrialKeys` in its `keys.py`. Its fields are the keys that a user may
write, and its `build` turns them into the backend. `trials/registry.py` lists all of them; nothing else in Meshtune
knows which backends there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from costmodels.calibration.measured_runs import MeasuredGroup
from costmodels.job.setting import Setting
from hardware.cluster import Cluster
from hardware.io.config_file import DocumentedModel
from trials.backend import AbstractBackend
from trials.framework_flags import FlagExporter
from trials.knobs.knob import Knob
from trials.own_step import OwnStepPlans, World
from trials.step_planner import StepPlanner
from trials.time_limit import TimeLimit

PositiveInt = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


def _check_layers(layers: int | str) -> int | str:
    if layers != "auto" and (isinstance(layers, str) or layers < 1):
        raise ValueError("must be auto or a whole number of at least 1")
    return layers


class ProxyOptions(DocumentedModel):
    """`trial.proxy:`."""

    hosts: PositiveInt
    """Largest number of the cluster's hosts that a smaller job occupies."""

    layers: Annotated[int | str, AfterValidator(_check_layers)] = "auto"
    """Layers of the smaller job; `auto` keeps those of each pipeline stage."""

    stage: bool = False
    """Whether one pipeline stage runs alone where the hosts have no room for two."""

    full_trials: NotNegative = 3
    """Number of trials at full size that follow; with 0 the answer is extrapolated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectParts:
    """What a study tunes, for the backend of its trials; the backend takes what it runs.

    Attributes:
        setting: Job, cluster and runtime of the trials; None for a step of the user's own.
        measured: Measured runs that the trials replay, as `AbstractTrialKeys.measured_runs` returned them, or None.
        flag_exporters: Function that returns the exporters of the frameworks whose flags are known, by their names.
        own_step: Plans of the user's own step, in place of a job of the catalog; None in all other studies.
    """

    setting: Setting | None = None
    measured: MeasuredGroup | None = None
    flag_exporters: Callable[[], Mapping[str, FlagExporter]] = dict
    own_step: OwnStepPlans | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyParts:
    """Parts of a study that a backend is built from.

    Attributes:
        name: Name of the study.
        storage: Place of the study's storage, which tells it apart from others of the same name; without passwords.
        cluster: Cluster of the study.
        base_dir: Folder of the study file, to which paths in it are relative.
        subject: What the study tunes.
        step_planner: Planner of whole training steps, for backends that run sharding plans.
        knobs: Knobs of the study.
    """

    name: str
    storage: str
    cluster: Cluster
    base_dir: Path
    subject: SubjectParts
    step_planner: StepPlanner
    knobs: tuple[Knob, ...] = ()

    @property
    def setting(self) -> Setting:
        """Job, cluster and runtime of the trials, for backends of a step that is not the user's own."""
        assert self.subject.setting is not None, "a backend that takes steps of users asks for them first"
        return self.subject.setting


class AbstractTrialKeys(DocumentedModel, ABC):
    """Keys of one backend in a study's `trial:` section.

    A subclass declares the field `backend` with its name as a Literal, and its own keys. The docstring under a field is
    the field's text in the reference of study files.

    Attributes:
        WITHOUT_MEANING: Names of keys that a resumed study may change, because its recorded trials stay comparable.
        OWN_STEPS: Libraries of a user's own steps that the backend runs (`SubjectParts.own_step`).
    """

    WITHOUT_MEANING: ClassVar[frozenset[str]] = frozenset({"time_limit", "hang_limit_s", "seconds_per_trial", "proxy"})

    OWN_STEPS: ClassVar[frozenset[World]] = frozenset()

    RENAMED: ClassVar[Mapping[str, str]] = {"time_limit_s": "time_limit, which takes seconds too, or 30:00 as in Slurm"}

    backend: str
    """Name of the backend."""

    time_limit: TimeLimit | None = None
    """Time after which a trial is cut off; the steps that it measured are kept. As in Slurm, `30:00` is minutes and
    `1:30:00` is hours; `2-00:00:00` is days. A plain number is in seconds.
    """

    proxy: ProxyOptions | None = None
    """Smaller jobs that run in place of candidates before any runs at full size; see below."""

    def build(self, study: StudyParts) -> AbstractBackend:
        """Build the backend that runs the study's trials.

        Args:
            study: Parts of the study that the backend needs.

        Raises:
            ConfigError: The backend cannot run trials of this study.
        """
        own_step = study.subject.own_step
        return self.build_model(study) if own_step is None else self.build_own_step(study, own_step)

    @abstractmethod
    def build_model(self, study: StudyParts) -> AbstractBackend:
        """Build the backend of a study of a model of the catalog, or of published rows; see `build`."""

    def build_own_step(self, study: StudyParts, steps: OwnStepPlans) -> AbstractBackend:  # noqa: ARG002 # most refuse
        """Build the backend of a study of a step of the user's own; see `build`."""
        raise AssertionError(f"{study.name} has a step of the user's own, which OWN_STEPS lacks")

    def measured_runs(self, base_dir: Path) -> MeasuredGroup | None:  # noqa: ARG002 # most backends replay nothing
        """Read the measured runs that take the place of trials; None if trials are run.

        Args:
            base_dir: Folder of the study file, to which paths in it are relative.

        Raises:
            ConfigError: The rows are malformed or belong to several jobs.
        """
        return None

    def files_read(self) -> Iterable[tuple[str, str]]:
        """Return the files that the study reads: the key that names each one, and its path relative to the study."""
        return ()

    def files_written(self) -> Iterable[tuple[str, str]]:
        """Return the files and folders that trials write: the key that names each one, and its relative path."""
        return ()

    def framework(self) -> str | None:
        """Return the framework that the trials name, which the study's runtime may only resemble; None if none."""
        return None

    def own_words(self) -> Iterable[str]:
        """Return the words of the command whose flags trials exchange in place; nothing by default."""
        return ()

    def config_files(self) -> Iterable[str]:
        """Return the names of the files that trials get copies of, in which knobs have their values."""
        return ()

    def meaning(self) -> dict[str, Any]:
        """Return the keys that give a trial its meaning, as JSON; a resumed study must have the same ones."""
        return self.model_dump(exclude=set(self.WITHOUT_MEANING))
