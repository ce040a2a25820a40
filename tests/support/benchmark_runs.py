"""Measured runs of a small group, and a helper that starts benchmarks as users do."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LAYOUTS = ((8, 1, 1), (8, 1, 2), (4, 2, 1), (4, 2, 2), (4, 2, 4), (2, 4, 1), (2, 4, 2), (2, 4, 4))
"""Degrees tp and dp, and micro-batch size mbs, of the runs."""

TIMES_S = (1.5, 1.4, 1.2, 1.1, 1.15, 1.0, 0.95, 1.3)
RUNS = tuple(
    {"tp": tp, "dp": dp, "mbs": mbs, "step_seconds": seconds}
    for (tp, dp, mbs), seconds in zip(LAYOUTS, TIMES_S, strict=True)
)
FAILED = tuple(
    {"tp": 1, "dp": 8, "mbs": mbs, "seq_parallel": 0, "step_seconds": "", "notes": "FAILED: out of memory"}
    for mbs in (1, 2)
)


def run_from_root(program, *arguments):
    """Run `python -m benchmarks.PROGRAM` from the root of the project."""
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{program}", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
