"""What a study's answer is compared with: the configuration in use today, or without one a sane baseline.

The baseline is a candidate and the first trial, as the current configuration is; tuner/answers/baseline.py says which.
A study keeps it when it is opened for the first time, so that the same is compared with ever after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from optuna import Study

from costmodels.job.parallel_config import ParallelConfig, Value
from tuner.answers.baseline import baseline_position
from tuner.answers.candidates import Candidates
from tuner.storage.record import BASELINE, TrialRecord, step_time_of
from tuner.study_file.config import StudyConfig

Role = Literal["current", "baseline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A configuration to compare with.

    Attributes:
        role: Whether it is in use today, or follows from a rule.
        config: The configuration.
        values: The same by the dimensions of a candidate.
    """

    role: Role
    config: ParallelConfig
    values: Mapping[str, Value]

    @property
    def in_words(self) -> str:
        """What it is called."""
        return "the current configuration" if self.role == "current" else "the baseline"

    def step_time_s(self, records: Sequence[TrialRecord]) -> float | None:
        """Its measured step time; None without one."""
        return step_time_of(records, self.values)


def reference_among(config: StudyConfig, candidates: Candidates) -> Reference | None:
    """What a new study compares with; None without a current one where no baseline is wanted, or none fits."""
    if config.current is not None:
        return _reference(config, "current", config.current)
    if not config.search.baseline or not len(candidates.space.grid):
        return None
    space = candidates.space
    position = baseline_position(
        space.grid,
        space.memory.fits(config.options.memory_headroom),
        devices_per_host=config.setting.cluster.devices_per_host,
        defaults=config.config_defaults,
    )
    return None if position is None else _reference(config, "baseline", space.grid.config(position))


def reference_of(config: StudyConfig, study: Study) -> Reference | None:
    """What a stored study compares with."""
    if config.current is not None:
        return _reference(config, "current", config.current)
    stored = study.user_attrs.get(BASELINE)
    return None if stored is None else _reference(config, "baseline", config.config_of(stored))


def keep_baseline(study: Study, reference: Reference | None) -> None:
    """Keeps the baseline of a study that has not begun."""
    if reference is None or reference.role != "baseline" or BASELINE in study.user_attrs:
        return
    if not study.get_trials(deepcopy=False):
        study.set_user_attr(BASELINE, dict(reference.values))


def gain_over(reference: Reference | None, records: Sequence[TrialRecord], best_s: float | None) -> float | None:
    """How many times as fast the best is by measured step times; None where one of the two has none."""
    reference_s = reference.step_time_s(records) if reference else None
    return reference_s / best_s if reference_s and best_s else None


def gains(reference: Reference | None, gain: float | None) -> dict[str, float | None]:
    """The gain under the keys of JSON: one for each role."""
    role = None if reference is None else reference.role
    return {
        "gain_over_current": gain if role == "current" else None,
        "gain_over_baseline": gain if role == "baseline" else None,
    }


def _reference(config: StudyConfig, role: Role, chosen: ParallelConfig) -> Reference:
    return Reference(role=role, config=chosen, values=chosen.values(config.dimensions))
