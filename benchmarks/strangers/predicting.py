"""Predictions of a source's runs by its own runtime's profile, which has never seen them.

Letters: n runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.strangers.left_out import strange_setting
from benchmarks.support.fidelity_figures import judge
from costmodels.calibration.fidelity import is_clean, log_errors, predict, settings_of
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import source_of
from costmodels.job.runtime import RuntimeProfile

Quoted = Mapping[str, Any]
"""Figures of `judge` over all runs of a source."""


def quote_source(runs: Sequence[MeasuredRun], profiles: Mapping[str, RuntimeProfile]) -> dict[str, Any] | None:
    """Return the figures of one source's clean runs; None if none of them can be predicted.

    Args:
        runs: Runs of one source.
        profiles: Profiles without the source's publisher, by name.
    """
    known, _, _ = settings_of([run for run in runs if run.is_failed or is_clean(run)], {})
    if not known:
        return None
    settings = [strange_setting(run, profiles[source_of(run).runtime]) for run in known]
    _, figures = judge(known, predict(known, settings), log_errors(known, settings))
    return figures
