"""Where time and memory go, as predicted for the configurations that matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from costmodels.parallel import ParallelConfig, Value
from tuner.candidates import predicted
from tuner.record import TrialRecord
from tuner.report.data import ReportData
from tuner.report.figures import Bar, drawing, stacked_bars
from tuner.report.markup import Html, section, tag
from tuner.report.words import GIB, SEPARATOR, gibibytes, in_short, percent

NUM_BEST_PREDICTED = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Shown:
    """A configuration worth showing, what was predicted of it, and its trial if it had one."""

    label: str
    prediction: dict[str, Any]
    record: TrialRecord | None


def time_section(data: ReportData) -> Html:
    """The exposed parts of the step, stacked to the predicted step time."""
    bars = [
        Bar(
            label=shown.label,
            parts=shown.prediction["breakdown_s"],
            measured=shown.record.step_time_s if shown.record else None,
        )
        for shown in _worth_showing(data)
    ]
    title = "Where the time goes"
    if not bars:
        return section("time", title, tag("p", "There is no configuration to show.", class_="empty"))
    words = (
        "Predicted step time by part; communication counts only where compute does not hide it. A diamond is the "
        "measured step."
    )
    figure = stacked_bars(bars, axis="step time [s]", unit="s")
    return section("time", title, tag("p", words), drawing(figure, "time", height=_height(bars)))


def memory_section(data: ReportData) -> Html:
    """The parts of the fullest device's memory, stacked to the predicted peak."""
    worth_showing = _worth_showing(data)
    bars = [
        Bar(
            label=shown.label,
            parts={part: size / GIB for part, size in shown.prediction["memory_bytes"].items()},
            measured=_measured_gib(shown.record),
        )
        for shown in worth_showing
    ]
    title = "Where the memory goes"
    if not bars:
        return section("memory", title, tag("p", "There is no configuration to show.", class_="empty"))
    capacity = min(shown.prediction["memory_capacity_bytes"] for shown in worth_showing)
    headroom = data.config.options.memory_headroom
    words = (
        f"Predicted peak of the fullest device by part; it has {gibibytes(capacity)}, of which {percent(headroom)} "
        "must stay free. A diamond is the measured peak."
    )
    limit = (1 - headroom) * capacity / GIB
    figure = stacked_bars(bars, axis="memory [GiB]", unit="GiB", limits={f"limit {limit:.1f} GiB": limit})
    return section("memory", title, tag("p", words), drawing(figure, "memory", height=_height(bars)))


def _height(bars: list[Bar]) -> int:
    return 70 + 64 * len(bars)


def _measured_gib(record: TrialRecord | None) -> float | None:
    observation = record.observation if record else None
    peak_bytes = observation.peak_memory_bytes if observation else None
    return peak_bytes / GIB if peak_bytes else None


def _worth_showing(data: ReportData) -> list[_Shown]:
    """The best, the expert's (or the baseline) and the best-predicted configurations, each once."""
    found: dict[tuple[Any, ...], tuple[list[str], ParallelConfig]] = {}

    def add(role: str, config: ParallelConfig) -> None:
        key = tuple(config.values(data.dimensions).values())
        found.setdefault(key, ([], config))[0].append(role)

    if data.best_config is not None:
        add("best", data.best_config)
    if data.reference is not None:
        add(data.reference.role, data.reference.config)
    for rank, position in enumerate(data.best_predicted(NUM_BEST_PREDICTED), start=1):
        add(f"predicted {_ORDINALS[rank]}", data.candidates.space.grid.config(position))
    return [
        _Shown(
            label=_label(roles, config.values(data.dimensions)),
            prediction=predicted(data.config, config),
            record=_trial_of(data, config),
        )
        for roles, config in found.values()
    ]


def _label(roles: list[str], values: Mapping[str, Value]) -> str:
    """The roles of a configuration and its dimensions, three on a line."""
    entries = in_short(values).split(SEPARATOR)
    lines = [SEPARATOR.join(entries[at : at + 3]) for at in range(0, len(entries), 3)]
    return "<br>".join([f"<b>{', '.join(roles)}</b>", *lines])


_ORDINALS = {1: "1st", 2: "2nd", 3: "3rd"}


def _trial_of(data: ReportData, config: ParallelConfig) -> TrialRecord | None:
    """The fastest completed trial of the configuration, or its last one that failed; no proxy's."""
    values = config.values(data.dimensions)
    tried = [record for record in data.records if record.params == values and not record.is_proxy]
    timed = [record for record in tried if record.step_time_s is not None]
    return min(timed, key=lambda record: record.step_time_s or 0.0) if timed else next(iter(reversed(tried)), None)
