"""Posterior probability of each configuration to be the fastest, after every trial (as in FlexParallel's Figure 6)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from costmodels.job.parallel_config import DEGREES, Value
from tuner.report.data import ReportData
from tuner.report.figures import CANDIDATES, FAILED, INK, OTHER_CANDIDATES, drawing
from tuner.report.markup import Content, Html, empty_section, section, table, tag
from tuner.report.words import after_trials, in_short, percent
from tuner.search.population import MAX_SHARES, Moment, Share
from tuner.storage.record import TrialRecord

TITLE = "Which configuration is probably the fastest"

ABOVE = 1.045
"""Height at which a chosen configuration without its own part of the column is marked."""

NUM_LISTED = 6
"""Number of candidates in the table of the latest probabilities."""

_MANY = 12
"""Number of columns above which not every column is labelled on the axis."""

Key = tuple[Value, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Part of one column: a candidate, or the sum of all others.

    Attributes:
        column: Number of trials that had ended.
        share: Candidate with its probability; None for the sum.
        tried: Whether the candidate had been tried by then.
        bottom: Lower end on the axis of probability.
        height: Probability of the candidate or sum.
    """

    column: int
    share: Share | None
    tried: bool
    bottom: float
    height: float

    @property
    def middle(self) -> float:
        """Height of a mark on the segment."""
        return self.bottom + self.height / 2


def population_section(data: ReportData) -> Html:
    """Render a column of probabilities before the first trial and after each, with the choices made from it."""
    if not data.moments:
        words = "The study holds no probabilities yet; they are stored from its first trial on."
        return empty_section("population", TITLE, words)
    columns = _columns(data)
    colours = _colours(data, [moment for _, moment in columns])
    segments = [part for column, moment in columns for part in _stack_column(column, moment, colours)]
    figure = go.Figure()
    _add_bars(figure, segments, colours, data.dimensions)
    _add_confidence(figure, columns, data.request.search.confidence)
    _add_choices(figure, data, segments, [column for column, _ in columns])
    last = columns[-1][0]
    step = 1 if last <= _MANY else 5 * math.ceil(last / 50)
    ticks = [column for column, _ in columns if column % step == 0]
    figure.update_layout(
        barmode="overlay",
        bargap=0.25 if last <= _MANY else 0.12,
        xaxis={
            "title": "number of trials that had ended",
            "range": [columns[0][0] - 0.6, last + 0.6],
            "tickvals": ticks,
            "showgrid": False,
        },
        yaxis={
            "title": "probability",
            "range": [0, ABOVE + 0.045],
            "tickvals": [0, 0.25, 0.5, 0.75, 1],
            "tickformat": ".0%",
        },
    )
    words = (
        f"Share of the {data.request.search.draws:,} posterior draws in which each configuration is fastest, before "
        "the first trial and after each. Solid parts had been tried by then, hatched parts had not. The confidence "
        "that no untried configuration is faster is the height of all solid parts together. A diamond marks the "
        f"configuration tried next; it is above the column if it was not among the {MAX_SHARES} most probable."
    )
    alike = _common_dimensions(colours, data.dimensions)
    if alike:
        words += f" All configurations named here have {in_short(alike)}."
    return section("population", TITLE, tag("p", words), drawing(figure, "population", height=440), _latest(data))


def _latest(data: ReportData) -> Html:
    """Render a table of the most probable candidates at the end."""
    moment = data.moments[-1]
    listed = moment.shares[:NUM_LISTED]
    rows: list[list[Content]] = [
        [in_short(share.config), percent(share.probability), "tried" if share.tried else "not tried"]
        for share in listed
    ]
    others = 1 - math.fsum(share.probability for share in listed)
    rows += [["all others", percent(others), ""]] if others > 5e-4 else []
    when = after_trials(data.records, moment.trial)
    return table([f"configuration ({when})", "probability", ""], rows, numeric=frozenset({1}))


def _columns(data: ReportData) -> list[tuple[int, Moment]]:
    """Pair each moment with the number of trials that had ended."""
    ended = {record.number: count for count, record in enumerate(data.finished, start=1)}
    return [
        (0 if moment.trial is None else ended[moment.trial], moment)
        for moment in data.moments
        if moment.trial is None or moment.trial in ended
    ]


def _colours(data: ReportData, moments: Sequence[Moment]) -> dict[Key, str]:
    """Assign colours to the candidates that were most probable for longest; the best has the first if it was drawn."""
    weight: dict[Key, float] = defaultdict(float)
    for moment in moments:
        for share in moment.shares:
            weight[share.key] += share.probability
    best = tuple(data.best.params[name] for name in data.dimensions) if data.best else None
    ranked = sorted(weight, key=lambda key: (key != best, -weight[key]))
    return dict(zip(ranked, CANDIDATES, strict=False))


def _stack_column(column: int, moment: Moment, colours: Mapping[Key, str]) -> list[Segment]:
    """Stack the parts of a column: tried ones below, coloured ones first, in the same order in all columns."""
    order = {key: rank for rank, key in enumerate(colours)}
    parts: list[tuple[Share | None, bool, float]] = []
    for tried, rest in ((True, moment.rest_tried), (False, moment.rest_untried)):
        members = [share for share in moment.shares if share.tried is tried]
        members.sort(key=lambda share: order.get(share.key, len(order)))
        parts += [(share, tried, share.probability) for share in members]
        if rest:
            parts.append((None, tried, rest))
    bottoms = [math.fsum(height for _, _, height in parts[:at]) for at in range(len(parts))]
    return [
        Segment(column=column, share=share, tried=tried, bottom=bottom, height=height)
        for (share, tried, height), bottom in zip(parts, bottoms, strict=True)
    ]


def _common_dimensions(keys: Collection[Key], dimensions: Sequence[str]) -> dict[str, Value]:
    """Collect the further dimensions that are equal for all coloured candidates, which their names omit."""
    columns = zip(dimensions, zip(*keys, strict=True), strict=True)
    return {name: values[0] for name, values in columns if name not in DEGREES and len(set(values)) == 1}


def _legend(key: Key, dimensions: Sequence[str], alike: Mapping[str, Value]) -> str:
    values = zip(dimensions, key, strict=True)
    return in_short({name: value for name, value in values if name not in alike})


def _add_bars(
    figure: go.Figure, segments: Sequence[Segment], colours: Mapping[Key, str], dimensions: Sequence[str]
) -> None:
    """Add two traces for each candidate, tried and untried, at the heights computed by `_stack_column`."""
    alike = _common_dimensions(colours, dimensions)
    named: set[Key | None] = set()
    for key in (*colours, None):
        for tried in (True, False):
            members = [part for part in segments if part.tried is tried and _colour_key(part, colours) == key]
            if not members:
                continue
            label = "all others" if key is None else _legend(key, dimensions, alike)
            colour = OTHER_CANDIDATES if key is None else colours[key]
            figure.add_bar(
                x=[part.column for part in members],
                y=[part.height for part in members],
                base=[part.bottom for part in members],
                name=None if key in named else label,
                marker={
                    "color": colour,
                    "line": {"width": 0},
                    # hatch on the page's own background, so that it works on dark and light pages
                    "pattern": {"shape": "" if tried else "/", "fillmode": "replace", "size": 6, "solidity": 0.45},
                },
                text=[f"{_label(part)}<br>{percent(part.height)}{', tried' if tried else ''}" for part in members],
                textposition="none",
                hovertemplate="%{text}<extra></extra>",
            )
            named.add(key)


def _colour_key(part: Segment, colours: Mapping[Key, str]) -> Key | None:
    return part.share.key if part.share is not None and part.share.key in colours else None


def _label(part: Segment) -> str:
    return "all others" if part.share is None else in_short(part.share.config)


def _add_confidence(figure: go.Figure, columns: Sequence[tuple[int, Moment]], confidence: float) -> None:
    """Add the line of p_star over the columns, and the confidence at which the search stops."""
    line = {"color": FAILED, "width": 1.5, "dash": "dash"}
    figure.add_hline(y=confidence, line=line)
    figure.add_scatter(x=[None], y=[None], mode="lines", name=f"search stops above {confidence:g}", line=line)
    at, p_star = [column for column, _ in columns], [moment.p_star for _, moment in columns]
    # a dark line with a light edge is visible on every colour
    figure.add_scatter(x=at, y=p_star, mode="lines", line={"color": "#FFFFFF", "width": 5}, hoverinfo="skip")
    figure.add_scatter(
        x=at,
        y=p_star,
        mode="lines",
        name="confidence",
        line={"color": INK, "width": 2},
        hovertemplate="confidence: %{y:.2f}<extra></extra>",
    )


def _add_choices(figure: go.Figure, data: ReportData, segments: Sequence[Segment], columns: Sequence[int]) -> None:
    """Add a diamond for each trial, on the column from which it was chosen; equal places share one diamond."""
    where = {(part.column, part.share.key): part.middle for part in segments if part.share}
    told: dict[tuple[int, float], list[str]] = defaultdict(list)
    for record in data.records:
        column = _column_of(record, data, columns)
        if column is not None:
            height = where.get((column, tuple(record.params[name] for name in data.dimensions)), ABOVE)
            told[column, height].append(f"trial {record.number}: {in_short(record.params)}")
    figure.add_scatter(
        x=[column for column, _ in told],
        y=[height for _, height in told],
        mode="markers",
        name="tried next",
        marker={
            "symbol": "diamond",
            "size": 11 if len(columns) <= _MANY else 8,
            "color": INK,
            "line": {"width": 1.5, "color": "#FFFFFF"},
        },
        text=["<br>".join(trials) for trials in told.values()],
        hovertemplate="%{text}<extra></extra>",
    )


def _column_of(record: TrialRecord, data: ReportData, columns: Sequence[int]) -> int | None:
    """Count the trials that had ended when a trial was chosen; None if there is no such column."""
    asked = record.started_at
    if asked is None:
        return None
    before = sum(other.ended_at is not None and other.ended_at <= asked for other in data.finished)
    return before if before in columns else None
