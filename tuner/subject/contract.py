"""Contract of the subject of a study."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig, Value
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.step_time import StepEstimate
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from trials.knobs.knob import Knob
from tuner.export.exporter import Export
from tuner.own_step.answer import OwnAnswer
from tuner.plans.layer_planning import LayerPlanning
from tuner.space.enumeration import Space, SpaceOptions
from tuner.subject.ability import Ability

if TYPE_CHECKING:  # surrogates load scipy, and only a search and predictions with errors need them
    from costmodels.surrogates.uncertainty import StepUncertainty
    from tuner.search.earlier_runs import Past
    from tuner.search.posterior import Posterior

OnProgress = Callable[[str], None]
"""Function that is told what takes seconds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forecast:
    """Predictions of candidates.

    Attributes:
        estimate: Predicted step times by part.
        memory: Predicted memory by part.
    """

    estimate: StepEstimate
    memory: MemoryEstimate


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shardings:
    """Mesh and layouts with which a user's own step runs as a candidate.

    Attributes:
        answer: Mesh, and layouts of the tensors.
        module: Name of the module that an export writes.
        usage: Lines of Python that use the module.
    """

    answer: OwnAnswer
    module: str
    usage: tuple[str, ...]


class AbstractSubject(ABC):
    """Subject of a study, chosen once by the keys of its file.

    Candidates are configurations on all devices of the cluster, whatever is tuned. A subject enumerates them, predicts
    them, and says in words and as a program what they are. It knows nothing of the study's search, trials and storage.
    """

    @property
    @abstractmethod
    def cluster(self) -> Cluster:
        """Cluster of the study."""

    @property
    @abstractmethod
    def measured_setting(self) -> MeasuredSetting:
        """Job, cluster and runtime, with the meaning of memory peaks.

        Raises:
            ConfigError: The subject has no job and no runtime.
        """

    @property
    def setting(self) -> Setting:
        """Job, cluster and runtime.

        Raises:
            ConfigError: The subject has no job and no runtime.
        """
        return self.measured_setting.setting

    @property
    @abstractmethod
    def defaults(self) -> dict[str, Value]:
        """Values of the further dimensions where nothing else is said, by name."""

    @property
    @abstractmethod
    def rows(self) -> tuple[MeasuredRun, ...]:
        """Published rows that trials replay; empty for other subjects."""

    @property
    @abstractmethod
    def memory_digits(self) -> int:
        """Number of decimals with which tables print a candidate's memory in GiB."""

    @abstractmethod
    def refusal(self, ability: Ability) -> str | None:
        """Return why the subject lacks an ability, in one sentence; None if it has it."""

    def has(self, ability: Ability) -> bool:
        """Return whether the subject has an ability."""
        return self.refusal(ability) is None

    @abstractmethod
    def on_cluster(self, cluster: Cluster) -> AbstractSubject:
        """Return the subject on another state of its cluster."""

    @abstractmethod
    def with_setting(self, setting: Setting) -> AbstractSubject:
        """Return the subject with another setting.

        Raises:
            ConfigError: The subject has no job and no runtime.
        """

    @abstractmethod
    def current(self, stated: dict[str, Value] | None, options: SpaceOptions) -> ParallelConfig | None:
        """Return the configuration in use today, as the key `current` states it; None without the key.

        Raises:
            ConfigError: It cannot be launched, or a value is none.
        """

    @abstractmethod
    def space(
        self, options: SpaceOptions, *, current: ParallelConfig | None, measured: ConfigGrid | None = None
    ) -> Space:
        """Return the candidates that may fit in memory, and the current configuration.

        Args:
            options: Options of the search space.
            current: Configuration in use today.
            measured: Configurations outside which trials can measure none; None if they can measure all.

        Raises:
            ConfigError: There are too many to predict, or the current configuration is no candidate.
        """

    @abstractmethod
    def reasons_against(self, options: SpaceOptions, chosen: ParallelConfig, space: Space) -> dict[str, str]:
        """Return every reason that keeps a configuration out of a space, by the rule's name; empty for a candidate."""

    @abstractmethod
    def rule_reasons(self, options: SpaceOptions) -> dict[str, str]:
        """Return what each rule demands, in words, by its name."""

    @abstractmethod
    def check_launchable(
        self, options: SpaceOptions, chosen: ParallelConfig, *, current: ParallelConfig | None, missing: str
    ) -> tuple[str, ...]:
        """Return a note on each rule that a configuration breaks, which can be launched all the same.

        Args:
            options: Options of the search space.
            chosen: Configuration that the option `--config` names.
            current: Configuration in use today.
            missing: Parts that the cluster lacks at that time, in words.

        Raises:
            ConfigError: The configuration cannot be launched at all.
        """

    @abstractmethod
    def forecast(self, grid: ConfigGrid, memory: MemoryEstimate | None = None) -> Forecast:
        """Return the predictions of candidates, whose memory may be known already."""

    @abstractmethod
    def features(self, grid: ConfigGrid, estimate: StepEstimate) -> FloatArray:
        """Return the features of candidates for the surrogates [n, d]."""

    @abstractmethod
    def uncertainty(self, grid: ConfigGrid, memory: MemoryEstimate | None = None) -> StepUncertainty | None:
        """Return the errors of predicted step times; None where they are not known."""

    @abstractmethod
    def prior(self, grid: ConfigGrid, past: Past | None, *, on_progress: OnProgress = lambda _: None) -> Posterior:
        """Return the posterior of candidates before any trial, with what the history teaches."""

    @abstractmethod
    def utilisation(self, step_time_s: float) -> float:
        """Return the FLOPs of the step per second over the peak of all devices, at a step time."""

    @abstractmethod
    def throughput(self, step_time_s: float) -> float | None:
        """Return the throughput of one device at a step time [tokens/s]; None where a step has no known tokens."""

    @abstractmethod
    def title(self, devices: str) -> str:
        """Return what is tuned on these devices, in words."""

    @abstractmethod
    def space_lines(self, options: SpaceOptions, space: Space) -> list[str]:
        """Return lines on the number of candidates, and on those that each rule removed."""

    @abstractmethod
    def part_lines(self, breakdown_s: Mapping[str, float], step_time_s: float) -> list[str]:
        """Return a line for each part of a predicted step time."""

    @abstractmethod
    def columns(self, dimensions: Sequence[str]) -> tuple[str, ...]:
        """Return the dimensions of candidates that a table has to show."""

    @abstractmethod
    def shardings(self, chosen: ParallelConfig, name: str) -> Shardings | None:
        """Return the mesh and the layouts of a candidate of a study of this name; None where a framework makes both."""

    @abstractmethod
    def left_out(self) -> tuple[str, ...]:
        """Return a sentence for each mesh that has no candidate."""

    @abstractmethod
    def check_target(self, target: str) -> None:
        """Check that configurations can be exported to a target.

        Raises:
            ConfigError: They cannot.
        """

    @abstractmethod
    def export(
        self, chosen: ParallelConfig, target: str, *, knobs: Sequence[Knob], known: Callable[[], str], module: str
    ) -> Export:
        """Return a configuration in the form of a target that `check_target` lets through.

        Args:
            chosen: Configuration.
            target: Name of the target.
            knobs: Knobs of the study.
            known: Function that returns its step time with the source, in words.
            module: Name of the module, if the export is one.
        """

    @abstractmethod
    def meaning(self, options: SpaceOptions, planning: LayerPlanning, knobs: Sequence[Knob]) -> dict[str, Any]:
        """Return the resolved values under the study file's keys that give a trial its meaning, as JSON."""

    @abstractmethod
    def as_stored(self) -> dict[str, Any]:
        """Return what a run keeps of the subject with its study, as JSON; empty for nothing."""

    @abstractmethod
    def restore(self, stored: Mapping[str, Any]) -> None:
        """Take over what `as_stored` returned earlier."""
