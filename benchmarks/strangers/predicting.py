"""Predictions of a publisher's runs by their own runtime's profile, which has never seen them.

Letters: n runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.strangers.errors import LeftOutErrors
from benchmarks.strangers.left_out import strange_setting
from benchmarks.support.fidelity_figures import LogErrors, judge
from benchmarks.support.simulated_runs import taken
from costmodels.calibration.fidelity import Predictions, by_setting, is_clean, predict, settings_of
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import source_of
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.step.memory import estimate_memory
from costmodels.surrogates.uncertainty import NORMAL_WIDE, SIGMA, WIDE, ErrorModel, constant_effects
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Stranger:
    """Runs of one publisher and the profiles that have not seen them: the work of one process.

    Attributes:
        runs: Runs of the publisher.
        profiles: Profiles without the publisher, by name.
    """

    runs: tuple[MeasuredRun, ...]
    profiles: Mapping[str, RuntimeProfile]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Predicted:
    """Predictions of a publisher's clean and failed runs.

    Attributes:
        runs: Runs that can be predicted [n].
        predictions: Their predictions.
        errors: Errors of these.
        memory_error: Error of memory that the profile states [n].
    """

    runs: tuple[MeasuredRun, ...]
    predictions: Predictions
    errors: LeftOutErrors
    memory_error: FloatArray

    def figures_of(self, source: str, model: ErrorModel) -> dict[str, Any] | None:
        """Return the figures of one source under an error model; None if none of its runs can be predicted."""
        at = np.array([place for place, run in enumerate(self.runs) if run.source == source], dtype=np.int64)
        if not len(at):
            return None
        effect, memory_error = self.errors.effect[at], self.memory_error[at]
        stated = LogErrors(
            step={"covered_68": model.half_width(effect, SIGMA), "covered_95": model.half_width(effect, WIDE)},
            memory={"covered_68": memory_error, "covered_95": NORMAL_WIDE * memory_error},
        )
        return judge([self.runs[place] for place in at], taken(self.predictions, at), stated)[1]


def predict_stranger(stranger: Stranger) -> Predicted:
    """Predict the clean and the failed runs of a publisher."""
    known, _, _ = settings_of([run for run in stranger.runs if run.is_failed or is_clean(run)], {})
    settings = [strange_setting(run, stranger.profiles[source_of(run).runtime]) for run in known]
    predictions = predict(known, settings)
    effect, memory_error = np.zeros(len(known)), np.zeros(len(known))
    for measured, at in by_setting(settings).items():
        grid = ConfigGrid.from_configs([known[place].config for place in at])
        effects = constant_effects(measured.setting, grid, memory=estimate_memory(measured.setting, grid))
        effect[at] = np.sqrt(np.sum([each**2 for each in effects.values()], axis=0))
        memory_error[at] = measured.setting.runtime.memory_error
    measured_s = np.array([run.step_time_s or np.nan for run in known], dtype=np.float64)
    return Predicted(
        runs=tuple(known),
        predictions=predictions,
        errors=LeftOutErrors(log_error=np.log(measured_s / predictions.step_time_s), effect=effect),
        memory_error=memory_error,
    )
