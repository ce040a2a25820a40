"""Time what a driver spends on a trial of a study that holds many already, without draws and without waiting.

    python -m benchmarks.speed.late_trials [--at 1000 10000] [--trials 40] [--json]

The study is that of benchmarks.endurance.load on SQLite. Its first trials are written at once; the next ones end at
once, and random numbers replace the draws of the surrogate. What is left is what each trial costs the driver: asking,
recording, deciding and the storage. The table has the median of its CPU time per trial [ms], the share of it in the
storage, and the memory of this process at the end [MiB]. It must not grow with the trials that have ended: Optuna's own
count of a study's trials is all that does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.endurance.load import STUDY, rss_mib, seed
from benchmarks.endurance.storage_cost import EndingTrials, Stopwatch, drawn_at_random
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from tuner.run.loop import run_study
from tuner.study_file.config import load_study

FIRST = 3
"""Trials that are left out: opening the study and the first draws fall to them."""


class Timed(Stopwatch):
    """Stopwatch that also notes the CPU time of the whole process at each end of a trial."""

    def lap(self) -> None:
        """Record the times of the trial that has just ended."""
        super().lap()
        self.ends_s = [*getattr(self, "ends_s", ()), time.process_time()]


def cost_of_late_trials(at: int, trials: int, folder: Path) -> dict[str, Any]:
    """Measure trials of a study that holds `at` trials."""
    (folder / "late.yaml").write_text(STUDY, encoding="utf-8")
    storage = f"sqlite:///{folder / f'{at}.db'}"
    config = load_study(folder / "late.yaml", overrides=["search.draws=10"], storage=storage)
    config = replace(config, search=config.search.model_copy(update={"max_trials": at + trials + FIRST}))
    seed(config, at)
    stopwatch = Timed()
    executor = EndingTrials(stopwatch)
    with stopwatch.on(), drawn_at_random():
        run_study(config, on_progress=lambda _: None, executor=executor, clock=lambda: executor.now_s)
    taken_s = [later - sooner for sooner, later in zip(stopwatch.ends_s, stopwatch.ends_s[1:], strict=False)][
        FIRST - 1 :
    ]
    stored_s = [cpu_s for _, cpu_s in stopwatch.taken[FIRST:]]
    return {
        "ended": at,
        "cpu_ms": 1e3 * statistics.median(taken_s),
        "storage_cpu_ms": 1e3 * statistics.median(stored_s),
        "rss_mib": rss_mib(),
    }


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all sizes."""
    rows = []
    for at in given.at:
        tell(f"writing a study of {at:,} trials")
        with tempfile.TemporaryDirectory() as folder:
            rows.append(cost_of_late_trials(at, given.trials, Path(folder)))
    return {"rows": rows}


def main() -> int:
    """Measure, print the table and return the exit status."""
    parser = benchmark_parser("speed.late_trials", __doc__)
    parser.add_argument(
        "--at", nargs="+", type=count_at_least(1), default=[1000, 10000], help="trials that have ended (1000 10000)"
    )
    parser.add_argument("--trials", type=count_at_least(2), default=40, help="trials measured at each size (40)")
    return answer("late_trials", parser.parse_args(), measured, lambda figures: publish(figures["rows"], as_json=False))


if __name__ == "__main__":
    sys.exit(main())
