"""Problem of a study: the candidates of a subject, and the values that a search of them minimizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from costmodels.job.parallel_config import DEGREES, FURTHER_DIMENSIONS, ConfigGrid, ParallelConfig, Value
from costmodels.job.setting import Setting
from hardware.cluster import Cluster
from trials.knobs.knob import Knob, today_of
from tuner.knobs.known_knob import KnownKnob
from tuner.plans.layer_planning import LayerPlanning
from tuner.space.enumeration import Space, SpaceOptions
from tuner.subject.contract import AbstractSubject

_OF_LAYOUT = frozenset({*DEGREES, *FURTHER_DIMENSIONS})
"""Names of the values of a layout; all others are those of knobs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """Problem that a search solves. It knows neither the study's file nor its storage.

    Attributes:
        subject: What is tuned: a model of the catalog, a step of the user's own, or published rows.
        options: Options of the search space.
        planning: Planner that shards the layers of candidates.
        layer_plans: Planned layers by shape, as `layer_plans.summary_of` describes them; None for a shape without a
            plan by hand to compare with. See `tuner/forecast/planned_candidates.py`.
        objective: Names of the one value or two to minimize; see tuner/search/objectives.py.
        current: Configuration in use today, or None.
        measured: Configurations outside which trials can measure none; None if they can measure all.
        knobs: Knobs that are searched beside the layout.
        known_knobs: Entries of the catalog for those of them that it knows.
    """

    subject: AbstractSubject
    options: SpaceOptions
    planning: LayerPlanning
    objective: tuple[str, ...]
    current: ParallelConfig | None = None
    measured: ConfigGrid | None = None
    knobs: tuple[Knob, ...] = ()
    known_knobs: tuple[KnownKnob, ...] = ()
    layer_plans: Mapping[str, dict[str, Any] | None] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster:
        """Cluster of the study."""
        return self.subject.cluster

    @property
    def setting(self) -> Setting:
        """Job, cluster and runtime of the study.

        Raises:
            ConfigError: The study is of a step of the user's own.
        """
        return self.subject.setting

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of what identifies a candidate: the eight degrees, the opened dimensions, and the knobs."""
        return (*DEGREES, *self.options.opened, *(knob.name for knob in self.knobs))

    def with_knobs(self, chosen: ParallelConfig) -> ParallelConfig:
        """Return a configuration with a value of every knob, today's where it has none."""
        return replace(chosen, knobs=tuple((today_of(self.knobs) | dict(chosen.knobs)).items()))

    def config_of(self, values: Mapping[str, Value]) -> ParallelConfig:
        """Return the configuration with a candidate's values.

        All other dimensions are fixed by the job or, if trials can measure certain configurations only, by those.
        """
        # a trial may have knobs that the study had when it ran, such as one that was recommended then
        names = {name for name in values if name not in _OF_LAYOUT}
        if names or self.knobs:
            knobs = tuple((name, value) for name, value in values.items() if name in names)
            values = {name: value for name, value in values.items() if name not in names}
            return self.with_knobs(replace(self._layout_of(values), knobs=knobs))
        return self._layout_of(values)

    def _layout_of(self, values: Mapping[str, Value]) -> ParallelConfig:
        """Return the layout with a candidate's values of the dimensions."""
        if self.measured is not None:
            position = self.measured.positions().get(tuple(values[name] for name in self.measured.dimensions))
            if position is not None:
                return self.measured.config(position)
        return ParallelConfig(**(self.subject.defaults | dict(values)))  # type: ignore[arg-type] # checked by ParallelConfig

    def space(self) -> Space:
        """Enumerate and prune the candidates, and predict their memory.

        Raises:
            ConfigError: There are too many to predict, or the current configuration is no candidate.
        """
        return self.subject.space(self.options, current=self.current, measured=self.measured)
