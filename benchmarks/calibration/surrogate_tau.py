"""Measure how well the surrogate ranks all candidates of measured grids after a few trials, beside a published tuner.

    python -m benchmarks.calibration.surrogate_tau [--measured C.csv ...] [--runtime NAME] [--trials 0 3 6 10]
    [--json]

Each group of runs is a search space that is known completely, as in benchmarks/search/sample_efficiency.py. Meshtune's
sampler tries candidates one by one. After some trials its surrogate's expected step times of all candidates that ran
are compared with the measured ones: Kendall's tau-b over all, tau-b over the untried ones, and the median error of the
latter. 0 trials give the prior's figures. Figures are medians over seeds.

FlexParallel (appendix A.2) reports tau 0.84 for its cost model on all 30 feasible configurations of one job on 8
devices. Without the 6 that Calculon considers infeasible it reports 0.86, and 0.76 for Calculon.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from benchmarks.support.problems import Group, Problem, problem_of, read_groups
from benchmarks.support.searchers import thompson
from benchmarks.support.timing import answer, count_at_least, publish, searching, tell
from benchmarks.support.workers import mapper
from costmodels.job.runtime import find_runtime
from hardware.arrays import FloatArray

PUBLISHED = {"Calculon, 24 configurations": 0.76, "FlexParallel, the same": 0.86, "FlexParallel, all 30": 0.84}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures and return the exit status."""
    parser = searching("calibration.surrogate_tau", __doc__, least=20)
    parser.add_argument(
        "--trials",
        type=count_at_least(0),
        nargs="+",
        default=[0, 3, 6, 10],
        help="numbers of trials after which to compare (0 3 6 10)",
    )
    parser.add_argument("--seeds", type=count_at_least(1), default=5, help="searches of each group (5)")
    return answer("surrogate_tau", parser.parse_args(argv), _measure, _print)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    if given.runtime is not None:
        find_runtime(given.runtime)
    groups, skipped = read_groups(given.measured, given.min_candidates)
    tasks = [
        (group, problem_of(group, (), given.runtime), seed, tuple(sorted(set(given.trials))))
        for group in groups
        for seed in range(given.seeds)
    ]
    found: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)
    with mapper(given.workers) as each:
        for number, by_trials in enumerate(each(_search, tasks)):
            for trials, figures in by_trials.items():
                found[id(tasks[number][0]), trials].append(figures)
            tell(f"{number + 1:,} of {len(tasks):,} searches")
    rows = [
        {
            "group": " ".join(str(part) for part in group.key if part != ""),
            "candidates": len(group.grid),
            "trials": trials,
            **{name: _median(own[name] for own in found[id(group), trials]) for name in _FIGURES},
        }
        for group in groups
        for trials in sorted(set(given.trials))
        if found[id(group), trials]
    ]
    return {"rows": rows, "published": PUBLISHED, "seeds": given.seeds, "skipped": dict(skipped)}


_FIGURES = ("tau", "tau_untried", "median_error_untried")


def _search(task: tuple[Group, Problem, int, tuple[int, ...]]) -> dict[int, dict[str, float]]:
    """Run one search and return its figures after each of the numbers of trials that the candidates allow."""
    group, problem, seed, moments = task
    searcher = thompson(problem, seed)
    everywhere = np.arange(len(problem.grid))
    tried: list[int] = []
    found = {}
    for moment in moments:
        if moment > len(problem.grid):
            break
        while len(tried) < moment:
            tried.append(searcher.ask())
            searcher.tell(tried[-1], group.outcomes[tried[-1]])
        # The expectation over the posterior of the log step time, given the trials so far.
        log_step_s = problem.posterior.expected(searcher.observations, everywhere).log_step_s
        found[moment] = _compare(np.exp(log_step_s), group.step_time_s, tried)
    return found


def _compare(expected_s: FloatArray, measured_s: FloatArray, tried: Sequence[int]) -> dict[str, float]:
    """Compute the figures over candidates that ran; nan if fewer than two are left."""
    ran = np.isfinite(measured_s)
    # Tried candidates are nearly known; the untried ones show what the surrogate generalises.
    untried = ran.copy()
    untried[list(tried)] = False
    errors = np.abs(expected_s[untried] / measured_s[untried] - 1)
    return {
        "tau": _tau(expected_s[ran], measured_s[ran]),
        "tau_untried": _tau(expected_s[untried], measured_s[untried]),
        "median_error_untried": float(np.median(errors)) if len(errors) else float("nan"),
    }


def _tau(one: FloatArray, other: FloatArray) -> float:
    return float(kendalltau(one, other).statistic) if len(one) > 1 else float("nan")


def _median(values: Any) -> float | None:
    """Return the median of the values that are numbers; None without any."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else None


def _print(result: Mapping[str, Any]) -> None:
    publish(result["rows"], as_json=False)
    for name, tau in result["published"].items():
        print(f"{name}: tau {tau}")


if __name__ == "__main__":
    sys.exit(main())
