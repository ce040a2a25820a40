"""Flags of the best configuration for its framework, ready to paste."""

from __future__ import annotations

from tuner.answers.candidates import notes_on_plan
from tuner.export import exporter_for
from tuner.report.data import ReportData
from tuner.report.markup import Html, empty_section, section, tag


def flags_section(data: ReportData) -> Html:
    """Render the export of the best configuration, with notes on what the flags cannot express."""
    export_config, title = exporter_for(data.config.setting.runtime)
    if data.best_config is None:
        return empty_section("flags", title, "Flags appear here once a trial has completed.")
    export = export_config(data.config.setting, data.best_config)
    button = tag("button", "Copy", type="button", class_="copy", data_copies="flags-text")
    text = tag("pre", export.text, id="flags-text")
    told = notes_on_plan(data.config, data.best_config)  # the export's own notes are in its text
    notes = tag("ul", *(tag("li", note) for note in told)) if told else None
    return section("flags", title, tag("div", button, text, class_="copyable"), notes)
