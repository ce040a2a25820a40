"""Plotly figures with one shared template, and one colour for each part of the step in all figures."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.io import to_json

from tuner.report.markup import Html, tag

# Paul Tol's "muted" scheme, made for colour-blind readers (personal.sron.nl/~pault, figure 4)
_TOL_MUTED = {
    "cyan": "#88CCEE",
    "rose": "#CC6677",
    "purple": "#AA4499",
    "wine": "#882255",
    "sand": "#DDCC77",
    "teal": "#44AA99",
    "olive": "#999933",
    "indigo": "#5A4FB5",
    "grey": "#C9CDD2",
    "green": "#117733",
    "ink": "#6B7078",
    "orange": "#EE8866",  # of his "light" scheme, which the muted one does not have
}
_PART_COLOURS = {
    "compute": "cyan",
    "tp": "rose",
    "cp": "purple",
    "up": "wine",
    "ep": "sand",
    "dp": "teal",
    "pp": "olive",
    "host": "indigo",
    "bubble": "grey",
    "imbalance": "orange",
    "optimizer": "green",
    "weights": "cyan",
    "gradients": "teal",
    "activations": "sand",
    "logits": "rose",
    "buffers": "purple",
    "fragmentation": "wine",
    "overhead": "ink",
}

CANDIDATES = tuple(
    _TOL_MUTED[name] for name in ("cyan", "rose", "sand", "green", "indigo", "teal", "wine", "olive", "purple")
)
"""Colours of candidates in figures that distinguish several."""
OTHER_CANDIDATES = _TOL_MUTED["grey"]
BEST = "#0072B2"
MEASURED = "#56B4E9"
FAILED = "#D55E00"
CURRENT = "#E69F00"
CONFIDENCE = "#8A8F98"
FORWARD = _TOL_MUTED["cyan"]
BACKWARD = _TOL_MUTED["indigo"]
WEIGHT_GRADIENTS = _TOL_MUTED["sand"]
PLOTLY_FILE = Path(__file__).parent / "plotly_js" / "plotly-basic.min.js"
INK = "#1B1E23"
"""Colour of marks and lines drawn with a white edge, so that they are visible on any colour."""
_TEXT = "#7A808A"
WIDE_SPREAD = 6.0
"""Ratio of the longest to the shortest step above which a time axis is logarithmic."""

_GRID = "rgba(128, 134, 142, 0.22)"

_TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": _TEXT},
        "paper_bgcolor": "rgba(0, 0, 0, 0)",
        "plot_bgcolor": "rgba(0, 0, 0, 0)",
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "hoverlabel": {"font": {"size": 13}},
        "showlegend": False,
        "xaxis": {"gridcolor": _GRID, "zeroline": False, "automargin": True, "ticks": "outside", "tickcolor": _GRID},
        "yaxis": {"gridcolor": _GRID, "zeroline": False, "automargin": True},
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One stacked bar.

    Attributes:
        label: Label beside the bar.
        parts: Size of each part by its name.
        measured: Measured total; None if there is none.
    """

    label: str
    parts: dict[str, float]
    measured: float | None


def part_colour(part: str) -> str:
    """Return the colour of a part of the step or the memory; grey for parts without their own."""
    return _TOL_MUTED[_PART_COLOURS.get(part, "grey")]


def time_axis(title: str, steps_s: Sequence[float]) -> dict[str, Any]:
    """Make an axis for the step times [s] with a margin; logarithmic if outliers would squeeze the others."""
    smallest, largest = min(steps_s, default=1.0), max(steps_s, default=1.0)
    if largest <= WIDE_SPREAD * smallest:
        margin = 0.08 * (largest - smallest) or 0.05 * largest
        return {"title": title, "range": [smallest - margin, largest + margin]}
    ends = [math.log10(smallest), math.log10(largest)]
    margin = 0.08 * (ends[1] - ends[0])
    return {
        "title": title,
        "type": "log",
        "range": [ends[0] - margin, ends[1] + margin],
        "dtick": "D2",
        "tickformat": "~g",
    }


DRAW_SCRIPT = Html("""
for (const figure of document.querySelectorAll("script.figure")) {
  const { data, layout } = JSON.parse(figure.textContent);
  const place = figure.previousElementSibling;
  Plotly.newPlot(place, data, layout, { displaylogo: false, displayModeBar: false });
  new ResizeObserver(() => Plotly.relayout(place, { width: place.clientWidth })).observe(place);
}
""")
"""Script that draws the figures which `drawing` embeds in the page as data."""


@functools.cache
def plotly_script() -> Html:
    """Return the plotly library, to be inlined once per page: its traces of lines, points and bars (plotly_js)."""
    return Html(PLOTLY_FILE.read_text(encoding="utf-8"))


def drawing(figure: go.Figure, identity: str, *, height: int) -> Html:
    """Render a figure under its legend; `identity` must be unique on the page.

    The legend is HTML of our own, because plotly's does not wrap on narrow pages. The figure is embedded as data that
    DRAW_SCRIPT reads, so that the page's scripts do not depend on its contents.
    """
    legend = tag("div", *(_legend_entry(trace) for trace in figure.data if trace.name), class_="legend")
    figure.update_layout(template=_TEMPLATE, height=height, autosize=True)
    data = Html(
        to_json(figure, engine="json").replace("<", "\\u003c")
    )  # no text in the data can close the script element
    place = tag("div", id=f"figure-{identity}", style=f"height: {height}px; width: 100%")
    return tag("div", legend, place, tag("script", data, class_="figure", type="application/json"), class_="drawn")


_GLYPHS = {
    "bar": "\N{BLACK SQUARE}",
    "circle-open": "\N{WHITE CIRCLE}",
    "x": "\N{HEAVY MULTIPLICATION X}",
    "diamond": "\N{BLACK DIAMOND}",
}
_BORDERS = {"dash": "dashed", "dot": "dotted"}


def _legend_entry(trace: Any) -> Html:
    """Render the name of a trace beside its mark."""
    if trace.type == "scatter" and trace.mode == "lines":
        border = _BORDERS.get(trace.line.dash, "solid")
        colour = "currentColor" if trace.line.color == INK else trace.line.color  # the page may be dark
        mark = tag("i", class_="line", style=f"border-top: 3px {border} {colour}")
    elif trace.type == "bar":
        mark = tag("i", _GLYPHS["bar"], style=f"color: {trace.marker.color}")
    elif trace.marker.symbol == "diamond":
        mark = tag("i", _GLYPHS["diamond"])
    else:
        mark = tag("i", _GLYPHS.get(trace.marker.symbol, "\N{BLACK CIRCLE}"), style=f"color: {trace.marker.color}")
    return tag("span", mark, trace.name)


def stacked_bars(bars: Sequence[Bar], *, axis: str, unit: str, limits: dict[str, float] | None = None) -> go.Figure:
    """Plot horizontal stacked bars, the first at the top, with diamonds for measured totals.

    `limits` holds the positions of vertical lines by their name in the legend.
    """
    figure = go.Figure()
    labels = [bar.label for bar in bars]
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    for name in names:
        sizes = [bar.parts.get(name, 0.0) for bar in bars]
        if any(sizes):
            figure.add_bar(
                y=labels,
                x=sizes,
                name=name,
                orientation="h",
                marker={"color": part_colour(name), "line": {"width": 0}},
                hovertemplate=f"%{{y}}<br>{name}: %{{x:.3g}} {unit}<extra></extra>",
            )
    measured = [(bar.label, bar.measured) for bar in bars if bar.measured is not None]
    if measured:
        figure.add_scatter(
            y=[label for label, _ in measured],
            x=[size for _, size in measured],
            mode="markers",
            name="measured",
            marker={"symbol": "diamond", "size": 12, "color": INK, "line": {"width": 1.5, "color": "#FFFFFF"}},
            hovertemplate=f"%{{y}}<br>measured: %{{x:.4g}} {unit}<extra></extra>",
        )
    for name, at in (limits or {}).items():
        line = {"color": FAILED, "width": 1.5, "dash": "dash"}
        figure.add_vline(x=at, line=line)
        figure.add_scatter(x=[None], y=[None], mode="lines", name=name, line=line)
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_xaxes(title=axis, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure
