"""Predictions of the cost model for measured runs, and groups of runs that differ in their configuration only.

Letters: n runs.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.calibration.measured_runs import MeasuredRun, UnstatedRun
from costmodels.calibration.sources import MeasuredSetting, setting_of, source_of
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.step.error_models import memory_error_of
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray
from hardware.io.errors import ConfigError

GROUP = ("source", "model", "device", "devices", "precision", "sequence_length", "global_batch_size", "kernels")
"""Properties that the runs of a group share, in the order of `group_key`."""

UNCLEAN = ("OUTLIER", "LOW-MFU", "SUSPECT")
"""Tags in a run's notes for a throughput that its configuration does not explain."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Predictions:
    """Predictions of the cost model for n runs.

    Attributes:
        step_time_s: Predicted step times [n].
        peak_memory_bytes: Predicted peaks, counted as the source of each run counts them [n].
        fits: Whether each run is predicted to be feasible [n].
    """

    step_time_s: FloatArray
    peak_memory_bytes: FloatArray
    fits: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedRange:
    """Predictions for a run whose source does not say what it recomputed.

    Attributes:
        run: The run as if it had recomputed nothing.
        step_time_s: Predicted step time under each mode that its runtime offers, by mode.
        fits: Modes under which the run is predicted to be feasible.
    """

    run: MeasuredRun
    step_time_s: Mapping[str, float]
    fits: tuple[str, ...]


def group_key(run: MeasuredRun) -> tuple[Hashable, ...]:
    """Return the properties that the runs of a group share, in the order of GROUP."""
    job = (run.precision, run.sequence_length, run.global_batch_size)
    kernels = "; ".join(filter(None, [kernels_of(run.notes), str(run.stated)]))
    return run.source, run.model.name, run.device, run.devices, *job, kernels


def kernels_of(notes: str) -> str:
    """Return the remarks that name a run's attention or norm kernel; empty if none does.

    They are facts of the framework, so runs with others are no candidates of one study. Example: `attention kernel
    flash2; RMSNorm kernel off`.
    """
    clauses = (clause.strip() for clause in re.split(r"[;,]", notes))
    return "; ".join(clause for clause in clauses if re.search(r"(?i)\b(?:attention|norm|rms-?norm) kernel\b", clause))


def is_clean(run: MeasuredRun) -> bool:
    """Return whether the run is suitable to test a throughput model."""
    return not any(tag in run.notes for tag in UNCLEAN)


def settings_of(
    runs: Sequence[MeasuredRun], runtimes: Mapping[str, RuntimeProfile], runtime: str | None = None
) -> tuple[list[MeasuredRun], list[MeasuredSetting], Counter[str]]:
    """Return the runs whose device is in the catalog, their settings, and counts of the others by reason.

    Runs of a source with unusable step times keep only their memory.
    """
    kept, settings, skipped = [], [], Counter[str]()
    for run in runs:
        try:
            measured = setting_of(run, runtimes, runtime)
            for device in measured.setting.cluster.devices:
                device.peak_flop_per_s(measured.setting.job.precision)
        except ConfigError as error:
            skipped[f"{error.key}: {error.value} {error.rule}{f'; {error.nearest}' if error.nearest else ''}"] += 1
            continue
        kept.append(run if source_of(run).timed else replace(run, step_time_s=None))
        settings.append(measured)
    return kept, settings, skipped


def predict(runs: Sequence[MeasuredRun], settings: Sequence[MeasuredSetting]) -> Predictions:
    """Predict every run under its setting; runs that share a setting are predicted in one call."""
    step_time_s, memory_bytes = np.zeros(len(runs)), np.zeros(len(runs))
    fits = np.zeros(len(runs), dtype=bool)
    for measured, at in by_setting(settings).items():
        grid = ConfigGrid.from_configs([runs[position].config for position in at])
        # the step waits for the fullest stage, while a source may report the memory of another one
        memory = estimate_memory(measured.setting, grid)
        step_time_s[at] = estimate_step(measured.setting, grid, memory=memory).step_time_s
        memory_bytes[at] = measured.peak_bytes(grid, memory)
        fits[at] = memory.may_fit(0.0, memory_error_of(measured.setting.runtime))
    return Predictions(step_time_s=step_time_s, peak_memory_bytes=memory_bytes, fits=fits)


def by_setting(settings: Sequence[MeasuredSetting]) -> dict[MeasuredSetting, list[int]]:
    """Return the positions of the runs of each setting."""
    positions: dict[MeasuredSetting, list[int]] = defaultdict(list)
    for position, measured in enumerate(settings):
        positions[measured].append(position)
    return positions


def predict_unstated(
    unstated: Sequence[UnstatedRun], runtimes: Mapping[str, RuntimeProfile], runtime: str | None = None
) -> tuple[list[PredictedRange], Counter[str]]:
    """Predict every run under each kind of recomputation that its runtime offers; count runs left out, by reason.

    Args:
        unstated: The runs.
        runtimes: Profiles that replace those of the same name in the catalog.
        runtime: Name of the profile to use for any source; None uses the table.
    """
    runs, settings, skipped = settings_of([each.run for each in unstated], runtimes, runtime)
    modes = [measured.setting.runtime.recompute_modes for measured in settings]
    at = [position for position, own in enumerate(modes) for _ in own]
    variants = [UnstatedRun(run=run).under(mode) for run, own in zip(runs, modes, strict=True) for mode in own]
    predictions = predict(variants, [settings[position] for position in at])
    ranges, begin = [], 0
    for run, own in zip(runs, modes, strict=True):
        part = slice(begin, begin := begin + len(own))
        times, fits = predictions.step_time_s[part].tolist(), predictions.fits[part].tolist()
        feasible = tuple(mode for mode, fit in zip(own, fits, strict=True) if fit)
        ranges.append(PredictedRange(run=run, step_time_s=dict(zip(own, times, strict=True)), fits=feasible))
    return ranges, skipped
