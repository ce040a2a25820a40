"""Time the command line as a user experiences it: each command runs in a process of its own, start included.

    python -m benchmarks.speed.command_line [--help_repeats 10] [--repeats 3] [--json]

Beside the time on the clock stand the CPU time of the process and of those that it has waited for, which a busy machine
lengthens less, and the peak of its resident memory. `run` ends after four simulated trials; the processes of its Ray
are counted as far as Ray waits for them.

Target: `--help` under 0.5 s on 2 cores (median of 10).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.support.timing import arguments, publish

ROOT = Path(__file__).parents[2]
SMALL = "configs/studies/llama3-8b-dgx-h100.yaml"
LARGE = "configs/studies/flexparallel/pangu-135b-6144.yaml"
QUICK = (("--help",),)
COMMANDS = (
    ("space", SMALL),
    ("predict", SMALL, "--config", "tp=8,dp=8"),
    ("rank", SMALL),
    ("rank", SMALL, "--hosts", "2,4,8,16"),
    ("space", LARGE),
    ("rank", LARGE),
    ("run", SMALL, "--trials", "4"),
)


class Usage(NamedTuple):
    """What one process took: its time on the clock and of the CPU [s], and its peak of resident memory [MiB]."""

    seconds: float
    cpu_seconds: float
    peak_mib: float


def main() -> None:
    """Measure the help, and the commands on a small and a large study."""
    options = arguments(__doc__ or "", help_repeats=10, repeats=3)
    timed = [(command, options.help_repeats) for command in QUICK] + [
        (command, options.repeats) for command in COMMANDS
    ]
    rows = [
        {
            "command": f"meshtune {' '.join(Path(word).name for word in command)}",
            "repeats": repeats,
            **median_usage(command, repeats)._asdict(),
        }
        for command, repeats in timed
    ]
    publish(rows, as_json=options.json)


def median_usage(command: tuple[str, ...], repeats: int) -> Usage:
    """Return the medians of what a command took over `repeats` runs after one warm-up."""
    _run(command)
    return Usage(*map(statistics.median, zip(*(_run(command) for _ in range(repeats)), strict=True)))


def _run(command: tuple[str, ...]) -> Usage:
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PYTHONPATH": str(ROOT), "MESHTUNE_STORAGE": f"sqlite:///{folder}/study.db"}
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "tuner", *command],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return Usage(seconds=seconds, cpu_seconds=used.ru_utime + used.ru_stime, peak_mib=used.ru_maxrss / 1024)


if __name__ == "__main__":
    main()
