"""Flags of the best configuration for its framework, ready to paste."""

from __future__ import annotations

from tuner.export import exporter_for
from tuner.export.knob_export import with_knobs
from tuner.forecast.candidates import notes_on_plan
from tuner.forecast.idle_hosts import notes_on_idle_hosts
from tuner.report.data import ReportData
from tuner.report.markup import Html, concatenate, empty_section, section, tag
from tuner.report.words import in_short, plural


def flags_section(data: ReportData) -> Html:
    """Render the export of the best configuration, with notes on what the flags cannot express."""
    export_config, title = exporter_for(data.problem.setting.runtime)
    if data.best_config is None:
        return empty_section("flags", title, "Flags appear here once a trial has completed.")
    export = with_knobs(export_config(data.problem.setting, data.best_config), data.problem.knobs, data.best_config)
    button = tag("button", "Copy", type="button", class_="copy", data_copies="flags-text")
    text = tag("pre", export.text, id="flags-text")
    changes = _changes(data, export.text)
    # the export's own notes are in its text
    told = (*notes_on_idle_hosts(data.problem, data.best_config), *notes_on_plan(data.problem, data.best_config))
    notes = tag("ul", *(tag("li", note) for note in told)) if told else None
    return section("flags", title, changes, tag("div", button, text, class_="copyable"), notes)


def _changes(data: ReportData, text: str) -> Html | None:
    """Say which lines of the best configuration's flags differ from those of the current one."""
    if data.reference is None or data.reference.role != "current":
        return None
    export_config, _ = exporter_for(data.problem.setting.runtime)
    export = with_knobs(
        export_config(data.problem.setting, data.reference.config), data.problem.knobs, data.reference.config
    )
    today, best = _lines(export.text), _lines(text)
    named = {line.split()[0] for line in best}
    changed = [tag("li", tag("code", line)) for line in best if line not in today]
    changed += [tag("li", "remove ", tag("code", line)) for line in today if line.split()[0] not in named]
    run = f"You run {in_short(data.reference.values)}"
    if data.compared is not None and data.compared.reason:
        run = f"Your current configuration {in_short(data.reference.values)} {data.compared.reason}"
    if not changed:
        return tag("p", f"{run}, which is the best.")
    return concatenate(
        tag("p", f"{run}. Change {plural(len(changed), 'line')}:"), tag("ul", *changed, class_="changes")
    )


def _lines(text: str) -> list[str]:
    """Return the lines of an export that are no comments, without their indents."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
