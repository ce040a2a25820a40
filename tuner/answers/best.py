"""Answer of a study: its fastest measured configuration, or before any what proxies suggest or the model predicts."""

from __future__ import annotations

from dataclasses import dataclass

from optuna import Study

from costmodels.job.parallel_config import ParallelConfig
from tuner.answers.basis import Basis, basis_in
from tuner.answers.gain import Compared, compared_by_prediction, compared_in, draw_none
from tuner.answers.predictions import rank_candidates
from tuner.answers.reference import reference_among, reference_of
from tuner.forecast.prepared import Prepared
from tuner.forecast.sizes import LEARNED, PREDICTED
from tuner.search.population import P_STAR
from tuner.search.proxy.extrapolation import Extrapolated
from tuner.storage.record import answer_of, read_records


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """Configuration that a study answers with, and the source of its step time.

    Attributes:
        config: Configuration of the answer.
        step_time_s: Step time of the configuration [s].
        source: Source of the step time: "measured", "synthetic", "learned" (from trials of others) or "predicted".
        compared: Comparison with the current configuration or the baseline; None where there is neither.
        p_star: Confidence that no untried configuration is faster; None before any trial.
        extrapolated: Extrapolation that it rests on, where no trial has run at full size.
        source_in_words: Source of the step time and its clock, in words.
    """

    config: ParallelConfig
    step_time_s: float
    source: str
    compared: Compared | None
    p_star: float | None = None
    extrapolated: Extrapolated | None = None
    source_in_words: str = "predicted"

    @property
    def is_measured(self) -> bool:
        """Whether its own trials timed it, in a real or in a simulated world."""
        return self.source not in (LEARNED, PREDICTED)

    @property
    def known_in_words(self) -> str:
        """Source of the step time, in words."""
        return self.extrapolated.in_words if self.extrapolated else self.source_in_words


def best_known(prepared: Prepared, study: Study | None, basis: Basis | None = None) -> Best | None:
    """Return the best known answer of a study; None if no configuration fits, or all that fit have failed.

    Args:
        prepared: Study.
        study: Its stored counterpart; None for a study that was never run.
        basis: What its answers rest on, where the caller knows it.
    """
    basis = basis or basis_in(prepared, study)
    is_own = basis.taught is not None and basis.taught.is_own
    records = read_records(study) if study is not None and is_own else []
    attributes = study.user_attrs if study is not None and is_own else {}
    best, extrapolated = answer_of(records, attributes)
    reference = reference_of(prepared.problem, study) if study is not None else None
    if best is not None and best.step_time_s is not None:
        return Best(
            config=prepared.problem.config_of(best.params),
            step_time_s=best.step_time_s,
            source=prepared.request.trials.backend.origin,
            source_in_words=prepared.request.trials.backend.source_in_words,
            compared=compared_in(prepared.problem, reference, records, best, attributes),
            p_star=float(attributes.get(P_STAR, 0.0)),
        )
    if extrapolated is not None:
        return Best(
            config=prepared.problem.config_of(extrapolated.config),
            step_time_s=extrapolated.step_time_s,
            source=PREDICTED,
            compared=compared_in(prepared.problem, reference, records, None, attributes),
            extrapolated=extrapolated,
        )
    candidates, ranked = prepared.candidates, rank_candidates(prepared, basis)
    failed = basis.taught.failed if basis.taught else frozenset()
    fastest = next((at for at in ranked.order.tolist() if at not in failed), None)
    if fastest is None:
        return None
    known = "learned from the trials, not measured" if basis.taught else PREDICTED
    reference, chosen = reference or reference_among(prepared), candidates.space.grid.config(fastest)
    return Best(
        config=chosen,
        step_time_s=float(ranked.step_time_s[fastest]),
        source=LEARNED if basis.taught else PREDICTED,
        source_in_words=known if ranked.fits[fastest] else f"{known}, and not expected to run",
        compared=compared_by_prediction(
            prepared.problem,
            reference,
            records,
            candidates,
            fastest,
            draw=basis.taught.draw_steps if basis.taught else draw_none,
        ),
    )
