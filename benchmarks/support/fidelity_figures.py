"""Figures of the cost model's fidelity on measured runs: errors, intervals, order within a group, and feasibility.

A group shares source, model, device, devices, precision, sequence length and global batch; its runs differ in their
configuration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import kendalltau, spearmanr

from costmodels.calibration.fidelity import GROUP, Predictions, by_setting, group_key
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.parallel_config import ConfigGrid
from costmodels.step.memory.peak import estimate_memory
from costmodels.surrogates.uncertainty import SIGMA, WIDE, memory_half_width, step_uncertainty
from hardware.arrays import FloatArray

MIN_CONFIGS_TO_RANK = 5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LogErrors:
    """Uncertainty that the cost model states for n predictions, as half-widths of intervals of their logarithm.

    Attributes:
        step: Half-widths for step times, by the key of their figure, each [n].
        memory: Half-widths for memory peaks, likewise.
    """

    step: Mapping[str, FloatArray]
    memory: Mapping[str, FloatArray]

    def take(self, at: np.ndarray) -> LogErrors:
        """Return the uncertainty of the predictions at some positions."""
        step, memory = ({name: each[at] for name, each in part.items()} for part in (self.step, self.memory))
        return LogErrors(step=step, memory=memory)


def log_errors(runs: Sequence[MeasuredRun], settings: Sequence[MeasuredSetting]) -> LogErrors:
    """Compute the stated uncertainty of every run's prediction under its setting."""
    sigma, wide, memory_sigma, memory_wide = (np.zeros(len(runs)) for _ in range(4))
    for measured, at in by_setting(settings).items():
        grid = ConfigGrid.from_configs([runs[position].config for position in at])
        memory = estimate_memory(measured.setting, grid)
        uncertainty = step_uncertainty(measured.setting, grid, memory=memory)
        sigma[at], wide[at] = uncertainty.log_error, uncertainty.log_error_95
        memory_sigma[at] = memory_half_width(measured.setting.runtime, SIGMA)
        memory_wide[at] = memory_half_width(measured.setting.runtime, WIDE)
    return LogErrors(
        step={"covered_68": sigma, "covered_95": wide}, memory={"covered_68": memory_sigma, "covered_95": memory_wide}
    )


def judge(
    runs: Sequence[MeasuredRun], predictions: Predictions, errors: LogErrors
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Compute the figures of every group, and of all runs together.

    Args:
        runs: Measured runs [n].
        predictions: Predictions of the runs.
        errors: Uncertainty that the cost model states for them.
    """
    positions: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
    for position, run in enumerate(runs):
        positions[group_key(run)].append(position)
    groups = [_judge_group([runs[i] for i in at], predictions, np.array(at)) for at in positions.values()]
    return groups, _overall(runs, predictions, groups) | _interval_figures(runs, predictions, errors)


def _judge_group(runs: Sequence[MeasuredRun], predictions: Predictions, at: np.ndarray) -> dict[str, Any]:
    # runs without a step time, failed or with other figures only, count for memory and feasibility
    measured = np.array([run.step_time_s or np.nan for run in runs])
    predicted = predictions.step_time_s[at]
    timed = np.isfinite(measured)
    figures: dict[str, Any] = dict(zip(GROUP, group_key(runs[0]), strict=True))
    figures |= {"n": int(timed.sum()), **error_figures(predicted[timed], measured[timed])}
    # `meshtune rank` puts runs that are predicted not to fit behind all others, so the order here does too
    believed = np.where(predictions.fits[at], predicted, predicted + predicted.max(initial=0.0))
    figures |= _order_figures([run for run, keep in zip(runs, timed, strict=True) if keep], believed[timed])
    figures |= _memory_figures(runs, predictions, at)
    figures |= _feasibility_figures(runs, predictions.fits[at], measured)
    return figures


def error_figures(predicted: FloatArray, measured: FloatArray) -> dict[str, float | None]:
    """Compute the errors of predicted step times, relative to the measured ones; None where there is none.

    Args:
        predicted: Predicted step times [n].
        measured: Measured step times [n].
    """
    if not len(measured):
        return {"median_ape": None, "mean_ape": None, "p90_ape": None, "bias": None}
    error = np.abs(predicted / measured - 1)
    return {
        "median_ape": float(np.median(error)),
        "mean_ape": float(np.mean(error)),
        "p90_ape": float(np.quantile(error, 0.9)),
        "bias": float(np.median(predicted / measured) - 1),
    }


def _order_figures(runs: Sequence[MeasuredRun], predicted: FloatArray) -> dict[str, Any]:
    """Compute Kendall's tau-b, Spearman's rho, the true best's predicted rank, and the first choice's slowdown."""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run, step_time_s in zip(runs, predicted, strict=True):
        times[repr(run.config)].append((run.step_time_s or np.nan, float(step_time_s)))
    figures: dict[str, Any] = {"num_configs": len(times)}
    figures |= dict.fromkeys(("tau", "spearman", "rank_of_best", "regret"))
    if len(times) < MIN_CONFIGS_TO_RANK:
        return figures
    # repeated runs of one configuration count once, by their median
    measured, believed = np.array([np.median(pairs, axis=0) for pairs in times.values()]).T
    # rank correlations are undefined where one side is constant
    best, chosen = np.argmin(measured), np.argmin(believed)
    tells = np.ptp(measured) > 0 and np.ptp(believed) > 0
    return figures | {
        "tau": float(kendalltau(measured, believed).statistic) if tells else 0.0,
        "spearman": float(spearmanr(measured, believed).statistic) if tells else 0.0,
        "rank_of_best": int(np.sum(believed < believed[best])) + 1,
        "regret": float(measured[chosen] / measured[best] - 1),
    }


def _memory_figures(runs: Sequence[MeasuredRun], predictions: Predictions, at: np.ndarray) -> dict[str, Any]:
    peaks = np.array([run.peak_memory_bytes or np.nan for run in runs], dtype=np.float64)
    known = np.isfinite(peaks)
    if not known.any():
        return {"memory_n": 0, "memory_median_ape": None, "memory_p90_ape": None}
    error = np.abs(predictions.peak_memory_bytes[at][known] / peaks[known] - 1)
    return {
        "memory_n": int(known.sum()),
        "memory_median_ape": float(np.median(error)),
        "memory_p90_ape": float(np.quantile(error, 0.9)),
    }


def _feasibility_figures(runs: Sequence[MeasuredRun], fits: np.ndarray, measured: FloatArray) -> dict[str, Any]:
    failed = np.array([run.is_failed for run in runs])
    # a group in which no run was timed has no best one
    best_fits = bool(fits[np.nanargmin(measured)]) if np.isfinite(measured).any() else True
    return {
        "ok": int((~failed).sum()),
        "ok_called_feasible": int(fits[~failed].sum()),
        "failed": int(failed.sum()),
        "failed_called_infeasible": int((~fits[failed]).sum()),
        "best_called_infeasible": not best_fits,
    }


def _overall(
    runs: Sequence[MeasuredRun], predictions: Predictions, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    measured = np.array([run.step_time_s or np.nan for run in runs])
    timed = np.isfinite(measured)
    peaks = np.array([run.peak_memory_bytes or np.nan for run in runs], dtype=np.float64)
    # groups below MIN_CONFIGS_TO_RANK have no rank correlation
    ranked = [group for group in groups if group["tau"] is not None]
    failed, ok = sum(group["failed"] for group in groups), sum(group["ok"] for group in groups)
    memory_error = np.abs(predictions.peak_memory_bytes / peaks - 1)[np.isfinite(peaks)]
    return {
        "n": int(timed.sum()),
        "num_groups": len(groups),
        **error_figures(predictions.step_time_s[timed], measured[timed]),
        "num_ranked_groups": len(ranked),
        "median_tau": _summarize(np.median, [group["tau"] for group in ranked]),
        "median_regret": _summarize(np.median, [group["regret"] for group in ranked]),
        "mean_regret": _summarize(np.mean, [group["regret"] for group in ranked]),
        "memory_n": len(memory_error),
        "memory_median_ape": _summarize(np.median, memory_error),
        "ok_called_feasible": sum(group["ok_called_feasible"] for group in groups) / ok if ok else None,
        "failed_called_infeasible": (
            sum(group["failed_called_infeasible"] for group in groups) / failed if failed else None
        ),
        "best_called_infeasible": sum(group["best_called_infeasible"] for group in groups),
    }


def _interval_figures(
    runs: Sequence[MeasuredRun], predictions: Predictions, errors: LogErrors
) -> dict[str, float | None]:
    """Compute the share of measurements inside the stated intervals of step time, and of memory."""
    figures: dict[str, float | None] = {}
    for prefix, measured, predicted, widths in (
        ("", [run.step_time_s for run in runs], predictions.step_time_s, errors.step),
        ("memory_", [run.peak_memory_bytes for run in runs], predictions.peak_memory_bytes, errors.memory),
    ):
        values = np.array([value or np.nan for value in measured], dtype=np.float64)
        known = np.isfinite(values)
        away = np.abs(np.log(values[known] / predicted[known]))
        figures |= {f"{prefix}{name}": _summarize(np.mean, away <= width[known]) for name, width in widths.items()}
    return figures


def _summarize(statistic: Any, values: Sequence[float] | FloatArray) -> float | None:
    return float(statistic(values)) if len(values) else None
