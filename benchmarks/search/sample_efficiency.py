"""Count the trials that each sampler needs on measured grids, beside general-purpose optimizers on the same candidates.

    python -m benchmarks.search.sample_efficiency [--measured C.csv ...] [--history A.csv ...] [--json]

Each group of runs (one model on one cluster) is a search space that is known completely. Without --measured the groups
are those of configs/measured/runs. A trial of a candidate finds the median of its measured step times, or that it
failed. `NAME_failed.csv` beside `NAME.csv` is read too; a failed configuration is a candidate and costs a trial. All
timed runs count, including those tagged OUTLIER or LOW-MFU, but not those tagged SUSPECT.

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
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.support.peers import PEERS, missing
from benchmarks.support.problems import Group, Problem, problem_of, read_groups, read_runs
from benchmarks.support.search_figures import figures_of_group, figures_over_groups, finite, print_searches
from benchmarks.support.searchers import AbstractSearcher, prior, run_trials, thompson, uniform
from benchmarks.support.timing import add_history, answer, count_at_least, searching, tell
from benchmarks.support.trial_metrics import Trials
from benchmarks.support.workers import mapper
from costmodels.calibration.fidelity import GROUP
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.job.runtime import find_runtime
from hardware.io.errors import ConfigError, did_you_mean
from tuner.search.acquisition import ACQUISITION_FUNCTIONS, DEFAULT

SEARCHERS: dict[str, Callable[[Problem, int], AbstractSearcher]] = {
    "thompson": thompson,
    **PEERS,
    "random": uniform,
    "prior": prior,
    **{f"thompson+{each}": partial(thompson, acquisition=each) for each in ACQUISITION_FUNCTIONS if each != DEFAULT},
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
    parser = searching("search.sample_efficiency", __doc__, least=20)
    add_history(parser)
    parser.add_argument("--samplers", default=",".join(USUAL), help=f"comma-separated samplers ({','.join(USUAL)})")
    parser.add_argument("--seeds", type=count_at_least(1), default=20, help="runs of each sampler on each group (20)")
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
    figures = [
        {sampler: figures_of_group(group, found[id(group), sampler]) for sampler in samplers} for group in groups
    ]
    return {
        "groups": [_group_json(*entry) for entry in zip(groups, problems, figures, strict=True)],
        "overall": finite({sampler: figures_over_groups([own[sampler] for own in figures]) for sampler in samplers}),
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
        "samplers": finite(figures),
    }


def _print(result: Mapping[str, Any]) -> None:
    for group in result["groups"]:
        name = " ".join(str(group[key]) for key in GROUP if group[key] != "")
        dropped = group["num_dropped_from_history"]
        print(
            f"{name}: {group['num_candidates']} candidates, {group['num_failed']} failed; "
            f"predicted by {group['runtime']}"
            + (f" fitted to {group['num_history']:,} runs" if group["num_history"] else "")
            + (f", without {dropped} of this group" if dropped else "")
        )
        print_searches(group["samplers"])
    print(f"All {len(result['groups'])} groups:")
    print_searches(result["overall"])
    print(
        "Trials to within 5%, 2% and 0% of the best: medians (- where the budget was spent before). Regret: slowdown "
        "of the best after 1 trial, in the median and in the mean, and mean slowdown after 3, 5 and 10."
    )
    for reason, count in result["skipped"].items():
        print(f"skipped {count:,}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
