"""Measure quality and speed of the strategy-assignment solver on files in the format of the ASPLOS 2025 contest.

    python -m benchmarks.assignment FILE [FILE ...] [--time-limit SECONDS] [--cpu] [--seeds N] [--json]

The table has a row for each file, with the median, the best and the worst cost over the seeds, a lower bound on the
cost of every assignment, and the seconds until some assignment was feasible, at the seed that took longest. Where the
best known cost is known, it also gives the contest's points: best known cost over cost found, or 0 if no feasible
assignment was found. Times include reading the file. `--json` also prints every run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.assignment.contest_file import read_problem
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from hardware.io.errors import ConfigError
from tuner.planners.assignment.problem import AssignmentProblem
from tuner.planners.assignment.solve import solve
from tuner.planners.engine.outcome import Limits

BEST_KNOWN = {
    "asplos-2025-iopddl-A": 6_548_641_531.0,
    "asplos-2025-iopddl-B": 532_843.0,
    "asplos-2025-iopddl-G": 217_039.0,
    "asplos-2025-iopddl-M": 49_928_460_991.0,
    "asplos-2025-iopddl-S": 1_534_613_444.0,
}
"""Best known cost by file name without suffixes, from the final results of the ASPLOS 2025 contest; HiGHS proves the
costs of B and G optimal.
"""


def main(arguments: list[str] | None = None) -> int:
    """Solve the files one after the other and return the exit status."""
    parser = benchmark_parser("assignment", __doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="problems in the contest's JSON format, optionally gzipped"
    )
    parser.add_argument("--time-limit", type=count_at_least(1), default=60, help="seconds for each run (60)")
    parser.add_argument("--cpu", action="store_true", help="count this process's CPU seconds, not those on the wall")
    parser.add_argument("--seeds", type=count_at_least(1), default=1, help="runs of each file (1)")
    return answer("assignment", parser.parse_args(arguments), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute a row for each file and seed, a summary of each file, and the points of all known files."""
    if not given.files:
        raise ConfigError("name at least one", key="files", nearest="the contest's stand in google/iopddl, benchmarks/")
    clock = time.process_time if given.cpu else time.perf_counter
    rows: list[dict[str, Any]] = []
    summaries: list[dict[str, Any]] = []
    for file in given.files:
        tell(_name_of(file))
        start_s = clock()
        problem = read_problem(file)
        read_s = clock() - start_s
        own = [_row(problem, _name_of(file), given.time_limit, seed, read_s, clock) for seed in range(given.seeds)]
        rows += own
        summaries.append(_summary(own))
    points = {
        which: sum(each[f"{which}_points"] for each in summaries if each["best_known"] is not None)
        for which in ("median", "best", "worst")
    }
    known = sum(each["best_known"] is not None for each in summaries)
    return {
        "time_limit_s": given.time_limit,
        "clock": "cpu" if given.cpu else "wall",
        "rows": rows,
        "instances": summaries,
        "points": {"of": known, **points},
    }


def show(figures: dict[str, Any]) -> None:
    """Print the table and the total of points."""
    publish(figures["instances"], as_json=False)
    points = figures["points"]
    if points["of"]:
        print(
            f"points of {points['of']}: {points['median']:.3f} at the medians,"
            f" {points['best']:.3f} at best, {points['worst']:.3f} at worst"
        )


def _name_of(file: Path) -> str:
    """Return a file's name without its suffixes."""
    return file.name.removesuffix(".gz").removesuffix(".json")


def _row(
    problem: AssignmentProblem, name: str, time_limit_s: float, seed: int, read_s: float, clock: Callable[[], float]
) -> dict[str, Any]:
    """Return the figures of one run, as if the file had been read for it."""
    limits = Limits(time_s=time_limit_s)
    found = solve(problem, limits=limits, rng=np.random.default_rng(seed), start_s=clock() - read_s, clock=clock)
    cost = None if found.best is None else found.best.cost
    best_known = BEST_KNOWN.get(name)
    return {
        "instance": name,
        "seed": seed,
        "nodes": problem.num_nodes,
        "cost": cost,
        "best_known": best_known,
        "score": _points(best_known, cost),
        "bound": found.bound if np.isfinite(found.bound) else None,
        "gap": found.gap if cost is not None else None,
        "first_feasible_s": next((each.seconds for each in found.trace if np.isfinite(each.cost)), None),
        "seconds": found.seconds,
        "feasible": found.best is not None,
    }


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the spread of an instance's runs; None for a cost, or a time, of a run without an assignment."""
    costs = sorted(np.inf if row["cost"] is None else row["cost"] for row in rows)
    firsts = [row["first_feasible_s"] for row in rows]
    bounds = [row["bound"] for row in rows if row["bound"] is not None]
    best_known = rows[0]["best_known"]
    # Of an even number of runs, the worse of the two in the middle: a mean would be no run's cost.
    spread = {"median": costs[len(costs) // 2], "best": costs[0], "worst": costs[-1]}
    found = {which: cost if np.isfinite(cost) else None for which, cost in spread.items()}
    return {
        "instance": rows[0]["instance"],
        "nodes": rows[0]["nodes"],
        "seeds": len(rows),
        **found,
        "best_known": best_known,
        **{f"{which}_points": _points(best_known, cost) for which, cost in found.items()},
        "bound": max(bounds, default=None),
        "feasible_s": None if None in firsts else max(firsts),
    }


def _points(best_known: float | None, cost: float | None) -> float | None:
    """Return the contest's points of a cost; None if no best cost is known."""
    return None if best_known is None else 0.0 if cost is None else best_known / cost


if __name__ == "__main__":
    raise SystemExit(main())
