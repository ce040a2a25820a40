"""Measure the calibration of the step-level surrogate: measured step times against the intervals of its draws.

    python -m benchmarks.calibration.step_calibration [--measured C.csv ...] [--history A.csv ...] [--seeds 5]
        [--trials 0,3,6,10] [--json]

Groups of measured runs are problems as in benchmarks/search/sample_efficiency.py. Without --history they are predicted
by a shipped profile that was never fitted to their source. With --history they are predicted by their own runtime,
without the measurements of the group itself. After some trials, chosen by Thompson sampling, 400 joint draws of all
step times give a 95% interval for each candidate that was timed and not yet tried. Memory and crashes do not enter
these draws, since candidates that did not run have no step time to compare.

Columns: coverage is the share of the measured times inside their interval, with 0.90 to 0.98 as the target. worst tenth
is the coverage that one group in ten falls below. error is the median relative error of the median draw. width is the
median width of the interval in units of the log. Figures are over the candidates and seeds of all groups together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.problems import Group, Problem, problem_of, read_groups, read_runs
from benchmarks.support.searchers import thompson
from benchmarks.support.timing import add_history, answer, count_at_least, publish, searching, tell
from benchmarks.support.trial_metrics import quantile
from benchmarks.support.workers import mapper
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.job.runtime import find_runtime
from hardware.arrays import FloatArray
from tuner.search.subset import select_subset

NUM_DRAWS = 400
INTERVAL = (0.025, 0.5, 0.975)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """Timed candidates that were not tried, h of them, compared with their draws.

    Attributes:
        num_trials: Number of trials that the draws know.
        is_inside: Whether the measured time lies in the 95% interval of the draws [h].
        error: Relative error of the median draw [h].
        width: Width of the interval, in units of the log [h].
    """

    num_trials: int
    is_inside: NDArray[np.bool_]
    error: FloatArray
    width: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Task:
    """One run of the sampler on a group."""

    group: Group
    problem: Problem
    seed: int
    num_trials: tuple[int, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit status."""
    return answer("step_calibration", _arguments(argv), _measure, _print)


def _print(result: Mapping[str, Any]) -> None:
    for name in ("groups", "sources", "overall"):
        print(name)
        publish(result[name], as_json=False)
    for reason, count in result["skipped"].items():
        print(f"skipped {count:,}: {reason}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = searching("calibration.step_calibration", __doc__, least=10)
    add_history(parser)
    parser.add_argument("--seeds", type=count_at_least(1), default=5, help="runs of the sampler on each group (5)")
    parser.add_argument(
        "--trials",
        type=_parse_counts,
        default=(0, 3, 6, 10),
        help="comma-separated numbers of trials after which to compare (0,3,6,10)",
    )
    return parser.parse_args(argv)


def _parse_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of trials and sort them."""
    count = count_at_least(0)
    return tuple(sorted({count(part) for part in text.split(",")}))


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute all figures.

    Raises:
        ConfigError: The arguments cannot be used.
    """
    if given.runtime is not None:
        find_runtime(given.runtime)
    history, _ = read_runs(given.history) if given.history else ((), None)
    groups, skipped = read_groups(given.measured, given.min_candidates)
    found: list[list[HeldOut]] = [[] for _ in groups]
    with mapper(given.workers) as each:
        tell(f"{len(groups)} groups; predicting their candidates")
        problems = list(each(partial(_problem, history=history, runtime=given.runtime), groups))
        tasks = [
            _Task(group=group, problem=problem, seed=seed, num_trials=given.trials)
            for group, problem in zip(groups, problems, strict=True)
            for seed in range(given.seeds)
        ]
        for number, held in enumerate(each(_run, tasks)):
            found[number // given.seeds] += held
            if number % given.seeds == given.seeds - 1:
                group = groups[number // given.seeds]
                tell(f"{number + 1:,} of {len(tasks):,} runs: {' '.join(map(str, group.key[:4]))}")
    sources: dict[str, list[list[HeldOut]]] = {}
    for group, held in zip(groups, found, strict=True):
        sources.setdefault(group.runs[0].source, []).append(held)
    return {
        "groups": [
            {"group": " ".join(map(str, group.key)), **row}
            for group, held in zip(groups, found, strict=True)
            for row in figures([held])
        ],
        "sources": [{"source": name, **row} for name, own in sources.items() for row in figures(own)],
        "overall": figures(found),
        "skipped": dict(skipped),
        "settings": {
            "measured": [str(path) for path in given.measured],
            "history": [str(path) for path in given.history],
            "seeds": given.seeds,
            "trials": list(given.trials),
            "min_candidates": given.min_candidates,
            "runtime": given.runtime,
        },
    }


def _problem(group: Group, history: Sequence[MeasuredRun], runtime: str | None) -> Problem:
    return problem_of(group, history, runtime)


def _run(task: _Task) -> list[HeldOut]:
    return run_and_look(task.group, task.problem, task.seed, task.num_trials)


def run_and_look(group: Group, problem: Problem, seed: int, num_trials: Sequence[int]) -> list[HeldOut]:
    """Compare draws of step times with the untried candidates after each number of trials in turn.

    It ends early when no timed candidate is left.
    """
    searcher = thompson(problem, seed)
    left = np.isfinite(group.step_time_s)
    # Failed candidates have infinite times and are masked out everywhere below.
    log_measured = np.log(group.step_time_s, where=left, out=np.zeros(len(left)))
    num_tried, found = 0, []
    for wanted in num_trials:
        while num_tried < wanted and left.any():
            position = searcher.ask()
            searcher.tell(position, group.outcomes[position])
            left[position] = False
            num_tried += 1
        if not left.any():
            break
        # Draws are reproducible per seed and number of trials, independent of the sampler's own draws.
        seen, rng = searcher.observations, np.random.default_rng([seed, wanted])
        told = select_subset(seen, problem.posterior.steps[0].points.features)
        drawn = problem.posterior.draw_steps(seen, told, NUM_DRAWS, rng)
        found.append(held_out(drawn[:, left], log_measured[left], wanted))
    return found


def held_out(drawn: NDArray[np.floating], log_measured: FloatArray, num_trials: int) -> HeldOut:
    """Compare draws of log step times [M, h] with the measured ones [h]."""
    # Draws are float32; quantiles are taken in float64 to compare with measured times.
    low, middle, high = np.quantile(drawn.astype(np.float64), INTERVAL, axis=0)
    return HeldOut(
        num_trials=num_trials,
        is_inside=(log_measured >= low) & (log_measured <= high),
        error=np.abs(np.expm1(middle - log_measured)),
        width=high - low,
    )


def figures(groups: Sequence[Sequence[HeldOut]]) -> list[dict[str, Any]]:
    """Compute one row for each number of trials, over all groups."""
    # Coverage is computed per group as well: a good mean can hide groups with overconfident intervals.
    rows = []
    for num_trials in sorted({held.num_trials for group in groups for held in group}):
        looks = [[held for held in group if held.num_trials == num_trials] for group in groups]
        by_group = [float(np.concatenate([held.is_inside for held in own]).mean()) for own in looks if own]
        every = [held for own in looks for held in own]
        rows.append(
            {
                "trials": num_trials,
                "groups": len(by_group),
                "n": sum(len(held.is_inside) for held in every),
                "coverage": float(np.concatenate([held.is_inside for held in every]).mean()),
                "worst_tenth": quantile(by_group, 0.1),
                "error": float(np.median(np.concatenate([held.error for held in every]))),
                "width": float(np.median(np.concatenate([held.width for held in every]))),
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
