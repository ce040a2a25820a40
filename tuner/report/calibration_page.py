"""Page of a device's calibration: speed of every measured call over its size (FlexParallel, figure 1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go

from costmodels.blocks.operator import OpKind, Phase
from costmodels.operators.isolated import IsolatedCall, isolated_call_s, isolated_operator
from hardware.io.output_file import write_output
from tuner.calibrate.device_results import DeviceCalibration
from tuner.report.figures import CANDIDATES, CONFIDENCE, DRAW_SCRIPT, INK, MEASURED, drawing
from tuner.report.markup import Html, concatenate, section, tag
from tuner.report.page import head_of
from tuner.search.earlier_runs import IsolatedSample

HEIGHT = 380
"""Height of each figure [px]."""
_COLOURS = dict(zip(OpKind, (*CANDIDATES, CONFIDENCE, MEASURED), strict=True))
_SYMBOLS = {Phase.FORWARD: "circle", Phase.BACKWARD: "circle-open"}


def write_calibration_page(done: DeviceCalibration, out: Path) -> Path:
    """Write the page and return its path.

    Raises:
        ConfigError: `out` cannot be written.
    """
    write_output(out, render_calibration_page(done))
    return out


def render_calibration_page(done: DeviceCalibration) -> str:
    """Render the whole page; equal samples give equal text."""
    title = f"{done.device.name} in {done.precision}"
    products = [sample for sample in done.samples if _flop(sample.call)]
    others = [sample for sample in done.samples if not _flop(sample.call)]
    peak = done.device.peak_flop_per_s(done.precision)
    arithmetic = _scatter(products, _flop, lambda sample: _flop(sample.call) / sample.time_s, "FLOP", "FLOP/s")
    if products:
        arithmetic.add_hline(y=peak, line={"color": INK, "width": 1, "dash": "dot"})
    movement = _scatter(
        others, _moved_bytes, lambda sample: _moved_bytes(sample.call) / sample.time_s, "bytes", "bytes/s"
    )
    formula = _scatter(
        list(done.samples),
        lambda call: isolated_call_s(call, done.cluster) or 0.0,
        lambda sample: sample.time_s / (isolated_call_s(sample.call, done.cluster) or sample.time_s),
        "predicted time [s]",
        "measured over predicted",
    )
    formula.update_yaxes(dtick="D2")
    formula.add_hline(y=1, line={"color": INK, "width": 1, "dash": "dot"})
    words = f"{len(done.samples):,} operators and collectives, each timed in isolation on arbitrary data"
    main = tag(
        "main",
        section("arithmetic", "Arithmetic", drawing(arithmetic, "arithmetic", height=HEIGHT)),
        section("movement", "Memory and links", drawing(movement, "movement", height=HEIGHT)),
        section("formula", "Measured over predicted", drawing(formula, "formula", height=HEIGHT)),
    )
    body = tag("body", tag("header", tag("h1", title), tag("p", words)), main, tag("script", DRAW_SCRIPT))
    return concatenate(Html("<!DOCTYPE html>\n"), tag("html", head_of(title), body, lang="en"), "\n")


def _scatter(
    samples: list[IsolatedSample],
    size: Callable[[IsolatedCall], float],
    height: Callable[[IsolatedSample], float],
    size_title: str,
    height_title: str,
) -> go.Figure:
    """Plot one mark per call on logarithmic axes: a colour per kind, filled for forward and open for backward."""
    figure = go.Figure()
    for kind, phase in sorted({(sample.call.kind, sample.call.phase) for sample in samples}):
        own = [sample for sample in samples if (sample.call.kind, sample.call.phase) == (kind, phase)]
        figure.add_scatter(
            x=[size(sample.call) for sample in own],
            y=[height(sample) for sample in own],
            mode="markers",
            name=f"{kind} {'' if own[0].call.is_collective else phase}".strip(),
            marker={"color": _COLOURS[kind], "symbol": _SYMBOLS[phase], "size": 8},
            text=[_in_words(sample) for sample in own],
            hovertemplate="%{text}<br>%{y:.3s}<extra></extra>",
        )
    figure.update_xaxes(title=size_title, type="log", exponentformat="power", dtick=1)
    figure.update_yaxes(title=height_title, type="log", exponentformat="power")
    return figure


def _in_words(sample: IsolatedSample) -> str:
    call = sample.call
    sizes = " x ".join(f"{size:,.6g}" for size in call.shape)
    return f"{call.kind} {call.role} {sizes}: {sample.time_s * 1e6:,.4g} us"


def _flop(call: IsolatedCall) -> float:
    return 0.0 if call.is_collective else float(isolated_operator(call).flop[0])


def _moved_bytes(call: IsolatedCall) -> float:
    return call.shape[0] if call.is_collective else float(isolated_operator(call).moved_bytes[0])
