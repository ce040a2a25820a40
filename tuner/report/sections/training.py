"""Losses of the training inside of which the trials ran, across its changes of layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import plotly.graph_objects as go

from tuner.report.data import ReportData
from tuner.report.figures import CANDIDATES, CONFIDENCE, OTHER_CANDIDATES, drawing
from tuner.report.markup import Content, Html, section, table, tag
from tuner.report.words import in_short, plural
from tuner.storage.record import TrialRecord

MOST_MARKED = 100
"""Largest number of losses of which each has a mark."""

Stretch = tuple[TrialRecord, tuple[tuple[int, float], ...]]
"""Trial whose steps count, and the loss of each of these steps."""


def training_section(data: ReportData) -> Html:
    """Render the loss over the steps of the training, in the colour of the layout that trained them.

    Empty if no trial ran inside of a training whose log tells losses.
    """
    found = stretches(data.records)
    if not found:
        return Html("")
    rows: list[list[Content]] = [
        [str(record.number), in_short(record.params), f"{first:,}", f"{last:,}", f"{at_first:.4g}", f"{at_last:.4g}"]
        for record, losses in found
        for (first, at_first), (last, at_last) in [(losses[0], losses[-1])]
    ]
    head: list[Content] = ["trial", "configuration", "first step", "last step", "first loss", "last loss"]
    return section(
        "training",
        "The training",
        tag("p", losses_in_words(found)),
        drawing(loss_figure(found), "training", height=380),
        table(head, rows, numeric=frozenset({0, 2, 3, 4, 5})),
    )


def stretches(records: Sequence[TrialRecord]) -> list[Stretch]:
    """Return the trials that brought a training forward, in their order, with their losses."""
    return [
        (record, record.observation.losses) for record in records if record.observation and record.observation.losses
    ]


def losses_in_words(found: Sequence[Stretch]) -> str:
    """Describe the steps of the loss at changes of the layout, beside all others."""
    told = [(record.params, loss) for record, losses in found for _, loss in losses]
    changes: list[float] = []
    others: list[float] = []
    for (layout, before), (next_layout, after) in pairwise(told):
        (others if layout == next_layout else changes).append(abs(after - before))
    start = f"{plural(len(found), 'trial')} trained steps that count"
    if not changes:
        return f"{start}, all in one layout."
    elsewhere = f"; elsewhere by at most {max(others):.2g}" if others else ""
    return (
        f"{start}. Where the layout changed, {plural(len(changes), 'time')}, the loss moved by at most "
        f"{max(changes):.2g} from one step to the next{elsewhere}."
    )


def loss_figure(found: Sequence[Stretch]) -> go.Figure:
    """Plot the loss over the steps of the training: a line through all, and each layout's steps in its colour."""
    figure, colours = go.Figure(), iter(CANDIDATES)
    told = [each for _, losses in found for each in losses]
    figure.add_scatter(
        x=[step for step, _ in told],
        y=[loss for _, loss in told],
        mode="lines",
        line={"width": 1, "color": CONFIDENCE},
        hoverinfo="skip",
        showlegend=False,
    )
    by_layout: dict[str, list[Stretch]] = {}
    for record, losses in found:
        by_layout.setdefault(in_short(record.params), []).append((record, losses))
    for layout, own in by_layout.items():
        colour = next(colours, OTHER_CANDIDATES)
        gap: tuple[tuple[None, None], ...] = ((None, None),)  # between two trials of one layout
        points = [point for _, losses in own for point in (*losses, *gap)]
        figure.add_scatter(
            x=[step for step, _ in points],
            y=[loss for _, loss in points],
            mode="lines+markers" if len(told) <= MOST_MARKED else "lines",
            name=layout,
            line={"width": 3, "color": colour},
            marker={"size": 7, "color": colour},
            text=[f"trial {record.number}" for record, losses in own for _ in (*losses, *gap)],
            hovertemplate=f"{layout}<br>%{{text}}, step %{{x}}: %{{y:.5g}}<extra></extra>",
        )
    figure.update_xaxes(title="step of the training", tickformat=",d")
    figure.update_yaxes(title="loss")
    return figure
