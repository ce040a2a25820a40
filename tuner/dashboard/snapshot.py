"""State of a study at one moment, read for its pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna import Study

from costmodels.job.parallel_config import ConfigGrid, Value
from tuner.answers.gain import Compared, compared_in
from tuner.answers.reference import Reference, reference_of
from tuner.forecast.planned_candidates import prepare_stored
from tuner.forecast.prepared import Prepared
from tuner.search.failures import FailureConclusion, failure_conclusions
from tuner.search.population import P_STAR, Moment, read_moments
from tuner.search.proxy.extrapolation import Extrapolated
from tuner.search.stopping import StopReason
from tuner.storage.record import HISTORY, STOP_REASON, TrialRecord, answer_of, read_records
from tuner.study_file.request import StudyRequest
from tuner.subject.problem import Problem

Key = tuple[Value, ...]
"""Values of a candidate's dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """State of a study in the storage.

    Attributes:
        prepared: Study, with the plans that its trials ran.
        records: Trials in the order of their numbers.
        best: First trial of the fastest candidate, with the step time of all its trials; None before any.
        extrapolated: Best configuration inferred from proxy jobs, if no full-size trial has completed.
        compared: Comparison of the best with the current configuration or the baseline; None where there is neither.
        moments: Probability of each candidate to be the fastest, before the first trial and after each.
        conclusions: Conclusions from failed trials.
        p_star: Latest p_star; None before the first.
        stop_reason: Reason why the search ended; None while it runs.
        history: Text on the knowledge taken from earlier studies.
    """

    prepared: Prepared
    records: tuple[TrialRecord, ...]
    best: TrialRecord | None
    extrapolated: Extrapolated | None
    compared: Compared | None
    moments: tuple[Moment, ...]
    conclusions: tuple[FailureConclusion, ...]
    p_star: float | None
    stop_reason: StopReason | None
    history: str

    @property
    def request(self) -> StudyRequest:
        """Study as its file describes it."""
        return self.prepared.request

    @property
    def is_running(self) -> bool:
        """Whether a process drives the study."""
        return self.stop_reason is None

    @property
    def best_step_s(self) -> float | None:
        """Step time of the best so far [s]."""
        if self.best is not None:
            return self.best.step_time_s
        return self.extrapolated.step_time_s if self.extrapolated else None

    @property
    def reference(self) -> Reference | None:
        """Configuration that the best is compared with; None where there is none."""
        return self.compared.reference if self.compared else None


def snapshot_of(request: StudyRequest, study: Study, attributes: Mapping[str, Any], *, is_running: bool) -> Snapshot:
    """Read the present state of a study, whose user attributes the caller has read already."""
    prepared = prepare_stored(request, study)
    records = tuple(read_records(study))
    best, extrapolated = answer_of(records, attributes)
    stopped = None if is_running else StopReason(attributes.get(STOP_REASON, StopReason.INTERRUPTED))
    return Snapshot(
        prepared=prepared,
        records=records,
        best=best,
        extrapolated=extrapolated,
        compared=compared_in(prepared.problem, reference_of(prepared.problem, study), records, best, attributes),
        moments=read_moments(study),
        conclusions=failure_conclusions(attributes),
        p_star=attributes.get(P_STAR),
        stop_reason=stopped,
        history=attributes.get(HISTORY, ""),
    )


def step_errors(problem: Problem, candidates: Sequence[Mapping[str, Value]]) -> dict[Key, float]:
    """Compute one standard deviation of the logarithm of each candidate's predicted step time."""
    if not candidates:
        return {}
    grid = ConfigGrid.from_configs([problem.config_of(each) for each in candidates], problem.options.opened)
    uncertainty = problem.subject.uncertainty(grid)
    if uncertainty is None:
        return {}
    return {tuple(each.values()): float(error) for each, error in zip(candidates, uncertainty.log_error, strict=True)}
