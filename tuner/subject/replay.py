"""Published rows, which answer trials in place of a training."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodels.calibration.measured_runs import MeasuredGroup, MeasuredRun
from costmodels.calibration.sources import MeasuredSetting, source_of
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.space.enumeration import Space, SpaceOptions
from tuner.subject.ability import Ability
from tuner.subject.model import NO_SHARDINGS, AbstractModelSubject


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplaySubject(AbstractModelSubject):
    """Published rows of one job on one cluster.

    Attributes:
        predicted: Job, cluster and runtime that predict the rows.
        group: Rows.
    """

    predicted: Setting
    group: MeasuredGroup

    @property
    def measured_setting(self) -> MeasuredSetting:
        """Job, cluster and runtime; peaks are those that the rows' source published."""
        source = source_of(self.group.runs[0])
        return MeasuredSetting(setting=self.predicted, memory=source.memory, stage=source.stage)

    @property
    def rows(self) -> tuple[MeasuredRun, ...]:
        """Rows that trials replay."""
        return tuple(self.group.runs)

    def refusal(self, ability: Ability) -> str | None:
        """Refuse what needs runs that nobody has made."""
        match ability:
            case Ability.SHARDINGS:
                return NO_SHARDINGS
            case Ability.SIZES:
                return f"needs predictions of other sizes, and the measured rows ran on {self.group.devices} devices"
            case Ability.RULES:
                return "A replay contains exactly the measured configurations, so no rule removed any."
            case Ability.KNOBS:
                return "needs trials that run, and measured rows have one value of every knob"
        return None

    def with_setting(self, setting: Setting) -> ReplaySubject:
        """Return the rows as predicted in another setting."""
        return replace(self, predicted=setting)

    def reasons_against(
        self,
        options: SpaceOptions,  # noqa: ARG002 # the contract's
        chosen: ParallelConfig,
        space: Space,
    ) -> dict[str, str]:
        """Return the one reason of configurations that nobody measured."""
        if tuple(chosen.values(space.grid.dimensions).values()) in space.grid.positions():
            return {}
        return {"measured": f"is none of the {len(space.grid):,} measured configurations"}

    def space_lines(self, options: SpaceOptions, space: Space) -> list[str]:  # noqa: ARG002 # the contract's
        """Count the rows, those that failed, and those that were passed over."""
        runs, skipped = self.group.runs, self.group.skipped
        failed = sum(run.is_failed for run in runs)
        lines = [
            f"{len(runs):,} measured rows ({len(runs) - failed:,} ran, {failed:,} failed) "
            f"hold {len(space.grid):,} different configurations."
        ]
        if skipped:
            lines.append(f"  {skipped:,} further rows match, but lack part of the configuration or the step time")
        return lines
