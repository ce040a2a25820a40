"""Progress of the search: every trial, the best so far, and the confidence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import plotly.graph_objects as go

from tuner.report.data import ReportData
from tuner.report.figures import BEST, CONFIDENCE, CURRENT, FAILED, MEASURED, drawing, time_axis
from tuner.report.markup import Html, empty_section, section, tag
from tuner.report.words import in_short, plural, seconds
from tuner.storage.record import TrialRecord


def progress_section(data: ReportData) -> Html:
    """Render step times in the order in which trials ended, with the confidence on a second axis."""
    finished = list(enumerate(data.finished, start=1))
    if not finished:
        return empty_section("progress", "Progress", "No trial has ended yet.")
    timed = [(at, record, record.step_time_s) for at, record in finished if record.step_time_s is not None]
    failed = [(at, record) for at, record in finished if record.step_time_s is None and not _is_proxy_result(record)]
    proxies = [(at, record) for at, record in finished if _is_proxy_result(record)]
    reference_s = data.reference_step_time_s
    role = data.reference.role if data.reference else ""
    heights = [step_s for _, _, step_s in timed] + ([reference_s] if reference_s else [])
    longest_s = max(heights, default=1.0)
    figure = go.Figure()
    if timed:
        figure.add_scatter(
            x=[at for at, _, _ in timed],
            y=[step_s for _, _, step_s in timed],
            mode="markers",
            name="trial",
            marker={"size": 9, "color": MEASURED},
            text=[f"trial {record.number}: {in_short(record.params)}" for _, record, _ in timed],
            hovertemplate="%{text}<br>%{y:.4g} s<extra></extra>",
        )
        so_far = list(accumulate((step_s for _, _, step_s in timed), min))
        last = finished[-1][0]
        figure.add_scatter(
            x=[*(at for at, _, _ in timed), last],
            y=[*so_far, so_far[-1]],
            mode="lines",
            name="best so far",
            line={"shape": "hv", "width": 2.5, "color": BEST},
            hovertemplate="best so far: %{y:.4g} s<extra></extra>",
        )
    if failed:
        figure.add_scatter(
            x=[at for at, _ in failed],
            y=[longest_s] * len(failed),  # a failed trial has no step time of its own
            mode="markers",
            name="no step time",
            marker={"symbol": "x", "size": 10, "color": FAILED},
            text=[
                f"trial {record.number}: {str(record.status).replace('_', ' ')}<br>{in_short(record.params)}"
                for _, record in failed
            ],
            hovertemplate="%{text}<extra></extra>",
        )
    if proxies:
        figure.add_scatter(
            x=[at for at, _ in proxies],
            y=[longest_s] * len(proxies),  # a proxy's step time is not the candidate's
            mode="markers",
            name="proxy",
            marker={"symbol": "circle-open", "size": 9, "color": MEASURED},
            text=[
                f"trial {record.number}: {in_short(record.params)}<br>ran {in_short(record.proxy.config.values())} on "
                f"{record.proxy.config.num_devices} devices"
                for _, record in proxies
                if record.proxy
            ],
            hovertemplate="%{text}<extra></extra>",
        )
    if reference_s is not None:
        figure.add_scatter(
            x=[0.5, len(finished) + 0.5],
            y=[reference_s] * 2,
            mode="lines",
            name=role,
            line={"dash": "dash", "width": 2, "color": CURRENT},
            hovertemplate=f"{role}: {seconds(reference_s)}<extra></extra>",
        )
    figure.add_scatter(
        x=[at for at, _ in data.p_star_history],
        y=[p_star for _, p_star in data.p_star_history],
        mode="lines",
        name="confidence (right)",
        yaxis="y2",
        line={"dash": "dot", "width": 2, "color": CONFIDENCE},
        hovertemplate="confidence: %{y:.2f}<extra></extra>",
    )
    figure.update_layout(
        xaxis={
            "title": "trials in the order in which they ended",
            "range": [0.5, len(finished) + 0.5],
            "tickformat": "d",
            "dtick": 1 if len(finished) <= 12 else None,
        },
        yaxis={**time_axis("step time [s]", heights), "showticklabels": bool(timed)},
        yaxis2={
            "title": "confidence",
            "overlaying": "y",
            "side": "right",
            "range": [-0.02, 1.08],
            "tickvals": [0, 0.25, 0.5, 0.75, 1],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
    )
    told = tag("p", _describe(data, timed))
    return section("progress", "Progress", told, drawing(figure, "progress", height=400))


def _describe(data: ReportData, timed: Sequence[tuple[int, TrialRecord, float]]) -> str:
    """Describe the best step so far and the confidence, from each timed trial's position, record and step time [s]."""
    count = plural(len(data.finished), "trial")
    confidence = "" if data.p_star is None else f"; the confidence is {data.p_star:.2f}"
    if not timed:
        return f"{count} ended, none with a step time{confidence}."
    first_at, _, first_s = timed[0]
    best_at, best, best_s = min(timed, key=lambda entry: entry[2])
    fell = "" if best_at == first_at else f" After {plural(first_at, 'trial')} it was {seconds(first_s)}."
    return f"Of {count} that ended, trial {best.number} has the shortest step, {seconds(best_s)}{confidence}.{fell}"


def _is_proxy_result(record: TrialRecord) -> bool:
    return record.is_proxy and not record.has_failed
