"""Measure quality and speed of the strategy-assignment solver on files in the format of the ASPLOS 2025 contest.

    python -m benchmarks.assignment FILE [FILE ...] [--time-limit SECONDS] [--seeds N] [--json]

Each row gives the cost found and a lower bound on the cost of every assignment. Where the best known cost is known, it
also gives the contest's score: best known cost over cost found, or 0 if no feasible assignment was found. The time
includes reading the file.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.assignment.contest_file import read_problem
from benchmarks.assignment.solve import solve
from benchmarks.support.timing import answer, count_at_least, publish, tell
from hardware.io.errors import ConfigError
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.assignment",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="problems in the contest's JSON format, optionally gzipped"
    )
    parser.add_argument("--time-limit", type=count_at_least(1), default=60, help="seconds for each file (60)")
    parser.add_argument("--seeds", type=count_at_least(1), default=1, help="runs of each file (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return answer("assignment", parser.parse_args(arguments), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute a row for each file and seed."""
    if not given.files:
        raise ConfigError("name at least one", key="files", nearest="the contest's stand in google/iopddl, benchmarks/")
    rows = [_row(file, given.time_limit, seed) for file in given.files for seed in range(given.seeds)]
    return {"time_limit_s": given.time_limit, "rows": rows}


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    publish(figures["rows"], as_json=False)


def _row(file: Path, time_limit_s: float, seed: int) -> dict[str, Any]:
    name = file.name.split(".")[0]
    tell(name)
    start_s = time.perf_counter()
    problem = read_problem(file)
    limits = Limits(time_s=time_limit_s)
    found = solve(problem, limits=limits, rng=np.random.default_rng(seed), start_s=start_s)
    cost = None if found.best is None else found.best.cost
    best_known = BEST_KNOWN.get(name)
    return {
        "instance": name,
        "seed": seed,
        "nodes": problem.num_nodes,
        "cost": cost,
        "best_known": best_known,
        "score": None if best_known is None else 0.0 if cost is None else best_known / cost,
        "bound": found.bound if np.isfinite(found.bound) else None,
        "gap": found.gap if cost is not None else None,
        "seconds": found.seconds,
        "feasible": found.best is not None,
    }


if __name__ == "__main__":
    raise SystemExit(main())
