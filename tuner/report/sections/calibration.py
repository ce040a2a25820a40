"""Ratios of measured over predicted figures: step times, memory, and operators if trials timed them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.surrogates.error_terms import step_terms
from tuner.report.data import ReportData
from tuner.report.markup import Content, Html, empty_section, section, table, tag
from tuner.report.words import plural
from tuner.search.operator_posterior import errors_of, predicted_times

TITLE = "Measured over predicted"


def calibration_section(data: ReportData) -> Html:
    """Render a table of median ratios and their spread; a ratio of 1 is a correct prediction."""
    rows = [*_steps(data), *_peaks(data), *_operators(data)]
    if not rows:
        return empty_section("calibration", TITLE, "Nothing has been measured yet.")
    words = (
        "Measured figures of the trials divided by the cost model's predictions before any trial: 2 means twice the "
        "time, or twice the memory. The search learns from these ratios."
    )
    head: list[Content] = ["figure", "measured", "median", "80% range"]
    return section("calibration", TITLE, tag("p", words), table(head, rows, numeric=frozenset({2, 3})))


def _steps(data: ReportData) -> list[list[Content]]:
    ratios = [
        record.step_time_s / record.predicted_s for record in data.records if record.step_time_s and record.predicted_s
    ]
    return [_row("step time", plural(len(ratios), "trial"), ratios)] if ratios else []


def _peaks(data: ReportData) -> list[list[Content]]:
    ratios = [
        record.observation.peak_memory_bytes / predicted
        for record in data.records
        if record.step_time_s and record.observation and record.observation.peak_memory_bytes
        if (predicted := record.prediction.get("peak_memory_bytes"))
    ]
    return [_row("peak memory", plural(len(ratios), "trial"), ratios)] if ratios else []


def _operators(data: ReportData) -> list[list[Content]]:
    """Make a row for every kind of operator and collective that full-size trials have timed."""
    timed = [record for record in data.records if record.observation and not record.is_proxy]
    samples = [sample for record in timed if record.observation for sample in record.observation.operator_samples]
    if not samples:
        return []
    setting = data.problem.setting
    # Predict the operators of every configuration that has run, to compare with the measured samples.
    configs = {tuple(record.params.values()): data.problem.config_of(record.params) for record in timed}
    grid = ConfigGrid.from_configs(list(configs.values()))
    predicted_s = predicted_times(step_terms(setting, grid))
    rows = []
    for errors in errors_of(samples, predicted_s):
        name = str(errors.kind).replace("_", " ") + (f", {errors.phase}" if errors.phase else "")
        shapes = len({tuple(shape) for shape in errors.shape.tolist()})
        rows.append(_row(name, plural(shapes, "shape"), [math.exp(error) for error in errors.log_error.tolist()]))
    return sorted(rows, key=lambda row: str(row[0]))


def _row(name: str, count: str, ratios: Sequence[float]) -> list[Content]:
    low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9]).tolist()
    return [name, count, f"{middle:.3g}", f"{low:.3g} to {high:.3g}" if len(ratios) > 1 else ""]
