"""Figures of searches on measured groups, and their table: trials needed, regret, and the quality of the stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.support.problems import Group
from benchmarks.support.trial_metrics import Trials, is_stopped_on_best, quantile, regret_at, share_explored, trials_to

COLUMNS = (
    ("median_trials_to_5pct", "to 5%", "{:.1f}"),
    ("p90_trials_to_5pct", "90th p.", "{:.1f}"),
    ("median_trials_to_2pct", "to 2%", "{:.1f}"),
    ("median_trials_to_0pct", "to best", "{:.1f}"),
    ("median_regret_at_1", "regret 1", "{:.1%}"),
    ("mean_regret_at_1", "mean", "{:.1%}"),
    ("mean_regret_at_3", "at 3", "{:.1%}"),
    ("mean_regret_at_5", "at 5", "{:.1%}"),
    ("mean_regret_at_10", "at 10", "{:.1%}"),
    ("median_trials_at_stop", "stop", "{:.1f}"),
    ("share_stopped_on_best", "on best", "{:.0%}"),
    ("median_share_explored", "explored", "{:.1%}"),
    ("median_share_of_feasible_explored", "feasible", "{:.1%}"),
    ("seconds_per_trial", "s/trial", "{:.4f}"),
)
"""Keys of the columns of the tables, their headings and formats."""


def figures_of_group(group: Group, runs: Sequence[Trials]) -> dict[str, float | None]:
    """Summarise one sampler's runs on one group; infinite where too few of them reached the target."""
    times = group.step_time_s
    figures: dict[str, float | None] = {}
    for percent in (5, 2, 0):
        # Runs that never got there count as infinite, which medians and quantiles handle without a special case.
        needed = [trials_to(run.order, times, percent / 100) for run in runs]
        figures[f"median_trials_to_{percent}pct"] = quantile(needed, 0.5)
        figures[f"p90_trials_to_{percent}pct"] = quantile(needed, 0.9)
    for num_trials in (1, 3, 5, 10):
        regrets = [regret_at(run.order, times, num_trials) for run in runs]
        figures[f"mean_regret_at_{num_trials}"] = float(np.mean(regrets))
        figures[f"median_regret_at_{num_trials}"] = float(np.median(regrets))
    # Peers never stop by themselves, so their columns about stops stay empty.
    stops = [run for run in runs if run.num_at_stop is not None]
    figures |= {
        "median_trials_at_stop": _over(np.median, [run.num_at_stop for run in stops]),
        "share_stopped_on_best": _over(np.mean, [is_stopped_on_best(run, times) for run in stops]),
        "median_share_explored": _over(np.median, [share_explored(run, times, of_feasible=False) for run in stops]),
        "median_share_of_feasible_explored": _over(
            np.median, [share_explored(run, times, of_feasible=True) for run in stops]
        ),
        "seconds_per_trial": sum(run.sampler_s for run in runs) / sum(len(run.order) for run in runs),
    }
    return figures


def figures_over_groups(groups: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Summarise groups: medians of medians, means of means, and the 90th percentile over groups."""
    # The first part of a figure's name says how it is summarised: median, p90, or mean otherwise.
    overall: dict[str, float | None] = {}
    for name in groups[0]:
        statistic, _, figure = name.partition("_")
        # a user meets the spread over groups, not the spread over seeds, so the 90th percentile is taken of medians
        of_group = f"median_{figure}" if statistic == "p90" else name
        values = [value for own in groups if (value := own[of_group]) is not None]
        over = {"median": 0.5, "p90": 0.9}.get(statistic)
        if not values:
            overall[name] = None
        else:
            overall[name] = float(np.mean(values)) if over is None else quantile(values, over)
    return overall


def _over(statistic: Callable[[list[Any]], Any], values: list[Any]) -> float | None:
    return float(statistic(values)) if values else None


def finite(figures: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """Replace infinity, which JSON lacks and which marks targets beyond the budget of trials, by None."""
    return {
        sampler: {name: value if value is not None and math.isfinite(value) else None for name, value in own.items()}
        for sampler, own in figures.items()
    }


def print_searches(samplers: Mapping[str, Mapping[str, float | None]]) -> None:
    """Print one line for each sampler."""
    header = ["", *(title for _, title, _ in COLUMNS)]
    lines = [[name, *(_shown(own[key], form) for key, _, form in COLUMNS)] for name, own in samplers.items()]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    for first, *rest in (header, *lines):
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        print("  ".join(["", first.ljust(widths[0]), *cells]))


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
