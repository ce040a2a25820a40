"""How the search went: every trial, the best so far, and the growing confidence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import plotly.graph_objects as go

from tuner.report.data import ReportData
from tuner.report.figures import BEST, CONFIDENCE, CURRENT, FAILED, MEASURED, drawing, time_axis
from tuner.report.markup import Html, section, tag
from tuner.report.words import in_short, plural, seconds
from tuner.storage.record import TrialRecord


def progress_section(data: ReportData) -> Html:
    """Step times in the order in which trials ended, with p_star on a second axis."""
    finished = list(enumerate(data.finished, start=1))
    if not finished:
        return section("progress", "Progress", tag("p", "No trial has ended yet.", class_="empty"))
    timed = [(at, record, record.step_time_s) for at, record in finished if record.step_time_s is not None]
    failed = [(at, record) for at, record in finished if record.step_time_s is None and not _is_proxys(record)]
    proxies = [(at, record) for at, record in finished if _is_proxys(record)]
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
            y=[longest_s] * len(failed),  # a failed trial has no height of its own
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
            y=[longest_s] * len(proxies),  # its step is not the candidate's
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
        name="p_star (right)",
        yaxis="y2",
        line={"dash": "dot", "width": 2, "color": CONFIDENCE},
        hovertemplate="p_star: %{y:.2f}<extra></extra>",
    )
    figure.update_layout(
        xaxis={
            "title": "trials in the order of their ends",
            "range": [0.5, len(finished) + 0.5],
            "tickformat": "d",
            "dtick": 1 if len(finished) <= 12 else None,
        },
        yaxis={**time_axis("step time [s]", heights), "showticklabels": bool(timed)},
        yaxis2={
            "title": "p_star",
            "overlaying": "y",
            "side": "right",
            "range": [-0.02, 1.08],
            "tickvals": [0, 0.25, 0.5, 0.75, 1],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
    )
    told = tag("p", _in_words(data, timed))
    return section("progress", "Progress", told, drawing(figure, "progress", height=400))


def _in_words(data: ReportData, timed: Sequence[tuple[int, TrialRecord, float]]) -> str:
    """How the best step fell, and where p_star stands.

    Args:
        data: The study.
        timed: Positions in the order of their ends, of the trials with a step time, the trials, and that time.
    """
    count = plural(len(data.finished), "trial")
    p_star = "" if data.p_star is None else f"; p_star is {data.p_star:.2f}"
    if not timed:
        return f"{count} ended, none with a step time{p_star}."
    first_at, _, first_s = timed[0]
    best_at, best, best_s = min(timed, key=lambda entry: entry[2])
    fell = "" if best_at == first_at else f" It was {seconds(first_s)} when {first_at} had ended."
    return f"Of {count} that ended, trial {best.number} has the shortest step, {seconds(best_s)}{p_star}.{fell}"


def _is_proxys(record: TrialRecord) -> bool:
    """Whether a smaller job has measured what it was to."""
    return record.is_proxy and not record.has_failed
