"""Predictions of a publisher's runs by their own runtime's profile, which has never seen them.

Letters: n runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.strangers.errors import LeftOutErrors
from benchmarks.support.fidelity_figures import LogErrors, judge
from benchmarks.support.problems import strange_setting
from benchmarks.support.simulated_runs import taken
from costmodels.calibration.fidelity import Predictions, by_setting, group_key, is_clean, predict, settings_of
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import MeasuredSetting, source_of
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import UNKNOWN, RuntimeProfile
from costmodels.step.error_models import ErrorModels
from costmodels.step.memory.peak import LEAST_CHANCE, estimate_memory
from costmodels.surrogates.uncertainty import SIGMA, WIDE, constant_effects, half_width
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
        settings: Their settings [n].
        predictions: Their predictions.
        errors: Errors of these.
        log_margin: Log of the device's memory over the predicted need [n].
    """

    runs: tuple[MeasuredRun, ...]
    settings: tuple[MeasuredSetting, ...]
    predictions: Predictions
    errors: LeftOutErrors
    log_margin: FloatArray

    def stated(self, models: ErrorModels) -> tuple[Predictions, LogErrors]:
        """Return the predictions as error models judge their fit, and the uncertainty that these state."""
        scale, memory = models.step.scale(self.errors.effect), models.memory
        intervals = {"covered_68": SIGMA, "covered_95": WIDE}
        widths = LogErrors(
            step={name: scale * half_width(models.step.freedom, share) for name, share in intervals.items()},
            memory={
                name: np.full(len(self.runs), memory.scale * half_width(memory.freedom, share))
                for name, share in intervals.items()
            },
        )
        fits = memory.probability_below(self.log_margin) >= LEAST_CHANCE
        return replace(self.predictions, fits=fits), widths

    def figures_of(self, source: str, models: ErrorModels) -> dict[str, Any] | None:
        """Return the figures of one source under error models; None if none of its runs can be predicted."""
        at = np.array([place for place, run in enumerate(self.runs) if run.source == source], dtype=np.int64)
        if not len(at):
            return None
        predictions, widths = self.stated(models)
        runs = [self.runs[place] for place in at]
        after_one = error_after_one(runs, self.errors.log_error[at])
        found = judge(runs, taken(predictions, at), widths.take(at))[1]
        return found | {"after_one": after_one, "tuned_by": source_of(runs[0]).tuned_by}


def error_after_one(runs: Sequence[MeasuredRun], log_error: FloatArray) -> float | None:
    """Return the median error of a run where another configuration of its group was measured and scales the prediction.

    A repeat of the measured configuration says how steady a cluster is, and nothing of the prediction of another. None
    where no group has two configurations: nothing is left to judge then.

    Args:
        runs: Runs [n].
        log_error: Log of measured over predicted step time; nan without a measurement [n].
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for place in np.flatnonzero(np.isfinite(log_error)):
        groups[group_key(runs[place])].append(int(place))
    differences = []
    for at in groups.values():
        configs = [(runs[place].config, runs[place].recompute_modules) for place in at]
        number = np.array([configs.index(config) for config in configs])  # equal for repeats
        differences.append(np.abs(log_error[at][:, None] - log_error[at])[number[:, None] != number])
    found = np.concatenate([*differences, np.zeros(0)])
    return float(np.expm1(np.median(found))) if len(found) else None


def predict_stranger(stranger: Stranger) -> Predicted:
    """Predict the clean and the failed runs of a publisher."""
    known, _, _ = settings_of([run for run in stranger.runs if run.is_failed or is_clean(run)], {})
    settings = [strange_setting(run, stranger.profiles[source_of(run).runtime]) for run in known]
    predictions = predict(known, settings)
    effect, log_margin = np.zeros(len(known)), np.zeros(len(known))
    for measured, at in by_setting(settings).items():
        grid = ConfigGrid.from_configs([known[place].config for place in at])
        memory = estimate_memory(measured.setting, grid)
        effects = constant_effects(measured.setting, grid, memory=memory)
        effect[at] = np.sqrt(np.sum([each**2 for each in effects.values()], axis=0))
        log_margin[at] = np.log(memory.capacity_bytes / memory.needed_bytes)
    measured_s = np.array([run.step_time_s or np.nan for run in known], dtype=np.float64)
    peaks_bytes = np.array([run.peak_memory_bytes or np.nan for run in known], dtype=np.float64)
    unnamed = predict(known, [strange_setting(run, stranger.profiles[UNKNOWN]) for run in known])
    return Predicted(
        runs=tuple(known),
        settings=tuple(settings),
        predictions=predictions,
        errors=LeftOutErrors(
            log_error=np.log(measured_s / predictions.step_time_s),
            effect=effect,
            log_memory=np.log(peaks_bytes / predictions.peak_memory_bytes),
            log_unknown_memory=np.log(peaks_bytes / unnamed.peak_memory_bytes),
        ),
        log_margin=log_margin,
    )
