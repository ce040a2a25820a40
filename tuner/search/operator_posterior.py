"""Posterior of operator times, which corrects the candidates' predicted steps (FlexParallel 3.1)."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from costmodels.blocks.operator import COLLECTIVES, OpKind, Phase
from costmodels.job.setting import Setting
from costmodels.operators.isolated import is_run_by, isolated_call_s, operator_role
from costmodels.surrogates.error_terms import StepTerms
from costmodels.surrogates.operator_surrogate import (
    Composition,
    OperatorErrors,
    compose,
    fit_operators,
    key_of,
    role_of,
    timing_variance,
)
from trials.backend import OperatorSample
from tuner.search.earlier_runs import IsolatedSample, PastSample

Timing = OperatorSample | PastSample
"""Measured operator of a trial, of this study or of an earlier one."""

Key = tuple[str, OpKind, Phase | None, tuple[float, ...]]
"""Name, kind, phase and shape of an operator; a collective's phase is None."""

IN_TRAINING_DEVIATION = 0.1
"""Standard deviation of the effect of a step on the time of an isolated operator, beside the share of its speed that
the runtime's profile names for all of its kind: caches, clocks, the neighbours on the device. On one core isolated
products, attention and GELU were 0 to 12% from the medians of a traced step, calls of less than 0.1 ms farther
(measured)."""

TOLD_BY: Mapping[str, Collection[OpKind]] = {
    "matmul_efficiency": (OpKind.MATMUL,),
    "grouped_matmul_efficiency": (OpKind.GROUPED_MATMUL,),
    "attention_efficiency": (OpKind.ATTENTION, OpKind.SCAN),
    "memory_efficiency": (OpKind.NORM,),
    "network_efficiency": COLLECTIVES,
    "collective_launch_s": COLLECTIVES,
    "hop_launch_s": COLLECTIVES,
}
"""Constants of a runtime profile that act through kinds of operators only. Once training steps have measured all these
kinds, the constant's own error is no longer left to explain."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorPosterior:
    """Operators of all candidates, and measured times of some.

    Attributes:
        terms_of: Function that takes the candidates' steps apart; called once, and only if there is a measured time.
        past: Errors of operators that training steps measured before the study.
        alone: Errors of isolated operators.
        other_clusters_of: Functions for candidates on other clusters, which stand behind those of the study's own.
    """

    terms_of: Callable[[], StepTerms]
    past: tuple[OperatorErrors, ...] = ()
    alone: tuple[OperatorErrors, ...] = ()
    other_clusters_of: tuple[Callable[[], StepTerms], ...] = ()

    @cached_property
    def terms(self) -> StepTerms:
        """Error terms of the candidates' steps."""
        return self.terms_of()

    @cached_property
    def other_clusters(self) -> tuple[StepTerms, ...]:
        """Error terms of the steps on other clusters."""
        return tuple(terms_of() for terms_of in self.other_clusters_of)

    @cached_property
    def predicted_s(self) -> Mapping[Key, float]:
        """Predicted time of every operator of the candidates [s]."""
        return predicted_times(self.terms)

    def compose(
        self, timings: Sequence[Timing], num_draws: int, rng: np.random.Generator, *, aside: Sequence[StepTerms] = ()
    ) -> tuple[Composition, frozenset[str]] | None:
        """Return the change of every candidate's step by measured times, and the constants that these tell.

        Args:
            timings: Operator times of the study's own trials.
            num_draws: Number M of draws.
            rng: Source of the draws.
            aside: Error terms of further configurations that trials ran, whose changes stand behind the candidates'.

        Returns:
            Composition and names of constants; None without a measured time.
        """
        errors = [*self.past, *(errors_of(timings, self._predicted_s(aside)) if timings else ())]
        if not errors and not self.alone:
            return None
        # one surrogate learns from training steps, from history and from isolated operators
        surrogate = fit_operators(errors, alone=self.alone)
        # a constant is told once every kind of operator through which it acts was measured
        used = {(term.kind, term.phase) for term in self.terms.terms}
        told = frozenset(
            constant
            for constant, kinds in TOLD_BY.items()
            if all(surrogate.knows(kind, phase) for kind, phase in used if kind in kinds)
        )
        return compose(self.terms, surrogate, num_draws, rng, aside=(*self.other_clusters, *aside)), told

    def _predicted_s(self, aside: Sequence[StepTerms]) -> Mapping[Key, float]:
        """Return the predicted time of every operator of the candidates and of the configurations aside [s]."""
        return ChainMap(dict(self.predicted_s), *map(predicted_times, aside))


def predicted_times(terms: StepTerms) -> dict[Key, float]:
    """Return the predicted time of every operator of some candidates, with and without its name [s]."""
    found: dict[Key, float] = {}
    # equal shapes of several candidates are one operator
    for term in terms.terms:
        for shape, time_s in zip(term.shape.tolist(), term.time_s.tolist(), strict=True):
            phase = None if term.kind in COLLECTIVES else term.phase
            found.setdefault((term.name, term.kind, phase, tuple(shape)), time_s)
            found.setdefault(("", term.kind, phase, tuple(shape)), time_s)
    return found


def errors_of(timings: Iterable[Timing], predicted_s: Mapping[Key, float]) -> tuple[OperatorErrors, ...]:
    """Return the errors of measured operators by kind and phase; leave out operators without a prediction."""
    rows: dict[tuple[OpKind, Phase | None], list[_Row]] = {}
    for timing in timings:
        kind, phase = key_of(timing.kind, timing.phase)
        expected_s = predicted_s.get((timing.name, kind, phase, timing.shape))
        if expected_s is None:
            expected_s = predicted_s.get(("", kind, phase, timing.shape))  # a trace may not know names
        if expected_s:
            log_error = float(np.log(timing.time_s / expected_s))
            rows.setdefault((kind, phase), []).append(
                (timing.shape, log_error, timing.count, role_of(timing.name, kind))
            )
    return tuple(_as_errors(kind, phase, found) for (kind, phase), found in rows.items())


def isolated_errors(
    samples: Iterable[IsolatedSample], setting: Setting, *, is_absorbed: bool = False
) -> tuple[OperatorErrors, ...]:
    """Return the errors of isolated operators by kind, phase and role, on the study's device and in its precision.

    A runtime reaches a share of an isolated operator's speed (`share_in_training`). Nothing is learned of its error
    here: it is in measured and predicted time alike.

    Args:
        samples: Measured times of isolated operators.
        setting: Setting of the study.
        is_absorbed: Whether the profile was fitted to runs on that device. Its constants then contain the error that
            all operators of a kind share.
    """
    (device,) = setting.cluster.devices
    rows: dict[tuple[OpKind, Phase | None, str], list[_Row]] = {}
    for sample in samples:
        call = sample.call
        is_told = sample.device == device.name and call.precision == setting.job.precision
        if not is_told or not is_run_by(call, setting.job.model):
            continue
        expected_s = isolated_call_s(call, setting.cluster)
        if expected_s:
            role = operator_role(call) if call.kind is OpKind.ELEMENTWISE else ""
            log_error = float(np.log(sample.time_s / expected_s))
            key = (*key_of(call.kind, call.phase), role)
            rows.setdefault(key, []).append((call.shape, log_error, sample.count, role))
    # the fitted constants hold the error that all operators of a kind share, so only what is beyond it counts
    found = (_as_errors(kind, phase, some) for (kind, phase, _), some in rows.items())
    return tuple(
        replace(
            errors,
            log_error=errors.log_error - (np.median(errors.log_error) if is_absorbed else 0.0),
            variance=errors.variance + IN_TRAINING_DEVIATION**2,
        )
        for errors in found
    )


_Row = tuple[tuple[float, ...], float, int, str]
"""Shape, log error, executions and role of one measured operator."""


def _as_errors(kind: OpKind, phase: Phase | None, found: Sequence[_Row]) -> OperatorErrors:
    return OperatorErrors(
        kind=kind,
        phase=phase,
        shape=np.array([shape for shape, _, _, _ in found]),
        log_error=np.array([error for _, error, _, _ in found]),
        variance=timing_variance(np.array([count for _, _, count, _ in found])),
        roles=tuple(role for _, _, _, role in found),
    )
