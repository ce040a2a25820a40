"""Conclusions that the search drew from failed trials."""

from __future__ import annotations

from tuner.report.data import ReportData
from tuner.report.markup import Content, Html, empty_section, section, table

TITLE = "Conclusions from failures"

_KINDS = {"memory": "out of memory", "crash": "crashed", "timeout": "time limit"}


def conclusions_section(data: ReportData) -> Html:
    """Render a table of the conclusions drawn from trials without a step time."""
    if not data.conclusions:
        return empty_section("conclusions", TITLE, "No failure has changed the choice of configurations.")
    rows: list[list[Content]] = [[_KINDS[conclusion.kind], conclusion.text] for conclusion in data.conclusions]
    return section("conclusions", TITLE, table(["failure", "conclusion"], rows))
