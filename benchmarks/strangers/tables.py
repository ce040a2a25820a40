"""The table of predictions of left-out sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FEWEST_ROWS = 20
"""Fewest timed runs of a source whose share inside an interval is quoted by itself."""

PREDICTED = (
    ("n", "runs", "{:,}"),
    ("median_ape", "median error", "{:.1%}"),
    ("mean_ape", "mean error", "{:.1%}"),
    ("bias", "bias", "{:+.1%}"),
    ("after_one", "after one run", "{:.1%}"),
    ("covered_68", "in 68%", "{:.0%}"),
    ("covered_95", "in 95%", "{:.0%}"),
    ("median_tau", "tau", "{:.2f}"),
    ("median_regret", "regret", "{:.1%}"),
    ("mean_regret", "mean", "{:.1%}"),
    ("memory_n", "peaks", "{:,.0f}"),
    ("memory_median_ape", "memory", "{:.1%}"),
    ("memory_covered_68", "in 68%", "{:.0%}"),
    ("memory_covered_95", "in 95%", "{:.0%}"),
    ("ok_called_feasible", "ok fit", "{:.1%}"),
    ("failed_called_infeasible", "failed not", "{:.1%}"),
)
"""Keys of the columns of the first table, their headings and formats."""


def over_sources(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the predictions over sources of at least FEWEST_ROWS runs, each source counting once."""
    large = [figures for figures in sources if figures["n"] >= FEWEST_ROWS]
    return {
        "num_sources": len(large),
        "n": sum(figures["n"] for figures in sources),
        **{key: mean([figures.get(key) for figures in large]) for key, _, _ in PREDICTED if key != "n"},
    }


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are there; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def print_predicted(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Print names and their figures under the headings of PREDICTED."""
    lines = [[name, *(shown(figures.get(key), form) for key, _, form in PREDICTED)] for name, figures in rows]
    header = ["source", *(title for _, title, _ in PREDICTED)]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    for first, *rest in (header, *lines):
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *cells]))


def shown(value: float | None, form: str) -> str:
    """Format a figure; a dash where there is none."""
    return "-" if value is None else form.format(value)
