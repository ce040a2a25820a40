"""Warnings that a reader should know before acting on the report."""

from __future__ import annotations

from trials.backend import Status
from tuner.report.data import ReportData
from tuner.report.markup import Html, section, tag
from tuner.report.words import plural
from tuner.search.stopping import StopReason


def warnings_section(data: ReportData) -> Html:
    """Render the warnings of the search space and the doubts about the result."""
    warnings = [*data.candidates.space.warnings, *_find_doubts(data)]
    content = tag("ul", *(tag("li", warning) for warning in warnings)) if warnings else tag("p", "None.")
    return section("warnings", "Warnings", content)


def _find_doubts(data: ReportData) -> list[str]:
    doubts = []
    if data.extrapolated is not None:
        doubts.append(f"The best is {data.extrapolated.in_words}: no full-size trial has completed.")
    if data.origin == "synthetic":
        doubts.append("The step times are synthetic: they say nothing about real devices.")
    if data.request.trials.backend.clock == "virtual":
        doubts.append(
            "The step times are those of a virtual clock: each rank's compute time was measured, and communication is "
            "simulated on the links of the cluster. Compare them with each other, not with a wall clock."
        )
    if data.request.trials.backend.clock == "cpu":
        doubts.append(
            "The step times are CPU seconds of all ranks together: total work, in which no rank waits for another."
        )
    if data.best is not None and data.stop_reason is not None and data.stop_reason is not StopReason.CONFIDENT:
        confidence = "unknown" if data.p_star is None else f"{data.p_star:.2f}"
        if data.stop_reason is not StopReason.EXHAUSTED:
            doubts.append(
                f"The search ended before it was confident (confidence {confidence}): {data.stop_reason.sentence}."
            )
    incidents = sum(record.status is Status.INCIDENT for record in data.records)
    if incidents:
        doubts.append(f"{plural(incidents, 'trial')} failed because of the machine, not the configuration.")
    running = sum(not record.finished for record in data.records)
    if running:
        doubts.append(f"{plural(running, 'trial')} had not ended when this report was written.")
    return doubts
