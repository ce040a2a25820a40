"""A study at one moment, read for its pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna import Study

from costmodels.job.parallel_config import ConfigGrid, Value
from costmodels.step.memory import estimate_memory
from costmodels.surrogates.uncertainty import step_uncertainty
from tuner.answers.reference import Reference, reference_of
from tuner.search.failures import Lesson, lessons_of
from tuner.search.population import P_STAR, Moment, read_moments
from tuner.search.proxy.extrapolation import Extrapolated, extrapolated_of
from tuner.search.stopping import StopReason
from tuner.storage.record import HISTORY, STOP_REASON, TrialRecord, best_record, read_records
from tuner.study_file.config import StudyConfig

Key = tuple[Value, ...]
"""A candidate by the values of its dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What the storage holds of a study.

    Attributes:
        config: The study.
        records: Its trials in the order of their numbers.
        best: The fastest candidate's first trial, with the step time of all its trials.
        extrapolated: The answer that proxies suggest, where no trial has completed at full size.
        reference: What the best is compared with; None where there is nothing.
        moments: How probable each candidate was to be the fastest, before the first trial and after each.
        lessons: What failures taught.
        p_star: The last p_star; None before the first.
        stop_reason: Why the search ended; None while it runs.
        history: What earlier studies told it, in words.
    """

    config: StudyConfig
    records: tuple[TrialRecord, ...]
    best: TrialRecord | None
    extrapolated: Extrapolated | None
    reference: Reference | None
    moments: tuple[Moment, ...]
    lessons: tuple[Lesson, ...]
    p_star: float | None
    stop_reason: StopReason | None
    history: str

    @property
    def is_running(self) -> bool:
        """Whether a process drives the study."""
        return self.stop_reason is None

    @property
    def best_step_s(self) -> float | None:
        """Step time of the best so far."""
        if self.best is not None:
            return self.best.step_time_s
        return self.extrapolated.step_time_s if self.extrapolated else None

    @property
    def reference_s(self) -> float | None:
        """Measured step time of the reference, if it ran."""
        return self.reference.step_time_s(self.records) if self.reference else None

    @property
    def gain(self) -> float | None:
        """How many times as fast the best is as the reference; None without both."""
        best_s = self.best.step_time_s if self.best else None
        return self.reference_s / best_s if self.reference_s and best_s else None


def snapshot_of(config: StudyConfig, study: Study, attributes: Mapping[str, Any], *, is_running: bool) -> Snapshot:
    """The study as it stands.

    Args:
        config: The study.
        study: Its trials.
        attributes: Its attributes.
        is_running: Whether a process drives it.
    """
    records = tuple(read_records(study))
    best = best_record(records)
    stopped = None if is_running else StopReason(attributes.get(STOP_REASON, StopReason.INTERRUPTED))
    return Snapshot(
        config=config,
        records=records,
        best=best,
        extrapolated=None if best else extrapolated_of(attributes),
        reference=reference_of(config, study),
        moments=read_moments(study),
        lessons=lessons_of(attributes),
        p_star=attributes.get(P_STAR),
        stop_reason=stopped,
        history=attributes.get(HISTORY, ""),
    )


def step_errors(config: StudyConfig, candidates: Sequence[Mapping[str, Value]]) -> dict[Key, float]:
    """How far the predicted step of each candidate is off: one standard deviation of its logarithm."""
    if not candidates:
        return {}
    setting = config.setting
    grid = ConfigGrid.from_configs([config.config_of(each) for each in candidates], config.options.opened)
    memory = estimate_memory(setting, grid)
    errors = step_uncertainty(setting, grid, memory=memory).log_error
    return {tuple(each.values()): float(error) for each, error in zip(candidates, errors, strict=True)}
