"""Pipeline timeline of the best configuration, as the event simulator runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from costmodels.job.parallel_config import ParallelConfig
from costmodels.simulator.simulated_step import Simulation
from costmodels.simulator.stage_rows import Span, StageRow, idle_gaps, stage_rows
from costmodels.simulator.step_tasks import Role
from costmodels.step.pipeline.passes import Kind
from hardware.io.errors import ConfigError
from hardware.rounding import PREDICTED_DIGITS, rounded
from tuner.forecast.simulation import simulate_candidate
from tuner.report.data import ReportData
from tuner.report.figures import BACKWARD, FORWARD, INK, WEIGHT_GRADIENTS, drawing, part_colour
from tuner.report.markup import Html, empty_section, section, tag
from tuner.report.words import in_short, percent, plural, predicted_seconds, seconds
from tuner.space.enumeration import launchable

TITLE = "Pipeline of the best configuration"
MAX_SIMULATED = 60_000
"""Largest number of passes of one kind of replica that is simulated for the page; this takes some seconds."""
MAX_ROWS = 32
"""Largest number of rows (stages of unlike replicas) that are drawn."""
MAX_PASSES = 140
"""Largest number of passes of one stage; of more, only the beginning and end of the step are drawn."""
MAX_ALL_PASSES = 2_400
"""Largest number of passes of all rows together, which limits the size of the page."""
MAX_NUMBERED = 40
"""Largest number of backward passes of one row that have room for the micro-batch's number; half for others."""

_DIGITS = 6
"""Number of decimals of seconds: microseconds are drawn."""
_THICK, _THIN, _BESIDE = 0.56, 0.1, 0.36


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """Appearance of one kind of spans.

    Attributes:
        name: Name of the kind in the legend.
        colour: Colour of the bars.
        spans: Function that returns the spans of a row until the end of the step.
        hover: Text shown when the pointer is on a bar.
        text: Colour of the micro-batches' numbers; empty for no numbers.
        max_numbered: Largest number of spans in a row for which numbers are drawn.
        at: Vertical distance from the middle of the row.
        thickness: Height of a bar as a share of the distance of rows; thin bars are drawn however short they are.
    """

    name: str
    colour: str
    spans: Callable[[StageRow, float], Iterable[Span]]
    hover: str
    text: str = ""
    max_numbered: int = MAX_NUMBERED // 2
    at: float = 0.0
    thickness: float = _THICK


def _passes(kind: Kind) -> Callable[[StageRow, float], Iterable[Span]]:
    return lambda row, _: [span for span in row.computing if span.role == Role.PASS and span.kind == kind]


def _idle(row: StageRow, until_s: float) -> list[Span]:
    return [Span(Role.BARRIER, -1, -1, -1, *gap) for gap in idle_gaps(row, until_s)]


_OF_MICRO_BATCH = "micro-batch %{customdata[0]}, chunk %{customdata[1]}"
_LOOKS = (
    _Look(name="forward", colour=FORWARD, spans=_passes(Kind.FORWARD), hover=f"forward, {_OF_MICRO_BATCH}", text=INK),
    _Look(
        name="backward",
        colour=BACKWARD,
        spans=_passes(Kind.BACKWARD),
        hover=f"backward, {_OF_MICRO_BATCH}",
        text="#ffffff",
        max_numbered=MAX_NUMBERED,
    ),
    _Look(
        name="weight gradients",
        colour=WEIGHT_GRADIENTS,
        spans=_passes(Kind.WEIGHTS),
        hover=f"weight gradients, {_OF_MICRO_BATCH}",
        text=INK,
    ),
    _Look(name="idle", colour=part_colour("bubble"), spans=_idle, hover="idle"),
    _Look(
        name="optimizer",
        colour=part_colour("optimizer"),
        spans=lambda row, _: [span for span in row.computing if span.role == Role.OPTIMIZER],
        hover="optimizer",
    ),
    _Look(
        name="sent to other stages",
        colour=part_colour("pp"),
        spans=lambda row, _: row.hops,
        hover=f"sent, {_OF_MICRO_BATCH}",
        at=-_BESIDE,
        thickness=_THIN,
    ),
    _Look(
        name="weights and gradients of all replicas",
        colour=part_colour("dp"),
        spans=lambda row, _: row.weights,
        hover="weights or gradients",
        at=_BESIDE,
        thickness=_THIN,
    ),
)


def pipeline_section(data: ReportData) -> Html:
    """Render the timeline of every stage with its idle time."""
    if data.best_config is None:
        return _empty("The pipeline is drawn once a trial has completed.")
    refusal = _refusal(data, data.best_config)
    if refusal:
        return _empty(refusal)
    try:
        simulation = simulate_candidate(data.problem, data.best_config)
    except ConfigError as error:
        return _empty(f"The event simulator cannot run {in_short(data.best_config.values())}: {error.rule}.")
    rows = stage_rows(simulation)
    shown, until_s = rows[:MAX_ROWS], simulation.timeline.makespan_s
    windows = _windows(shown, until_s)
    words = [_step_in_words(data, simulation), _idle_in_words(rows), _shown_in_words(rows, windows, until_s)]
    words += ["Lighter passes belong to later model chunks."] if data.best_config.vpp > 1 else []
    figure = _picture(shown, windows, until_s)
    drawn = drawing(figure, "pipeline", height=90 + max(34 * len(shown), 90))
    return section("pipeline", TITLE, tag("p", " ".join(filter(None, words))), drawn)


def _empty(words: str) -> Html:
    return empty_section("pipeline", TITLE, words)


def _refusal(data: ReportData, best: ParallelConfig) -> str:
    """Explain why the best configuration is not simulated; empty if it can be."""
    setting = data.problem.setting
    if not launchable(setting, best):
        return "Its degrees do not divide the job, so there is no pipeline to simulate."
    passes = 2 * setting.job.global_batch_size // (best.dp * best.mbs) * best.vpp * best.pp
    if passes > MAX_SIMULATED:
        return f"It has {passes:,} passes, too many to draw; `meshtune simulate --trace` writes them to a file."
    return ""


def _step_in_words(data: ReportData, simulation: Simulation) -> str:
    step_s = data.best_step_time_s
    overhead_s = simulation.step_time_s - simulation.timeline.makespan_s
    known = f" (measured: {seconds(step_s)})" if data.best and step_s else ""
    step, overhead = predicted_seconds(simulation.step_time_s), predicted_seconds(max(overhead_s, 0.0))
    step, overhead = predicted_seconds(simulation.step_time_s), predicted_seconds(max(overhead_s, 0.0))
    return (
        f"One step of the best configuration in the event simulator: {step}{known}. "
        f"Of this, {overhead} is overhead that is not drawn."
    )


def _idle_in_words(rows: Sequence[StageRow]) -> str:
    shares = [row.idle_share for row in rows]
    if len(rows) == 1:
        return f"Its only stage is idle for {percent(shares[0])} of the rest."
    busiest = min(rows, key=lambda row: row.idle_share)
    return (
        f"Its stages are idle for {percent(min(shares))} to {percent(max(shares))} of the rest; "
        f"stage {busiest.stage} is the bottleneck."
    )


def _shown_in_words(rows: Sequence[StageRow], windows: Sequence[tuple[float, float]], until_s: float) -> str:
    told = ""
    if len(windows) > 1:
        first, last, between = map(
            predicted_seconds, (windows[0][1], until_s - windows[1][0], windows[1][0] - windows[0][1])
        )
        told = f"Only the first {first} and the last {last} are drawn; {between} between them are omitted."
    if len(rows) > MAX_ROWS:
        told += f" Only the first {MAX_ROWS} of {plural(len(rows), 'row')} are drawn."
    return told.strip()


def _windows(rows: Sequence[StageRow], until_s: float) -> list[tuple[float, float]]:
    """Choose the drawn parts of the step: all of it, or its beginning and its end."""
    most = max(rows, key=lambda row: len(row.computing))
    limit = min(MAX_PASSES, MAX_ALL_PASSES // len(rows))
    if len(most.computing) <= limit:
        return [(0.0, until_s)]
    half = limit // 2
    return [(0.0, most.computing[half].start_s), (most.computing[-half].start_s, until_s)]


def _picture(rows: Sequence[StageRow], windows: Sequence[tuple[float, float]], until_s: float) -> go.Figure:
    figure = go.Figure()
    domains = [(0.0, 1.0)] if len(windows) == 1 else [(0.0, 0.49), (0.51, 1.0)]
    for number, window in enumerate(windows):
        axis = "x" if number == 0 else f"x{number + 1}"
        for look in _LOOKS:
            _draw(figure, look, [list(look.spans(row, until_s)) for row in rows], window, axis)
        figure.update_layout(
            {
                axis.replace("x", "xaxis"): {
                    "title": "time since the step began [s]" if number == 0 else "",
                    "range": list(window),
                    "domain": list(domains[number]),
                    "anchor": "y",
                    "showgrid": False,
                }
            }
        )
    unlike = len({row.replica for row in rows}) > 1
    figure.update_layout(
        barmode="overlay",
        uniformtext={"minsize": 8, "mode": "hide"},
        yaxis={
            "tickvals": list(range(len(rows))),
            "ticktext": [_row_in_words(row, unlike=unlike) for row in rows],
            "range": [len(rows) - 0.4, -0.6],
            "ticks": "outside",
            "tickcolor": "rgba(0, 0, 0, 0)",
            "showgrid": False,
        },
    )
    return figure


def _row_in_words(row: StageRow, *, unlike: bool) -> str:
    """Name a row by its stage, and by its replica if replicas differ."""
    return (f"replica {row.replica}, " if unlike else "") + f"stage {row.stage}"


def _draw(
    figure: go.Figure, look: _Look, spans: Sequence[Sequence[Span]], window: tuple[float, float], axis: str
) -> None:
    """Add the spans of all rows inside the window, except those too short to be visible."""
    is_thin = look.thickness == _THIN
    least_s = 0.0 if is_thin else 2e-4 * (window[1] - window[0])
    found = [
        (number, span)
        for number, row in enumerate(spans)
        for span in row
        if span.end_s > window[0] and span.start_s < window[1] and span.end_s - span.start_s >= least_s
    ]
    if not found:
        return
    num_chunks = 1 + max(span.chunk for _, span in found)
    numbered = bool(look.text) and len(found) <= look.max_numbered * len(spans)
    rest: dict[str, Any] = {}
    if numbered:
        rest = {
            "text": [str(span.micro_batch) for _, span in found],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "insidetextfont": {"size": 10, "color": look.text},
        }
    hover = look.hover if num_chunks > 1 else look.hover.replace(", chunk %{customdata[1]}", "")
    is_named = any(trace.name == look.name for trace in figure.data)
    figure.add_bar(
        orientation="h",
        xaxis=axis,
        name=None if is_named else look.name,
        y=[number + look.at for number, _ in found],
        base=[round(span.start_s, _DIGITS) for _, span in found],
        x=[round(span.end_s - span.start_s, _DIGITS) for _, span in found],
        width=look.thickness,
        customdata=[[span.micro_batch, span.chunk, _milliseconds(span)] for _, span in found],
        marker={
            "color": look.colour,
            "line": {"width": 1.5 if is_thin else 0, "color": look.colour},
            **({"opacity": [1.0 - 0.55 * span.chunk / num_chunks for _, span in found]} if num_chunks > 1 else {}),
        },
        hovertemplate=hover + "<br>from %{base:.4f} s, for %{customdata[2]} ms<extra></extra>",
        **rest,
    )


def _milliseconds(span: Span) -> float:
    return rounded((span.end_s - span.start_s) * 1e3, PREDICTED_DIGITS)
