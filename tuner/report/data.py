"""Data of a report, read once from the study and its storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from costmodels.job.parallel_config import ParallelConfig
from trials.backend import Origin
from tuner.answers.basis import Basis, basis_in
from tuner.answers.fewer_hosts import OnFewerHosts, phases_of
from tuner.answers.gain import Compared, compared_in
from tuner.answers.reference import Reference, reference_of
from tuner.forecast.candidates import Candidates
from tuner.forecast.planned_candidates import prepare_stored
from tuner.forecast.prepared import Prepared
from tuner.forecast.ranked import Ranked, predicted_ranking
from tuner.run.studies import is_running, stored_study
from tuner.search.failures import FailureConclusion, failure_conclusions
from tuner.search.population import Moment, read_moments
from tuner.search.proxy.extrapolation import Extrapolated
from tuner.search.stopping import StopReason
from tuner.storage.record import ORIGIN, STOP_REASON, TrialRecord, answer_of, read_records
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.request import StudyRequest
from tuner.subject.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReportData:
    """Data of one study at one moment.

    Attributes:
        prepared: Study, with the plans that its trials ran.
        basis: What the trials taught of all candidates.
        predicted: Ranking of its candidates by the predictions alone.
        records: Trials in the order of their numbers.
        best: Fastest completed trial; None before the first.
        extrapolated: Best configuration inferred from proxy jobs, if no full-size trial has completed.
        stop_reason: Reason why the search ended; None while it runs.
        origin: Origin of the step times: measured or synthetic.
        compared: Comparison of the best with the current configuration or the baseline; None where there is neither.
        moments: Probability of each candidate to be the best, before the first trial and after each.
        conclusions: Conclusions from failed trials.
        fewer_hosts: Trials that ran while hosts were lost.
    """

    prepared: Prepared
    basis: Basis
    predicted: Ranked
    records: tuple[TrialRecord, ...]
    best: TrialRecord | None
    extrapolated: Extrapolated | None
    stop_reason: StopReason | None
    origin: Origin
    compared: Compared | None
    moments: tuple[Moment, ...]
    conclusions: tuple[FailureConclusion, ...]
    fewer_hosts: tuple[OnFewerHosts, ...] = ()

    @property
    def request(self) -> StudyRequest:
        """Study as its file describes it."""
        return self.prepared.request

    @property
    def problem(self) -> Problem:
        """Candidates of the study, and what it minimizes."""
        return self.prepared.problem

    @property
    def candidates(self) -> Candidates:
        """Search space with the predictions of all candidates."""
        return self.prepared.candidates

    @property
    def expected(self) -> Ranked:
        """Candidates after the trials: measured, and of the others the mean of the posterior; predicted before any."""
        return self.basis.taught.ranked if self.basis.taught else self.predicted

    @property
    def reasons(self) -> dict[str, str]:
        """Reason of each active rule for removing configurations, and of the memory limit."""
        options = self.problem.options
        free = f"{options.memory_headroom:.0%}"
        return self.problem.subject.rule_reasons(options) | {
            "memory": f"the predicted peak must leave {free} of the device's memory free"
        }

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of what identifies a candidate: the eight degrees, the opened dimensions, and the knobs."""
        return (*self.candidates.space.grid.dimensions, *(knob.name for knob in self.problem.knobs))

    @property
    def finished(self) -> tuple[TrialRecord, ...]:
        """Trials that have ended, in the order of their ends."""
        ended = [record for record in self.records if record.finished]
        return tuple(sorted(ended, key=lambda record: record.end_order))

    @property
    def failed(self) -> tuple[TrialRecord, ...]:
        """Trials that ended without their measurement, except those stopped early."""
        return tuple(record for record in self.records if record.has_failed)

    @property
    def p_star_history(self) -> tuple[tuple[int, float], ...]:
        """Pairs of a position among the finished trials, counted from 1, and p_star after that trial."""
        numbered = enumerate(self.finished, start=1)
        return tuple((position, record.p_star) for position, record in numbered if record.p_star is not None)

    @property
    def p_star(self) -> float | None:
        """Latest p_star; None before the first."""
        return self.p_star_history[-1][1] if self.p_star_history else None

    @property
    def best_config(self) -> ParallelConfig | None:
        """Configuration of the fastest trial, or the one inferred from proxy jobs."""
        if self.best:
            return self.problem.config_of(self.best.params)
        return self.problem.config_of(self.extrapolated.config) if self.extrapolated else None

    @property
    def best_step_time_s(self) -> float | None:
        """Step time of the best configuration [s]."""
        if self.best:
            return self.best.step_time_s
        return self.extrapolated.step_time_s if self.extrapolated else None

    @property
    def source_in_words(self) -> str:
        """Origin of the step times and, unless it is the wall clock, their clock."""
        return (
            self.request.trials.backend.source_in_words
            if self.origin == self.request.trials.backend.origin
            else self.origin
        )

    @property
    def reference(self) -> Reference | None:
        """Configuration that the best is compared with; None where there is none."""
        return self.compared.reference if self.compared else None

    @property
    def reference_step_time_s(self) -> float | None:
        """Measured step time of the reference [s]; None if it did not run."""
        return self.compared.step_time_s if self.compared else None

    def mfu(self, step_time_s: float) -> float:
        """Compute the model FLOPs utilisation at a step time."""
        return self.problem.subject.utilisation(step_time_s)

    @property
    def prior_choice(self) -> ParallelConfig | None:
        """Candidate that the cost model predicts to be fastest; None without candidates."""
        return next((self.candidates.space.grid.config(position) for position in self.best_predicted(1)), None)

    def best_predicted(self, count: int) -> list[int]:
        """List the positions of the candidates that `meshtune rank` puts first."""
        return [int(position) for position in self.predicted.order[:count]]


Section = Callable[[ReportData], str]
"""Pure function that renders one part of the report as HTML."""


def collect(request: StudyRequest) -> ReportData:
    """Read the study's trials and predict its candidates.

    Raises:
        ConfigError: The storage holds no such study.
    """
    stored = StoredStudies(request.storage)
    study = stored_study(request, stored)
    prepared = prepare_stored(request, study)
    records = read_records(study)
    best, extrapolated = answer_of(records, study.user_attrs)
    stored_reason = study.user_attrs.get(STOP_REASON)
    stop_reason = None if stored_reason is None or is_running(study) else StopReason(stored_reason)
    return ReportData(
        prepared=prepared,
        basis=basis_in(prepared, study),
        predicted=predicted_ranking(prepared),
        records=tuple(records),
        best=best,
        extrapolated=extrapolated,
        stop_reason=stop_reason,
        origin=study.user_attrs.get(ORIGIN, request.trials.backend.origin),
        compared=compared_in(prepared.problem, reference_of(prepared.problem, study), records, best, study.user_attrs),
        moments=read_moments(study),
        fewer_hosts=phases_of(request, stored),
        conclusions=failure_conclusions(study.user_attrs),
    )
