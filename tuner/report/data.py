"""What the sections of a report look at, read once from the study and its storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from costmodels.job.parallel_config import ParallelConfig
from costmodels.step.step_time import model_flops_utilisation
from trials.backend import Origin
from tuner.answers.candidates import Candidates, candidates_of, ranking
from tuner.answers.planned_candidates import LAYER_PLANS, planned_study
from tuner.answers.reference import Reference, reference_of
from tuner.run.loop import is_running, stored_study
from tuner.search.failures import Lesson, lessons_of
from tuner.search.population import Moment, read_moments
from tuner.search.proxy.extrapolation import Extrapolated, extrapolated_of
from tuner.search.stopping import StopReason
from tuner.space.enumeration import active_rules
from tuner.storage.record import (
    ORIGIN,
    STOP_REASON,
    TrialRecord,
    best_record,
    read_records,
)
from tuner.study_file.config import StudyConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReportData:
    """One study at one moment.

    Attributes:
        config: The study.
        candidates: Its space and predictions.
        records: Its trials in the order of their numbers.
        best: The fastest completed trial.
        extrapolated: The answer that proxies suggest, where no trial has completed at full size.
        stop_reason: Why the search ended; None while it runs.
        origin: Whether the step times were measured or invented by a simulated world.
        reference: What the best is compared with: the current configuration, or a baseline; None where there is
            nothing.
        moments: How probable each candidate was to be the best, before the first trial and after each.
        lessons: What the failures taught.
    """

    config: StudyConfig
    candidates: Candidates
    records: tuple[TrialRecord, ...]
    best: TrialRecord | None
    extrapolated: Extrapolated | None
    stop_reason: StopReason | None
    origin: Origin
    reference: Reference | None
    moments: tuple[Moment, ...]
    lessons: tuple[Lesson, ...]

    @property
    def reasons(self) -> dict[str, str]:
        """Why each rule in force removes what it does, and memory."""
        config = self.config
        found = {rule.name: rule.reason(config.setting) for rule in active_rules(config.setting, config.options)}
        free = f"{config.options.memory_headroom:.0%}"
        return found | {"memory": f"the predicted peak must leave {free} of the device's memory free"}

    @property
    def dimensions(self) -> tuple[str, ...]:
        """What identifies a candidate: the eight degrees and the opened dimensions."""
        return self.candidates.space.grid.dimensions

    @property
    def finished(self) -> tuple[TrialRecord, ...]:
        """The trials that have ended, in the order of their ends."""
        ended = [record for record in self.records if record.finished]
        return tuple(sorted(ended, key=lambda record: record.end_order))

    @property
    def failed(self) -> tuple[TrialRecord, ...]:
        """The trials that ended without what they were to measure, those stopped early excepted."""
        return tuple(record for record in self.records if record.has_failed)

    @property
    def p_star_history(self) -> tuple[tuple[int, float], ...]:
        """(position among the finished trials from 1, p_star after it)."""
        numbered = enumerate(self.finished, start=1)
        return tuple((position, record.p_star) for position, record in numbered if record.p_star is not None)

    @property
    def p_star(self) -> float | None:
        """The last p_star."""
        return self.p_star_history[-1][1] if self.p_star_history else None

    @property
    def best_config(self) -> ParallelConfig | None:
        """The configuration of the fastest trial, or the one that proxies suggest."""
        if self.best:
            return self.config.config_of(self.best.params)
        return self.config.config_of(self.extrapolated.config) if self.extrapolated else None

    @property
    def best_step_time_s(self) -> float | None:
        """Its step time."""
        if self.best:
            return self.best.step_time_s
        return self.extrapolated.step_time_s if self.extrapolated else None

    @property
    def source_in_words(self) -> str:
        """Where the step times come from and, unless it is the wall clock, what they count."""
        return self.config.backend.source_in_words if self.origin == self.config.backend.origin else self.origin

    @property
    def reference_step_time_s(self) -> float | None:
        """Measured step time of the reference, if it ran."""
        return self.reference.step_time_s(self.records) if self.reference else None

    def mfu(self, step_time_s: float) -> float:
        """Model FLOPs utilisation at a step time."""
        setting = self.config.setting
        return float(model_flops_utilisation(setting.job, setting.cluster, np.array([step_time_s]))[0])

    @property
    def prior_choice(self) -> ParallelConfig | None:
        """The candidate that was predicted to be the fastest before any trial; None without candidates."""
        return next((self.candidates.space.grid.config(position) for position in self.best_predicted(1)), None)

    def best_predicted(self, count: int) -> list[int]:
        """Positions of the candidates that `meshtune rank` puts first."""
        return [int(position) for position in ranking(self.config, self.candidates)[:count]]


Section = Callable[[ReportData], str]
"""Writes one part of the report as HTML; pure."""


def collect(config: StudyConfig) -> ReportData:
    """Reads the study's trials and predicts its candidates.

    Raises:
        ConfigError: the storage holds no such study.
    """
    study = stored_study(config)
    if LAYER_PLANS in study.user_attrs:
        config = planned_study(config, config.space().grid, stored=study.user_attrs[LAYER_PLANS])
    records = read_records(study)
    best = best_record(records)
    stored_reason = study.user_attrs.get(STOP_REASON)
    stop_reason = None if stored_reason is None or is_running(study) else StopReason(stored_reason)
    return ReportData(
        config=config,
        candidates=candidates_of(config),
        records=tuple(records),
        best=best,
        extrapolated=None if best else extrapolated_of(study.user_attrs),
        stop_reason=stop_reason,
        origin=study.user_attrs.get(ORIGIN, config.backend.origin),
        reference=reference_of(config, study),
        moments=read_moments(study),
        lessons=lessons_of(study.user_attrs),
    )
