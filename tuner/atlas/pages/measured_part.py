"""Measured runs of a model beside the predictions: points over the number of devices, and a table with sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from costmodels.calibration.measured_runs import MeasuredRun
from hardware.cluster_file import find_cluster
from tuner.atlas.answers import Answer
from tuner.atlas.measured_points import by_device
from tuner.report.markup import Content, Html, section, table, tag
from tuner.report.words import in_short, seconds

Scale = Callable[[float], float]
"""Position of a value on an axis [px]."""

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 340, 220, 56, 34, 26
"""Size and margins of a drawing [px]."""
FEWEST_POINTS = 3
"""Points of a device that are drawn without a prediction beside them; fewer stand in the table alone."""
POINTS_IN_TABLE = 60
"""Rows of the table: the fastest run of each job, device and source, at most so many."""


def measured_part(measured: Sequence[MeasuredRun], answers: Sequence[Answer]) -> Html:
    """Render the measured runs of a model: a drawing for each device, and the fastest run of each job and source."""
    fastest = _fastest(measured)
    drawings = [
        _drawing(device, runs, answers)
        for device, runs in by_device(fastest).items()
        if len(runs) >= FEWEST_POINTS or _predicted(device, answers)
    ]
    legend = (
        "Points are published runs of this model: of each source, number of devices, batch, sequence length and "
        "precision the fastest. The line is what the atlas recommends for its own job, with its 95% interval."
    )
    rows: list[list[Content]] = [
        [
            run.device,
            f"{run.devices:,}",
            f"{run.global_batch_size:,} x {run.sequence_length:,}",
            run.precision,
            in_short(run.config.values()),
            seconds(run.step_time_s),
            f"{_throughput(run):,.0f}",
            run.source,
        ]
        for run in fastest[:POINTS_IN_TABLE]
    ]
    heads: list[Content] = [
        "device",
        "devices",
        "batch",
        "precision",
        "layout",
        "step",
        "tokens/s per device",
        "source",
    ]
    shown = f"The fastest run of each job, device and source: {len(rows)} of {len(measured):,} runs"
    return section(
        "measured",
        "Measured runs",
        tag("p", legend),
        tag("div", *drawings, class_="facets"),
        tag("details", tag("summary", shown), table(heads, rows, numeric=frozenset({1, 5, 6}))),
    )


def _throughput(run: MeasuredRun) -> float:
    """Return the measured throughput of one device [tokens/s]."""
    assert run.step_time_s is not None, "only completed runs are shown"
    return run.global_batch_size * run.sequence_length / run.step_time_s / run.devices


def _fastest(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    best: dict[tuple[object, ...], MeasuredRun] = {}
    for run in runs:
        key = run.source, run.device, run.devices, run.global_batch_size, run.sequence_length, run.precision
        if key not in best or _throughput(run) > _throughput(best[key]):
            best[key] = run
    return list(best.values())


def _predicted(device: str, answers: Sequence[Answer]) -> Mapping[int, tuple[float, float, float]]:
    """Return predicted throughput with both ends of its interval by the number of devices, of the first cluster."""
    found: dict[int, tuple[float, float, float]] = {}
    for each in answers:
        if each.layouts and find_cluster(each.place.cluster).devices[0].name == device:
            layout = each.layouts[0]
            tokens = layout.tokens_per_s_per_device
            low_s, high_s = layout.step_time_range_s
            ends = tokens * layout.step_time_s / high_s, tokens * layout.step_time_s / low_s
            found.setdefault(each.place.devices, (tokens, *ends))
    return found


def _drawing(device: str, runs: Sequence[MeasuredRun], answers: Sequence[Answer]) -> Html:
    predicted = _predicted(device, answers)
    points = [(run.devices, _throughput(run), run) for run in runs]
    sizes = [*predicted, *(devices for devices, _, _ in points)]
    tokens = [*(value for each in predicted.values() for value in each), *(value for _, value, _ in points)]
    x, y = _scale(sizes, LEFT, WIDTH - 12), _scale(tokens, HEIGHT - BOTTOM, TOP)
    marks: list[Content] = []
    for decade in _ticks(tokens):
        at = y(decade)
        marks.append(_line(LEFT, at, WIDTH - 12, at, "grid"))
        marks.append(tag("text", f"{decade:,.0f}", x=f"{LEFT - 6}", y=f"{at + 4:.1f}", text_anchor="end"))
    marks.extend(
        tag("text", f"{size:,}", x=f"{x(size):.1f}", y=f"{HEIGHT - BOTTOM + 16}", text_anchor="middle")
        for size in sorted({min(sizes), *predicted, max(sizes)})
    )
    ordered = sorted(predicted.items())
    if ordered:
        band = [*((size, high) for size, (_, _, high) in ordered), *((n, low) for n, (_, low, _) in reversed(ordered))]
        marks.append(tag("polygon", points=_path(band, x, y), class_="band"))
        line = [(size, value) for size, (value, _, _) in ordered]
        marks.append(tag("polyline", points=_path(line, x, y), class_="predicted"))
    for devices, value, run in points:
        told = f"{run.source}: {in_short(run.config.values())}, {value:,.0f} tokens/s per device"
        marks.append(
            tag("circle", tag("title", told), cx=f"{x(devices):.1f}", cy=f"{y(value):.1f}", r="3.5", class_="measured")
        )
    marks.append(tag("text", device, x=f"{LEFT}", y="14", class_="strong"))
    marks.append(tag("text", "devices", x=f"{WIDTH - 12}", y=f"{HEIGHT - 4}", text_anchor="end"))
    title = f"Tokens per second and device of {len(runs)} measured runs on {device}"
    return tag("svg", *marks, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="chart", role="img", aria_label=title)


def _scale(values: Sequence[float], first: float, last: float) -> Scale:
    """Return a logarithmic axis of all values from a first to a last position [px]."""
    low, high = math.log(min(values) / 1.15), math.log(max(values) * 1.15)
    return lambda value: first + (math.log(value) - low) / (high - low) * (last - first)


def _ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers between the smallest and the largest value, more of them where these are near each other."""
    decades = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    steps = (1, 2, 5) if max(values) > 8 * min(values) else (1, 1.5, 2, 3, 4, 5, 6, 8)
    found = [step * 10.0**decade for decade in decades for step in steps]
    return [value for value in found if min(values) <= value <= max(values)]


def _path(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    return " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)


def _line(x1: float, y1: float, x2: float, y2: float, name: str) -> Html:
    return tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=name)
