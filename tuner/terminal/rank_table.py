"""Table of a ranking: each configuration with its figures, what bounds it, and notes on the marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardware.rounding import by_source, predicted
from tuner.forecast.objective import labels_of
from tuner.forecast.prepared import Prepared
from tuner.forecast.ranked import Ranked
from tuner.forecast.sizes import LEARNED
from tuner.search.step_draws import BEYOND, BEYOND_IN_WORDS, SLOWER, chance_in_words
from tuner.subject.ability import Ability
from tuner.terminal.console import LAYOUT, layout_columns, say, tell_columns
from tuner.terminal.tables import BEST, CURRENT, WORSE, print_table

UNKNOWN = "-"

COMPARED_IN_WORDS = {
    "current": "the current configuration",
    "baseline": "the baseline, as an engineer would write it by hand",
    "first": "the first",
}

WORTH_TELLING = 0.01
"""Least share of a step that is told as what bounds it after the largest."""


def print_ranking(
    prepared: Prepared,
    ranked: Ranked,
    shown: Mapping[int, dict[str, Any]],
    *,
    compared: str | None,
    current: int | None,
) -> None:
    """Print the table of a ranking, and notes on its marks.

    Args:
        prepared: Study.
        ranked: Ranking.
        shown: Rows by their ranks, from 1.
        compared: Name of the configuration that speed-ups are relative to.
        current: Rank of the current configuration; None without one.
    """
    problem = prepared.problem
    rows = list(shown.values())
    digits = problem.subject.memory_digits
    dimensions = problem.subject.columns(prepared.candidates.space.grid.dimensions)
    places = {"rank": [f"{'>' if rank == current else ''}{rank}" for rank in shown]}
    columns: dict[str, list[str]] = {}
    columns["step [s]"] = [
        by_source(row["step_time_s"], row["source"]) + _measured_mark(row, ranked.num_trials) for row in rows
    ]
    columns["95%"] = [_range_in_words(row["step_time_range_s"]) for row in rows]
    chances = [chance_in_words(row.get(SLOWER)) for row in rows]
    if any(chances):
        columns[BEYOND] = chances
    columns["speed-up"] = [by_source(row["speedup"], row["source"]) for row in rows]
    columns["MFU"] = [f"{row['mfu']:.1%}" for row in rows]
    columns["GiB"] = [f"{row['peak_memory_bytes'] / 2**30:.{digits}f}" + ("" if row["fits"] else "!") for row in rows]
    columns["fits"] = [UNKNOWN if row["fit_probability"] is None else f"{row['fit_probability']:.2f}" for row in rows]
    columns["bound by"] = [_share_in_words(row, 0) for row in rows]
    columns["and then"] = [_share_in_words(row, 1) for row in rows]
    if problem.subject.has(Ability.TOKENS):
        columns["tokens/s/device"] = [by_source(row["tokens_per_s_per_device"], row["source"]) for row in rows]
    if ranked.value is not None:
        labels = labels_of(problem, prepared.request.economics)
        columns |= {
            label: [by_source(row[name], row["source"]) for row in rows]
            for label, name in zip(labels, problem.objective, strict=True)
        }
    spare = ("tokens/s/device", "and then", "MFU", "fits", "95%", BEYOND)
    layouts = [{name: row[name] for name in dimensions} for row in rows]
    columns = places | layout_columns(layouts, places | columns, spare[:2]) | columns
    dropped = print_table(
        list(columns),
        list(zip(*columns.values(), strict=True)),
        left=[at for at, head in enumerate(columns) if head in (LAYOUT, "bound by", "and then")],
        spare=spare,
        styles=[_style_of(row, rank, current) for rank, row in shown.items()],
    )
    tell_columns(layouts, columns, dropped)
    if any(row["source"] not in (LEARNED, "simulated", "predicted") for row in rows):
        say("* the step time of its own trials", err=True)
    if BEYOND in columns and BEYOND not in dropped:
        say(f"{BEYOND}: {BEYOND_IN_WORDS}", err=True)
    if current is not None:
        say("> the current configuration", err=True)
    if compared is not None and compared != "current":
        say(f"speed-up: times as fast as {COMPARED_IN_WORDS[compared]}", err=True)


def _style_of(row: Mapping[str, Any], rank: int, current: int | None) -> str:
    if not row["fits"]:
        return WORSE
    return BEST if rank == 1 else CURRENT if rank == current else ""


def _range_in_words(range_s: list[float] | None) -> str:
    if range_s is None:
        return UNKNOWN
    low_s, high_s = range_s
    return f"{predicted(low_s)}-{predicted(high_s)}"


def _share_in_words(row: Mapping[str, Any], at: int) -> str:
    """Return the bound at a place of a row's shares, from 0, with its share; blank if it is hardly one."""
    bound, share = list(row["shares"].items())[at]
    if share < WORTH_TELLING:
        return ""
    return f"{bound} {share:.0%}" + (f" ({row['exposed']})" if bound == "network" else "")


def _measured_mark(row: Mapping[str, Any], num_trials: int) -> str:
    """Return the mark of a measured step time where others are not; a blank keeps the digits aligned."""
    if not num_trials:
        return ""
    return " " if row["source"] == LEARNED else "*"
