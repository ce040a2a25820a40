"""Accuracy of the cost model: predicted against measured step times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import plotly.graph_objects as go

from costmodels.job.parallel_config import ConfigGrid
from costmodels.step.memory.peak import estimate_memory
from costmodels.surrogates.uncertainty import likely_range, step_uncertainty
from tuner.report.data import ReportData
from tuner.report.figures import BEST, CONFIDENCE, MEASURED, drawing, time_axis
from tuner.report.markup import Html, empty_section, section, tag
from tuner.report.words import in_short, percent, plural
from tuner.storage.record import TrialRecord

TITLE = "Predicted and measured"


def relative_error(record: TrialRecord) -> float | None:
    """Compute (predicted - measured) / measured of one trial; None without both."""
    if record.step_time_s is None or record.predicted_s is None:
        return None
    return record.predicted_s / record.step_time_s - 1


def likely_ranges_s(data: ReportData, records: Sequence[TrialRecord]) -> list[tuple[float, float]]:
    """Compute for trials with a prediction the 68% range of the step time [s], as predicted before any trial."""
    setting = data.problem.setting
    grid = ConfigGrid.from_configs([data.problem.config_of(record.params) for record in records])
    memory = estimate_memory(setting, grid)
    log_errors = step_uncertainty(setting, grid, memory=memory).log_error
    return [
        likely_range(record.predicted_s or 0.0, float(log_error))
        for record, log_error in zip(records, log_errors, strict=True)
    ]


def holds(ends: tuple[float, float], record: TrialRecord) -> bool:
    """Check whether a range contains the measured step time."""
    return record.step_time_s is not None and ends[0] <= record.step_time_s <= ends[1]


def accuracy_section(data: ReportData) -> Html:
    """Render a scatter plot of predicted over measured times, with the diagonal and the median error."""
    known = [
        (record, record.predicted_s, record.step_time_s, record.predicted_s / record.step_time_s - 1)
        for record in data.records
        if record.predicted_s is not None and record.step_time_s is not None
    ]
    if not known:
        return empty_section("accuracy", TITLE, "No trial has both a prediction and a step time.")
    records = [record for record, _, _, _ in known]
    ranges_s = likely_ranges_s(data, records)
    best = None if data.best is None else data.best.number
    sizes = [measured_s for _, _, measured_s, _ in known] + [end for bounds in ranges_s for end in bounds]
    ends = [0.5 * min(sizes), 2 * max(sizes)]
    figure = go.Figure()
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"dash": "dash", "width": 1.5, "color": CONFIDENCE}, hoverinfo="skip"
    )
    figure.add_scatter(
        x=[measured_s for _, _, measured_s, _ in known],
        y=[predicted_s for _, predicted_s, _, _ in known],
        mode="markers",
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [high_s - known[at][1] for at, (_, high_s) in enumerate(ranges_s)],
            "arrayminus": [known[at][1] - low_s for at, (low_s, _) in enumerate(ranges_s)],
            "color": CONFIDENCE,
            "thickness": 1.2,
            "width": 3,
        },
        marker={"size": 10, "color": [BEST if record.number == best else MEASURED for record, _, _, _ in known]},
        text=[f"trial {record.number}: {in_short(record.params)}<br>{error:+.1%}" for record, _, _, error in known],
        customdata=ranges_s,
        hovertemplate="%{text}<br>measured %{x:.4g} s, predicted %{y:.3g} s "
        "(%{customdata[0]:.3g} to %{customdata[1]:.3g} s)<extra></extra>",
    )
    figure.update_layout(
        xaxis=time_axis("measured step time [s]", sizes), yaxis=time_axis("predicted before the trial [s]", sizes)
    )
    median = statistics.median(abs(error) for _, _, _, error in known)
    words = (
        f"The cost model's median error before any trial is {percent(median)} over {plural(len(known), 'trial')}; "
        "above the dashed line the predicted step is too long. Each bar is the range predicted to contain the step "
        f"with a probability of 68%: "
        f"{sum(holds(ends, record) for record, ends in zip(records, ranges_s, strict=True)):,} of "
        f"{len(known):,} measured steps are inside. The darker point is the best trial."
    )
    return section(
        "accuracy", TITLE, tag("p", words), tag("div", drawing(figure, "accuracy", height=480), class_="square")
    )
