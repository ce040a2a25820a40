"""Breakdown of the predicted step time of the configurations shown in the report, and the choice of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from costmodels.job.parallel_config import ParallelConfig, Value
from tuner.forecast.candidates import predict_candidate
from tuner.report.data import ReportData
from tuner.report.figures import Bar, drawing, stacked_bars
from tuner.report.markup import Content, Html, empty_section, section, table, tag
from tuner.report.words import MISSING, SEPARATOR, in_short, predicted_seconds, seconds
from tuner.storage.record import TrialRecord, fastest, step_time_of

CORRECTED = ", as the trials correct it, with the shares of the cost model"
"""Clause on predictions that trials have corrected."""

NUM_BEST = 5
"""Number of fastest measured configurations shown; predicted ones fill missing places."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shown:
    """Configuration to show.

    Attributes:
        roles: Roles of the configuration, such as the best.
        values: Value of each of its dimensions.
        prediction: Prediction of the cost model.
        corrected_s: Step time as the trials correct it [s]; that of the cost model before any.
        corrected_bytes: Peak memory as the trials correct it [bytes]; that of the cost model before any.
        record: Its trial; None if it had none.
    """

    roles: tuple[str, ...]
    values: Mapping[str, Value]
    prediction: dict[str, Any]
    corrected_s: float
    corrected_bytes: float
    record: TrialRecord | None

    @property
    def label(self) -> str:
        """Label with the roles and the dimensions, three per line."""
        entries = in_short(self.values).split(SEPARATOR)
        lines = [SEPARATOR.join(entries[at : at + 3]) for at in range(0, len(entries), 3)]
        return "<br>".join([f"<b>{', '.join(self.roles)}</b>", *lines])

    @property
    def parts_s(self) -> dict[str, float]:
        """Parts of the corrected step time [s]: each takes the share that the cost model gives it."""
        factor = self.corrected_s / self.prediction["step_time_s"]
        return {part: factor * part_s for part, part_s in self.prediction["breakdown_s"].items()}

    @property
    def parts_bytes(self) -> dict[str, float]:
        """Parts of the corrected peak of memory [bytes], likewise."""
        factor = self.corrected_bytes / self.prediction["peak_memory_bytes"]
        return {part: factor * size for part, size in self.prediction["memory_bytes"].items()}

    @property
    def step_time_s(self) -> float | None:
        """Measured step time [s]; None without one."""
        return self.record.step_time_s if self.record else None


def time_section(data: ReportData) -> Html:
    """Render the exposed parts of the predicted step time as stacked bars."""
    worth = worth_showing(data)
    bars = [Bar(label=shown.label, parts=shown.parts_s, measured=shown.step_time_s) for shown in worth]
    title = "Where the time goes"
    if not bars:
        return empty_section("time", title, "There is no configuration to show.")
    words = (
        f"Predicted step time by part{CORRECTED if data.basis.taught else ''}; communication counts only if it is not "
        "hidden behind compute. A diamond is the measured step."
    )
    figure = stacked_bars(bars, axis="step time [s]", unit="s")
    return section("time", title, tag("p", words), drawing(figure, "time", height=bars_height(bars)), _numbers(worth))


def _numbers(worth: Sequence[Shown]) -> Html:
    """Render the numbers of the figure as a table."""
    parts = [
        part
        for part in dict.fromkeys(part for shown in worth for part in shown.prediction["breakdown_s"])
        if any(shown.prediction["breakdown_s"].get(part) for shown in worth)
    ]
    head: list[Content] = ["", "configuration", "measured", "corrected", "predicted", *parts]
    rows: list[list[Content]] = [
        [
            ", ".join(shown.roles),
            in_short(shown.values),
            seconds(shown.step_time_s),
            predicted_seconds(shown.corrected_s),
            predicted_seconds(shown.prediction["step_time_s"]),
            *(_part(shown.parts_s.get(part, 0.0)) for part in parts),
        ]
        for shown in worth
    ]
    numbers = table(head, rows, numeric=frozenset(range(2, 5 + len(parts))))
    return tag("details", tag("summary", "In numbers"), numbers)


def _part(value: float) -> str:
    return predicted_seconds(value) if value else MISSING


def bars_height(bars: Sequence[Bar]) -> int:
    """Compute the height of a figure whose bars have labels of up to three lines [px]."""
    return 70 + 64 * len(bars)


def worth_showing(data: ReportData) -> list[Shown]:
    """Select the fastest measured, the current (or baseline) and the best-predicted configurations, each once."""
    found: dict[tuple[Any, ...], tuple[list[str], ParallelConfig]] = {}

    def add(role: str, config: ParallelConfig) -> None:
        key = tuple(config.values(data.dimensions).values())
        found.setdefault(key, ([], config))[0].append(role)

    measured = fastest(data.records, NUM_BEST)
    if not measured and data.best_config is not None:  # inferred from proxy jobs
        add("best", data.best_config)
    for rank, record in enumerate(measured):
        add(_MEASURED[rank], data.problem.config_of(record.params))
    if data.reference is not None:
        add(data.reference.role, data.reference.config)
    for rank, position in enumerate(data.best_predicted(NUM_BEST)):
        if rank == 0 or len(found) < NUM_BEST:
            add(_PREDICTED[rank], data.problem.with_knobs(data.candidates.space.grid.config(position)))
    return [_shown(data, tuple(roles), config) for roles, config in found.values()]


def _shown(data: ReportData, roles: tuple[str, ...], config: ParallelConfig) -> Shown:
    prediction = predict_candidate(data.problem, config)
    corrected = data.basis.taught.corrected(config) if data.basis.taught else None
    step_s, peak_bytes = corrected or (prediction["step_time_s"], prediction["peak_memory_bytes"])
    return Shown(
        roles=roles,
        values=config.values(data.dimensions),
        prediction=prediction,
        corrected_s=step_s,
        corrected_bytes=peak_bytes,
        record=_trial_of(data, config),
    )


_MEASURED = ("best", "2nd", "3rd", "4th", "5th")
_PREDICTED = ("predicted 1st", "predicted 2nd", "predicted 3rd", "predicted 4th", "predicted 5th")


def _trial_of(data: ReportData, config: ParallelConfig) -> TrialRecord | None:
    """Return the configuration's first completed trial with the step time of all, or its last failed one."""
    values = config.values(data.dimensions)
    tried = [record for record in data.records if record.params == values and not record.is_proxy]
    timed = [record for record in tried if record.step_time_s is not None]
    if not timed:
        return next(iter(reversed(tried)), None)
    return replace(timed[0], step_time_s=step_time_of(data.records, values))
