"""Reference of a study's answer: the current configuration, or without one a sane baseline.

The baseline is a candidate and the first trial, as the current configuration is; tuner/answers/baseline.py has its
rule. A study keeps it when it is opened for the first time, so that the comparison never changes.
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
    """Configuration to compare with.

    Attributes:
        role: Role of the configuration: in use today, or chosen by a rule.
        config: Configuration of the reference.
        values: Dimensions of a candidate with its values.
    """

    role: Role
    config: ParallelConfig
    values: Mapping[str, Value]

    @property
    def in_words(self) -> str:
        """Name of the reference in a sentence."""
        return "the current configuration" if self.role == "current" else "the baseline"

    def step_time_s(self, records: Sequence[TrialRecord]) -> float | None:
        """Return its measured step time [s]; None without one."""
        return step_time_of(records, self.values)


def reference_among(config: StudyConfig, candidates: Candidates) -> Reference | None:
    """Return the reference of a new study; None if no current one is named and no baseline is wanted, or none fits."""
    if config.current is not None:
        return _make_reference(config, "current", config.current)
    if not config.search.baseline or not len(candidates.space.grid):
        return None
    space = candidates.space
    position = baseline_position(
        space.grid,
        space.memory.fits(config.options.memory_headroom),
        devices_per_host=config.setting.cluster.devices_per_host,
        defaults=config.config_defaults,
    )
    return None if position is None else _make_reference(config, "baseline", space.grid.config(position))


def reference_of(config: StudyConfig, study: Study) -> Reference | None:
    """Return the reference of a stored study."""
    if config.current is not None:
        return _make_reference(config, "current", config.current)
    stored = study.user_attrs.get(BASELINE)
    return None if stored is None else _make_reference(config, "baseline", config.config_of(stored))


def keep_baseline(study: Study, reference: Reference | None) -> None:
    """Keep the baseline of a study that has not begun."""
    if reference is None or reference.role != "baseline" or BASELINE in study.user_attrs:
        return
    if not study.get_trials(deepcopy=False):
        study.set_user_attr(BASELINE, dict(reference.values))


def gain_over(reference: Reference | None, records: Sequence[TrialRecord], best_s: float | None) -> float | None:
    """Return how many times as fast the best is by measured step times; None where one of the two has none."""
    reference_s = reference.step_time_s(records) if reference else None
    return reference_s / best_s if reference_s and best_s else None


def gains(reference: Reference | None, gain: float | None) -> dict[str, float | None]:
    """Return the gain under the keys of JSON: one for each role."""
    role = None if reference is None else reference.role
    return {
        "gain_over_current": gain if role == "current" else None,
        "gain_over_baseline": gain if role == "baseline" else None,
    }


def _make_reference(config: StudyConfig, role: Role, chosen: ParallelConfig) -> Reference:
    return Reference(role=role, config=chosen, values=chosen.values(config.dimensions))
