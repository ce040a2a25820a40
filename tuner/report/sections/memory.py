"""Breakdown of memory: every stage of the best configuration against its limit, and the fullest stage of others."""

from __future__ import annotations

import numpy as np

from costmodels.step.memory.peak import MemoryEstimate, stage_memory
from tuner.report.data import ReportData
from tuner.report.figures import Bar, drawing, stacked_bars
from tuner.report.markup import Content, Html, concatenate, empty_section, section, table, tag
from tuner.report.sections.breakdown import CORRECTED, bars_height, worth_showing
from tuner.report.words import GIB, gibibytes, percent
from tuner.space.enumeration import launchable
from tuner.storage.record import TrialRecord

TITLE = "Where the memory goes"

MAX_STAGES = 24
"""Largest number of stages drawn: the fullest ones."""


def memory_section(data: ReportData) -> Html:
    """Render the memory of the fullest device of each configuration by part, and of the best one's stages."""
    worth = worth_showing(data)
    bars = [
        Bar(label=shown.label, parts=_in_gib(shown.parts_bytes), measured=_measured_gib(shown.record))
        for shown in worth
    ]
    if not bars:
        return empty_section("memory", TITLE, "There is no configuration to show.")
    capacity = min(shown.prediction["memory_capacity_bytes"] for shown in worth)
    headroom = data.problem.options.memory_headroom
    words = (
        f"Predicted peak of the fullest device by part{CORRECTED if data.basis.taught else ''}; it has "
        f"{gibibytes(capacity)}, of which {percent(headroom)} must stay free, fragmentation counted. A diamond is the "
        "measured peak."
    )
    figure = stacked_bars(bars, axis="memory [GiB]", unit="GiB", limits=dict([_limit(capacity, headroom)]))
    return section("memory", TITLE, tag("p", words), drawing(figure, "memory", height=bars_height(bars)), _stages(data))


def _stages(data: ReportData) -> Html | None:
    best, setting = data.best_config, data.problem.setting
    if best is None or not launchable(setting, best):
        return None
    found = stage_memory(setting, best)
    headroom = data.problem.options.memory_headroom
    # Draw the stages closest to their own limit, in the order of the pipeline.
    share = found.needed_bytes / ((1 - headroom) * found.capacity_bytes)
    drawn = np.sort(np.argsort(-share, kind="stable")[:MAX_STAGES]).tolist()
    bars = [
        Bar(
            label=f"stage {stage}",
            parts=_in_gib({part: float(sizes[stage]) for part, sizes in found.parts_bytes.items()}),
            measured=None,
        )
        for stage in drawn
    ]
    # unlike devices have limits of their own
    limits = dict(_limit(capacity, headroom) for capacity in np.unique(found.capacity_bytes).tolist())
    figure = stacked_bars(bars, axis="memory [GiB]", unit="GiB", limits=limits)
    told = "" if len(drawn) == best.pp else f"; only the {len(drawn)} fullest of {best.pp} are shown"
    words = (
        f"Predicted peak of each pipeline stage of the best configuration{told}. Fragmentation may exceed the limit: "
        "the allocator can release it."
    )
    return concatenate(
        tag("h3", "Stage by stage"),
        tag("p", words),
        drawing(figure, "stages", height=100 + 26 * len(bars)),
        tag("details", tag("summary", "In numbers"), _numbers(found, headroom)),
    )


def _numbers(found: MemoryEstimate, headroom: float) -> Html:
    """Render the numbers of the figure as a table, with equal neighbouring stages in one row."""
    rows: list[list[Content]] = []
    begin = 0
    for stage in range(len(found.peak_bytes)):
        is_last = stage + 1 == len(found.peak_bytes)
        if not is_last and _row(found, stage + 1, headroom) == _row(found, begin, headroom):
            continue
        named = str(begin) if begin == stage else f"{begin} to {stage}"
        rows.append([named, *_row(found, begin, headroom)])
        begin = stage + 1
    return table(["stage", "peak", "fragmentation", "limit"], rows, numeric=frozenset({1, 2, 3}))


def _row(found: MemoryEstimate, stage: int, headroom: float) -> list[Content]:
    return [
        gibibytes(found.peak_bytes[stage]),
        gibibytes(found.parts_bytes["fragmentation"][stage]),
        gibibytes((1 - headroom) * found.capacity_bytes[stage]),
    ]


def _limit(capacity_bytes: float, headroom: float) -> tuple[str, float]:
    """Return the name of a limit and its value [GiB]."""
    limit_gib = (1 - headroom) * capacity_bytes / GIB
    return f"limit {limit_gib:.1f} GiB", limit_gib


def _in_gib(parts_bytes: dict[str, float]) -> dict[str, float]:
    return {part: size / GIB for part, size in parts_bytes.items()}


def _measured_gib(record: TrialRecord | None) -> float | None:
    observation = record.observation if record else None
    peak_bytes = observation.peak_memory_bytes if observation else None
    return peak_bytes / GIB if peak_bytes else None
