"""Measured runs of a small group, and functions that start programs as users do."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.quick_xla import QUICK_FLAGS

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


def json_of(module, *arguments):
    """Run a module in a process of its own, where it may set the number of JAX's devices, and parse what it prints."""
    done = _run_module(module, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def _run_module(module, *arguments):
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK_FLAGS},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
