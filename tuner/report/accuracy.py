"""How good the cost model was: predicted against measured step times."""

from __future__ import annotations

import statistics

import plotly.graph_objects as go

from tuner.record import TrialRecord
from tuner.report.data import ReportData
from tuner.report.figures import BEST, CONFIDENCE, MEASURED, drawing, time_axis
from tuner.report.markup import Html, section, tag
from tuner.report.words import in_short, percent, plural

TITLE = "Predicted and measured"


def relative_error(record: TrialRecord) -> float | None:
    """(predicted - measured) / measured of one trial."""
    if record.step_time_s is None or record.predicted_s is None:
        return None
    return record.predicted_s / record.step_time_s - 1


def accuracy_section(data: ReportData) -> Html:
    """A scatter with the diagonal, and the median error."""
    known = [
        (record, record.predicted_s, record.step_time_s, error)
        for record in data.records
        if (error := relative_error(record)) is not None
    ]
    if not known:
        return section("accuracy", TITLE, tag("p", "No trial has both a prediction and a step time.", class_="empty"))
    sizes = [size for _, predicted_s, measured_s, _ in known for size in (predicted_s, measured_s) if size]
    ends = [0.5 * min(sizes), 2 * max(sizes)]
    figure = go.Figure()
    figure.add_scatter(
        x=ends,
        y=ends,
        mode="lines",
        line={"dash": "dash", "width": 1.5, "color": CONFIDENCE},
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=[measured_s for _, _, measured_s, _ in known],
        y=[predicted_s for _, predicted_s, _, _ in known],
        mode="markers",
        marker={"size": 10, "color": [BEST if record is data.best else MEASURED for record, _, _, _ in known]},
        text=[f"trial {record.number}: {in_short(record.params)}<br>{error:+.1%}" for record, _, _, error in known],
        hovertemplate="%{text}<br>measured %{x:.4g} s, predicted %{y:.4g} s<extra></extra>",
    )
    figure.update_layout(
        xaxis=time_axis("measured step time [s]", sizes),
        yaxis=time_axis("predicted before the trial [s]", sizes),
    )
    median = statistics.median(abs(error) for _, _, _, error in known)
    words = (
        f"The cost model's median error before any trial is {percent(median)} over {plural(len(known), 'trial')}; "
        "above the dashed line it predicted too long a step. The darker point is the best trial."
    )
    return section(
        "accuracy", TITLE, tag("p", words), tag("div", drawing(figure, "accuracy", height=480), class_="square")
    )
