"""Predictions of proxies, through which their trials inform the candidates: steps, memory and operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.parallel_config import ConfigGrid
from costmodels.surrogates.error_terms import StepTerms, step_terms
from costmodels.surrogates.predicted import Predicted, predict, together
from tuner.search.observations import Observations
from tuner.search.proxy.proxy_trials import Proxy


class _ProxyPredictions(NamedTuple):
    """Predictions of a proxy by the two profiles, and the error terms of its step by the second."""

    cold: Predicted
    fitted: Predicted
    terms: StepTerms


@dataclass(frozen=True, kw_only=True, eq=False)
class ProxyPosterior:
    """Proxies as the cost model sees them; each is predicted once.

    Attributes:
        measured: Full job under the runtime's own profile.
        fitted: Full job under the profile that was fitted to a history; `measured` without one.
    """

    measured: MeasuredSetting
    fitted: MeasuredSetting
    _known: dict[Proxy, _ProxyPredictions] = field(default_factory=dict)

    def predicted(self, proxies: Sequence[Proxy]) -> Predicted:
        """Return the predictions of the runtime's own profile [p]."""
        return _join([self._predict(proxy).cold for proxy in proxies])

    def predicted_as_fitted(self, proxies: Sequence[Proxy]) -> Predicted:
        """Return the predictions of the fitted profile [p]."""
        return _join([self._predict(proxy).fitted for proxy in proxies])

    def terms(self, proxies: Sequence[Proxy]) -> list[StepTerms]:
        """Return the error terms of the step of each proxy [p], under the fitted profile."""
        return [self._predict(proxy).terms for proxy in proxies]

    def _predict(self, proxy: Proxy) -> _ProxyPredictions:
        if proxy not in self._known:
            grid = ConfigGrid.from_configs([proxy.config])
            measured, fitted = (
                replace(full, setting=proxy.setting(full.setting)) for full in (self.measured, self.fitted)
            )
            cold = predict(measured, grid)
            self._known[proxy] = _ProxyPredictions(
                cold=cold,
                fitted=cold if self.fitted is self.measured else predict(fitted, grid),
                terms=step_terms(fitted.setting, grid),
            )
        return self._known[proxy]


def observations_with_proxies(observations: Observations, num_candidates: int) -> Observations:
    """Return the observations with the k-th proxy as one more candidate, `num_candidates` + k."""
    # each proxy is a candidate behind those of the study, with its own steps, limit and peak
    seen = list(enumerate(observations.proxies, start=num_candidates))
    timed = [(at, one.log_step_s, one.variance) for at, one in seen if one.log_step_s is not None]
    return replace(
        observations,
        measured=np.concatenate([observations.measured, np.array([at for at, _, _ in timed], dtype=np.int64)]),
        log_step_s=np.concatenate([observations.log_step_s, [log_step_s for _, log_step_s, _ in timed]]),
        variance=np.concatenate([observations.variance, [variance for _, _, variance in timed]]),
        limits_s={**observations.limits_s, **{at: one.limit_s for at, one in seen if one.limit_s is not None}},
        peaks_bytes={
            **observations.peaks_bytes,
            **{at: one.peak_bytes for at, one in seen if one.peak_bytes is not None},
        },
        explored=observations.explored | {at for at, one in seen if not one.ran_out and not one.crashed},
        misfits=observations.misfits | {at for at, one in seen if one.ran_out},
        crashed=observations.crashed | {at for at, one in seen if one.crashed},
        proxies=(),
    )


def _join(parts: Sequence[Predicted]) -> Predicted:
    return together(parts, [np.array([at]) for at in range(len(parts))])
