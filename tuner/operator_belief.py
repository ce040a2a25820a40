"""What operator times of trials and of history correct in the candidates' predicted steps (FlexParallel 3.1)."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from costmodels.operator_surrogate import Composition, OperatorErrors, compose, fit_operators, key_of, timing_variance
from costmodels.operators import COLLECTIVES, OpKind, Phase
from costmodels.terms import StepTerms
from trials.backend import OperatorSample
from tuner.history.past import PastSample

Timing = OperatorSample | PastSample
"""A measured operator of a trial, of this study or of an earlier one."""

Key = tuple[str, OpKind, Phase | None, tuple[float, ...]]
"""Name, kind, phase and shape of an operator; a collective's phase is None."""

TOLD_BY: Mapping[str, Collection[OpKind]] = {
    "matmul_efficiency": (OpKind.MATMUL,),
    "grouped_matmul_efficiency": (OpKind.GROUPED_MATMUL,),
    "attention_efficiency": (OpKind.ATTENTION,),
    "memory_efficiency": (OpKind.NORM,),
    "network_efficiency": COLLECTIVES,
    "collective_launch_s": COLLECTIVES,
    "hop_launch_s": COLLECTIVES,
}
"""The constants of a runtime profile that act through kinds of operators alone: once all these are measured, the
constant's own error is nothing that is left to explain."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorBelief:
    """The operators of all candidates, and measured times of some.

    Attributes:
        terms_of: Takes the candidates' steps apart; called once, and only if there is a measured time.
        past: What was measured before the study.
        elsewhere_of: The same of candidates on other clusters, which stand behind those of the study's own.
    """

    terms_of: Callable[[], StepTerms]
    past: tuple[OperatorErrors, ...] = ()
    elsewhere_of: tuple[Callable[[], StepTerms], ...] = ()

    @cached_property
    def terms(self) -> StepTerms:
        """The terms of the candidates' steps."""
        return self.terms_of()

    @cached_property
    def elsewhere(self) -> tuple[StepTerms, ...]:
        """The terms of the steps on other clusters."""
        return tuple(terms_of() for terms_of in self.elsewhere_of)

    @cached_property
    def predicted_s(self) -> Mapping[Key, float]:
        """Predicted time of every operator of the candidates."""
        return predicted_times(self.terms)

    def compose(
        self,
        timings: Sequence[Timing],
        num_draws: int,
        rng: np.random.Generator,
        *,
        aside: Sequence[StepTerms] = (),
    ) -> tuple[Composition, frozenset[str]] | None:
        """What measured times change of every candidate's step, and the constants they tell; None without a time.

        Args:
            timings: Operator times of the study's own trials.
            num_draws: M.
            rng: Source of the draws.
            aside: The steps of further configurations that trials ran, whose changes stand behind the candidates'.
        """
        errors = [*self.past, *(errors_of(timings, self._predicted_s(aside)) if timings else ())]
        if not errors:
            return None
        surrogate = fit_operators(errors)
        used = {(term.kind, term.phase) for term in self.terms.terms}
        told = frozenset(
            constant
            for constant, kinds in TOLD_BY.items()
            if all(surrogate.knows(kind, phase) for kind, phase in used if kind in kinds)
        )
        return compose(self.terms, surrogate, num_draws, rng, aside=(*self.elsewhere, *aside)), told

    def _predicted_s(self, aside: Sequence[StepTerms]) -> Mapping[Key, float]:
        """Predicted time of every operator of the candidates and of what ran aside."""
        return ChainMap(dict(self.predicted_s), *map(predicted_times, aside))


def predicted_times(terms: StepTerms) -> dict[Key, float]:
    """Predicted time of every operator of some candidates, with and without its name."""
    found: dict[Key, float] = {}
    for term in terms.terms:
        for shape, time_s in zip(term.shape.tolist(), term.time_s.tolist(), strict=True):
            phase = None if term.kind in COLLECTIVES else term.phase
            found.setdefault((term.name, term.kind, phase, tuple(shape)), time_s)
            found.setdefault(("", term.kind, phase, tuple(shape)), time_s)
    return found


def errors_of(timings: Iterable[Timing], predicted_s: Mapping[Key, float]) -> tuple[OperatorErrors, ...]:
    """Measured operators beside their predictions, by kind and phase; those that nothing predicts are left out."""
    rows: dict[tuple[OpKind, Phase | None], list[tuple[tuple[float, ...], float, int]]] = {}
    for timing in timings:
        kind, phase = key_of(timing.kind, timing.phase)
        expected_s = predicted_s.get((timing.name, kind, phase, timing.shape))
        if expected_s is None:
            expected_s = predicted_s.get(("", kind, phase, timing.shape))
        if expected_s:
            rows.setdefault((kind, phase), []).append(
                (timing.shape, float(np.log(timing.time_s / expected_s)), timing.count)
            )
    return tuple(
        OperatorErrors(
            kind=kind,
            phase=phase,
            shape=np.array([shape for shape, _, _ in found]),
            log_error=np.array([error for _, error, _ in found]),
            variance=timing_variance(np.array([count for _, _, count in found])),
        )
        for (kind, phase), found in rows.items()
    )
