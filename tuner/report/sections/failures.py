"""What the failures of the study taught."""

from __future__ import annotations

from tuner.report.data import ReportData
from tuner.report.markup import Content, Html, section, table, tag

TITLE = "What the failures taught"

_KINDS = {"memory": "out of memory", "crash": "crashed", "timeout": "time limit"}


def lessons_section(data: ReportData) -> Html:
    """A table of the conclusions that the search drew from trials that gave no step time."""
    if not data.lessons:
        return section("lessons", TITLE, tag("p", "No failure has changed what is tried.", class_="empty"))
    rows: list[list[Content]] = [[_KINDS[lesson.kind], lesson.text] for lesson in data.lessons]
    return section("lessons", TITLE, table(["failure", "what follows"], rows))
