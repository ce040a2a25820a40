"""Count the trials that each sampler needs on measured grids, beside general-purpose optimizers on the same candidates.

    python -m benchmarks.sample_efficiency --measured C.csv [D.csv ...] [--history A.csv ...] [--json]

Each group of runs (one model on one cluster) is a search space that is known completely. A trial of a candidate finds
the median of its measured step times, or that it failed. `NAME_failed.csv` beside `NAME.csv` is read too; a failed
configuration is a candidate and costs a trial. All timed runs count, including those tagged OUTLIER or LOW-MFU, but not
those tagged SUSPECT.

Without --history the sampler knows only a shipped profile of another runtime that was never fitted to the source:
megatron-core, or nanotron if megatron-core is the source's own runtime or was fitted to it. With --history the source's
own runtime predicts with the constants that it had before any run, and learns from the runs of the history except those
of the group itself. --runtime names the profile in either case.

Samplers: thompson is Meshtune's. thompson+ucb, for example, is Meshtune's with another acquisition function; these run
only if named. tpe, gp and cmaes are Optuna's, and botorch is BoTorch's GP with log expected improvement (see
benchmarks/support/peers.py). random is uniform. prior follows the predicted step time, with candidates that are
predicted not to fit last.

A run ends when the fastest candidate has been tried and the sampler would stop, or when its budget of trials is spent.
Figures are medians over seeds within a group, then over groups. Progress goes to stderr; exit status 2 reports a
mistake in the arguments.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.peers import PEERS, missing
from benchmarks.support.problems import Group, Problem, problem_of, read_groups, read_runs
from benchmarks.support.searchers import AbstractSearcher, prior, run_trials, thompson, uniform
from benchmarks.support.timing import answer, count_at_least, searching, tell
from benchmarks.support.trial_metrics import Trials, is_stopped_on_best, quantile, regret_at, share_explored, trials_to
from benchmarks.support.workers import mapper
from costmodels.calibration.fidelity import GROUP
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.job.runtime import find_runtime
from hardware.io.errors import ConfigError, did_you_mean
from tuner.search.acquisition import ACQUISITION_FUNCTIONS

SEARCHERS: dict[str, Callable[[Problem, int], AbstractSearcher]] = {
    "thompson": thompson,
    **PEERS,
    "random": uniform,
    "prior": prior,
    **{f"thompson+{name}": partial(thompson, acquisition=name) for name in ACQUISITION_FUNCTIONS if name != "draws"},
}
USUAL = tuple(name for name in SEARCHERS if "+" not in name)
"""Samplers that run unless others are named."""
WITHOUT_CHANCE = ("prior",)
"""Samplers that do not depend on the seed, so that one run suffices."""

MAX_TRIALS = 100


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Task:
    """One run of a sampler on a group with a seed."""

    sampler: str
    group: Group
    problem: Problem
    seed: int
    max_trials: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures and return the exit status."""
    return answer("sample_efficiency", _arguments(argv), _measure, _print)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = searching("sample_efficiency", __doc__)
    parser.add_argument(
        "--history",
        nargs="+",
        type=Path,
        default=[],
        metavar="CSV",
        help="measured runs that are known before the search",
    )
    parser.add_argument("--samplers", default=",".join(USUAL), help=f"comma-separated samplers ({','.join(USUAL)})")
    parser.add_argument("--seeds", type=count_at_least(1), default=20, help="runs of each sampler on each group (20)")
    parser.add_argument(
        "--min-candidates",
        type=count_at_least(2),
        default=20,
        help="leave out groups with fewer candidates, timed or failed (20)",
    )
    parser.add_argument("--runtime", help="runtime profile that predicts the runs of every source")
    parser.add_argument(
        "--trials",
        type=count_at_least(1),
        default=MAX_TRIALS,
        help=f"maximum number of trials of each run ({MAX_TRIALS})",
    )
    return parser.parse_args(argv)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute all figures.

    Raises:
        ConfigError: The arguments cannot be used.
    """
    if given.runtime is not None:
        find_runtime(given.runtime)
    samplers, unavailable = _samplers(given.samplers)
    history, _ = read_runs(given.history) if given.history else ((), None)
    groups, skipped = read_groups(given.measured, given.min_candidates)
    with mapper(given.workers) as each:
        tell(f"{len(groups)} groups; predicting their candidates")
        problems = list(each(partial(_problem, history=history, runtime=given.runtime), groups))
        dropped = sum(problem.num_dropped for problem in problems)
        if dropped:
            tell(f"note: {dropped:,} runs of the history are of groups to search; each group is left without its own")
        tasks = [
            _Task(sampler=sampler, group=group, problem=problem, seed=seed, max_trials=given.trials)
            for group, problem in zip(groups, problems, strict=True)
            for sampler in samplers
            for seed in range(1 if sampler in WITHOUT_CHANCE else given.seeds)
        ]
        found: dict[tuple[int, str], list[Trials]] = {}
        for number, (task, trials) in enumerate(zip(tasks, each(_run, tasks), strict=True), start=1):
            found.setdefault((id(task.group), task.sampler), []).append(trials)
            if number == len(tasks) or tasks[number].group is not task.group:
                tell(f"{number:,} of {len(tasks):,} runs: {' '.join(map(str, task.group.key[:4]))}")
    figures = [{sampler: _figures(group, found[id(group), sampler]) for sampler in samplers} for group in groups]
    return {
        "groups": [_group_json(*entry) for entry in zip(groups, problems, figures, strict=True)],
        "overall": _finite({sampler: _overall([own[sampler] for own in figures]) for sampler in samplers}),
        "skipped": dict(skipped),
        "settings": {
            "measured": [str(path) for path in given.measured],
            "history": [str(path) for path in given.history],
            "samplers": samplers,
            "unavailable": unavailable,
            "seeds": given.seeds,
            "min_candidates": given.min_candidates,
            "runtime": given.runtime,
            "trials": given.trials,
        },
    }


def _samplers(text: str) -> tuple[list[str], dict[str, str]]:
    """Return the samplers that can run here, and the reasons why the others cannot."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in SEARCHERS:
            raise ConfigError("is no sampler", key="--samplers", value=name, nearest=did_you_mean(name, SEARCHERS))
    unavailable = {name: reason for name in names if (reason := missing(name)) is not None}
    for name, reason in unavailable.items():
        tell(f"note: {name} is left out; it {reason}")
    available = [name for name in names if name not in unavailable]
    if not available:
        raise ConfigError("leaves no sampler to run", key="--samplers", nearest=f"valid: {', '.join(SEARCHERS)}")
    return available, unavailable


def _problem(group: Group, history: Sequence[MeasuredRun], runtime: str | None) -> Problem:
    return problem_of(group, history, runtime)


def _run(task: _Task) -> Trials:
    searcher = SEARCHERS[task.sampler](task.problem, task.seed)
    return run_trials(searcher, task.group.outcomes, task.group.step_time_s, task.max_trials)


def _figures(group: Group, runs: Sequence[Trials]) -> dict[str, float | None]:
    """Summarise one sampler on one group over its seeds; infinite where too few seeds reached the target."""
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


def _overall(groups: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
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


def _group_json(group: Group, problem: Problem, figures: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
    times = group.step_time_s
    return {
        **dict(zip(GROUP, group.key, strict=True)),
        "num_candidates": len(times),
        "num_failed": int(np.isinf(times).sum()),
        "best_step_time_s": float(times.min()),
        "runtime": problem.runtime,
        "num_history": problem.num_history,
        "num_dropped_from_history": problem.num_dropped,
        "samplers": _finite(figures),
    }


def _finite(figures: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """Replace infinity, which JSON lacks and which marks targets beyond the budget of trials, by None."""
    return {
        sampler: {name: value if value is not None and math.isfinite(value) else None for name, value in own.items()}
        for sampler, own in figures.items()
    }


COLUMNS = (
    ("median_trials_to_5pct", "to 5%", "{:.1f}"),
    ("p90_trials_to_5pct", "90th p.", "{:.1f}"),
    ("median_trials_to_2pct", "to 2%", "{:.1f}"),
    ("median_trials_to_0pct", "to best", "{:.1f}"),
    ("mean_regret_at_1", "regret 1", "{:.1%}"),
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


def _print(result: Mapping[str, Any]) -> None:
    for group in result["groups"]:
        name = " ".join(str(group[key]) for key in GROUP)
        dropped = group["num_dropped_from_history"]
        print(
            f"{name}: {group['num_candidates']} candidates, {group['num_failed']} failed; "
            f"predicted by {group['runtime']}"
            + (f" fitted to {group['num_history']:,} runs" if group["num_history"] else "")
            + (f", without {dropped} of this group" if dropped else "")
        )
        _print_table(group["samplers"])
    print(f"All {len(result['groups'])} groups:")
    _print_table(result["overall"])
    print(
        "Trials to within 5%, 2% and 0% of the best: medians (- where the budget was spent before). Regret: mean "
        "slowdown of the best after 1, 3, 5 and 10 trials."
    )
    for reason, count in result["skipped"].items():
        print(f"skipped {count:,}: {reason}")


def _print_table(samplers: Mapping[str, Mapping[str, float | None]]) -> None:
    header = ["", *(title for _, title, _ in COLUMNS)]
    lines = [[name, *(_shown(own[key], form) for key, _, form in COLUMNS)] for name, own in samplers.items()]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    for first, *rest in (header, *lines):
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        print("  ".join(["", first.ljust(widths[0]), *cells]))


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


if __name__ == "__main__":
    sys.exit(main())
