"""Page of the report: all sections in order, with style and scripts inlined."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path

from hardware.io.output_file import write_output
from tuner.report.data import ReportData, Section, collect
from tuner.report.figures import DRAW_SCRIPT, plotly_script
from tuner.report.markup import Html, concatenate, tag
from tuner.report.sections.accuracy import accuracy_section
from tuner.report.sections.breakdown import time_section
from tuner.report.sections.calibration import calibration_section
from tuner.report.sections.caveats import warnings_section
from tuner.report.sections.failures import conclusions_section
from tuner.report.sections.flags import flags_section
from tuner.report.sections.memory import memory_section
from tuner.report.sections.pipeline import pipeline_section
from tuner.report.sections.plan import plan_section
from tuner.report.sections.population import population_section
from tuner.report.sections.progress import progress_section
from tuner.report.sections.pruning import pruning_section
from tuner.report.sections.shardings import shardings_section
from tuner.report.sections.space_map import map_section
from tuner.report.sections.summary import summary_section
from tuner.report.sections.training import training_section
from tuner.report.sections.trials import trials_section
from tuner.report.style import COPY_SCRIPT, STYLE, WITHOUT_SCRIPTS
from tuner.report.words import plural
from tuner.study_file.request import StudyRequest
from tuner.subject.ability import Ability

SECTIONS: tuple[tuple[Section, Ability | None], ...] = (
    (summary_section, None),
    (flags_section, Ability.FLAGS),
    (shardings_section, Ability.SHARDINGS),
    (warnings_section, None),
    (progress_section, None),
    (training_section, None),
    (trials_section, None),
    (conclusions_section, None),
    (time_section, None),
    (pipeline_section, Ability.LAYERS),
    (plan_section, Ability.LAYERS),
    (memory_section, Ability.LAYERS),
)
"""Sections of the page from top to bottom, each with the ability of the subject that it needs."""

APPENDIX: tuple[tuple[Section, Ability | None], ...] = (
    (population_section, None),
    (map_section, Ability.LAYERS),
    (accuracy_section, Ability.LAYERS),
    (calibration_section, Ability.LAYERS),
    (pruning_section, None),
)
"""Sections on how the search went, which stand at the end."""


def write_report(request: StudyRequest, out: Path) -> Path:
    """Write the report of a study and return its path.

    Raises:
        ConfigError: The storage holds no such study, or `out` cannot be written.
    """
    write_output(out, render_report(collect(request)))
    return out


def render_report(data: ReportData) -> str:
    """Render the whole page; equal data give equal text."""
    sections, appendix = (
        [Html(section(data)) for section, need in group if need is None or data.problem.subject.has(need)]
        for group in (SECTIONS, APPENDIX)
    )
    end = tag("h2", "Appendix: how the search went", class_="part")
    scripts = tag("script", DRAW_SCRIPT), tag("script", COPY_SCRIPT)
    body = tag("body", _header(data), tag("main", *sections, end, *appendix), _footer(data), *scripts)
    return concatenate(Html("<!DOCTYPE html>\n"), tag("html", head_of(data.request.name), body, lang="en"), "\n")


def head_of(title: str) -> Html:
    """Render the head of a page that loads nothing from elsewhere."""
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy()),
        tag("title", f"{title}: Meshtune"),
        tag("style", STYLE),
        tag("noscript", tag("style", WITHOUT_SCRIPTS)),
        tag("script", plotly_script()),
    )


@functools.cache
def _policy() -> str:
    """Build the Content-Security-Policy: the page loads and sends nothing, and runs only our three scripts."""
    scripts = " ".join(f"'sha256-{_digest(script)}'" for script in (plotly_script(), DRAW_SCRIPT, COPY_SCRIPT))
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def _digest(script: str) -> str:
    """Hash a script as browsers do, which normalise every line ending to one character."""
    text = script.replace("\r\n", "\n").replace("\r", "\n")
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _header(data: ReportData) -> Html:
    subject = data.problem.subject
    devices = ", ".join(
        f"{group.num_devices:,} {group.device.name} in {plural(group.hosts, 'host')}"
        for group in subject.cluster.groups
    )
    without = (
        "Most figures are drawn by scripts, which are blocked here; all texts and tables are complete without them."
    )
    return tag(
        "header",
        tag("h1", data.request.name),
        tag("p", subject.title(devices)),
        tag("p", data.basis.in_words),
        tag("noscript", tag("p", without)),
    )


def _footer(data: ReportData) -> Html:
    ends = [record.ended_at for record in data.records if record.ended_at]
    until = f"; last trial ended {max(ends):%Y-%m-%d %H:%M}" if ends else ""
    return tag("footer", f"Written by Meshtune from {data.request.file}{until}.")
