"""Model of the catalog, or of a file, under the framework of a runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.parallel_config import FURTHER_DIMENSIONS, HAND, ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from tuner.space.enumeration import Space, SpaceOptions, why_not
from tuner.subject.ability import Ability
from tuner.subject.model import NO_SHARDINGS, AbstractModelSubject


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CatalogSubject(AbstractModelSubject):
    """Model of the catalog under a framework.

    Attributes:
        trained: Job, cluster and runtime.
    """

    trained: Setting

    @property
    def measured_setting(self) -> MeasuredSetting:
        """Job, cluster and runtime; peaks are those of the device."""
        return MeasuredSetting(setting=self.trained, memory="device", stage="fullest")

    @property
    def rows(self) -> tuple[MeasuredRun, ...]:
        """No rows: trials run."""
        return ()

    def refusal(self, ability: Ability) -> str | None:
        """Refuse shardings alone."""
        return NO_SHARDINGS if ability is Ability.SHARDINGS else None

    def with_setting(self, setting: Setting) -> CatalogSubject:
        """Return the model in another setting."""
        return replace(self, trained=setting)

    def reasons_against(self, options: SpaceOptions, chosen: ParallelConfig, space: Space) -> dict[str, str]:
        """Return the broken rules, dimensions that the study fixes otherwise, and plans that nobody makes."""
        # a dimension that the study does not open has the job's value
        fixed = self.defaults
        reasons = why_not(self.setting, options, chosen) | {
            f"job.{name}": f"the study fixes {name} to {fixed[name]}; space.{name} would search it"
            for name in FURTHER_DIMENSIONS
            if name not in options.opened and name != "plan" and chosen.values([name])[name] != fixed[name]
        }
        if not reasons and options.pins:
            held = self.holds_pins(options, ConfigGrid.from_configs([chosen], options.opened), is_all=False)
            reasons |= {} if held[0] else {"pins": self.rule_reasons(options)["pins"]}
        is_candidate = tuple(chosen.values(space.grid.dimensions).values()) in space.grid.positions()
        if not reasons and chosen.plan != HAND and not is_candidate:
            reasons["plan"] = (
                f"no plan of {chosen.plan} is known for layers of this shape that differs from the one by hand"
            )
        if not reasons and chosen.assignment and not is_candidate:
            reasons["assignment"] = f"is not what is planned for these degrees: {_planned_for(space, chosen)}"
        return reasons

    def space_lines(self, options: SpaceOptions, space: Space) -> list[str]:
        """Count the configurations that obey every rule and fit, and the raw combinations that each rule removed."""
        feasible, fitting = len(space.grid), space.num_before_memory - space.removed.get("memory", 0)
        current = "; the current configuration is kept as well" if feasible > fitting else ""
        lines = [
            f"{space.num_before_memory:,} configurations obey every rule, {fitting:,} of them may fit in "
            f"memory{current}."
        ]
        if "memory" in space.removed:
            profiles = "its own profile" if self.setting.runtime.knows_memory else "every runtime profile"
            lines.append(
                f"  {space.removed['memory']:,} are predicted by {profiles} to need more than a device's memory minus "
                "the headroom"
            )
        by_rules = {name: count for name, count in space.removed.items() if name != "memory"}
        if by_rules:
            lines.append("Combinations of degrees removed by each rule:")
        reasons = self.rule_reasons(options)
        for name, count in sorted(by_rules.items(), key=lambda entry: -entry[1]):
            rule = reasons.get(name, "").partition(":")[0]
            lines.append(f"  {name:<20} {count:>9,}  {rule}".rstrip())
        return lines


def _planned_for(space: Space, chosen: ParallelConfig) -> str:
    """Return the uneven work of the candidate that otherwise equals a configuration."""
    others = [name for name in space.grid.dimensions if name != "assignment"]
    for position in np.flatnonzero(space.grid.assignment).tolist():
        candidate = space.grid.config(position)
        if candidate.values(others) == chosen.values(others):
            return str(candidate.assignment)
    return "even work"
