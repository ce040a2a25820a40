"""Solve one assignment in the contest's form: `python -m benchmarks.assignment.solve_file INSTANCE.json.gz`."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import numpy as np

from benchmarks.assignment.contest_file import read_problem
from hardware.arrays import IntArray
from hardware.io.errors import ConfigError
from tuner.planners.assignment.solve import solve
from tuner.planners.engine.outcome import Limits, Outcome


class _Interrupts:
    """Handler that notes the first interrupt; a second one ends the program at once.

    Attributes:
        is_stopped: Whether an interrupt has come.
    """

    def __init__(self) -> None:
        """Begin without an interrupt."""
        self.is_stopped = False

    def __call__(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 # the form of a signal's handler
        """Note an interrupt."""
        if self.is_stopped:
            raise KeyboardInterrupt
        self.is_stopped = True


def main(arguments: list[str] | None = None) -> int:
    """Solve a file and print the result; return the exit status: 0, or 2 after a mistake in the input."""
    start_s = _process_start_s() if arguments is None else time.perf_counter()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.assignment.solve_file", description=__doc__)
    parser.add_argument("file", type=Path, help="a problem in the contest's JSON, plain or .gz")
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds to solve the problem, with the time to read it",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the search's random choices")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write each node's strategy as a JSON list")
    options = parser.parse_args(arguments)
    # The first interrupt ends the search, which then returns its best assignment.
    interrupts = _Interrupts()
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        problem = read_problem(options.file)
        found = solve(
            problem,
            limits=Limits(time_s=options.time_limit),
            rng=np.random.default_rng(options.seed),
            start_s=start_s,
            is_stopped=lambda: interrupts.is_stopped,
        )
        if options.out is not None and found.best is not None:
            _write(options.out, found.best.solution)
    except ConfigError as error:
        print(error, file=sys.stderr)  # this is a command
        return 2
    finally:
        signal.signal(signal.SIGINT, before)
    print(_as_json(found) if options.json else _as_text(found))  # this is a command
    return 0


def _process_start_s() -> float:
    """Return when this process started, on the clock of `time.perf_counter`.

    Where the system does not tell it, the processor time spent so far is taken off the present time.

    Source: proc(5), field 22 of /proc/self/stat, in clock ticks since the machine started.
    """
    now_s = time.perf_counter()
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return now_s - (uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError):
        return now_s - time.process_time()


def _seconds(text: str) -> float:
    """Parse a positive, finite number of seconds."""
    seconds = float(text)
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be positive and finite")
    return seconds


def _write(path: Path, strategies: IntArray) -> None:
    """Write the strategies of all nodes as a JSON list."""
    try:
        path.write_text(json.dumps(strategies.tolist()) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", file=str(path)) from None


def _as_json(found: Outcome[IntArray]) -> str:
    """Format a result as a JSON object."""
    return json.dumps(
        {
            "cost": None if found.best is None else _plain(found.best.cost),
            "bound": _plain(found.bound) if math.isfinite(found.bound) else None,
            "seconds": round(found.seconds, 3),
            "feasible": found.best is not None,
            "known": found.known.name.lower(),
            "stop": found.stop.name.lower(),
        }
    )


def _as_text(found: Outcome[IntArray]) -> str:
    """Format a result as a line of text."""
    cost = "no assignment found" if found.best is None else f"cost {found.best.cost:.10g}, gap {100 * found.gap:.2f}%"
    return f"{cost}, bound {found.bound:.10g}, {found.seconds:.1f} s: {found.known.value}"


def _plain(number: float) -> int | float:
    """Return a whole number as an integer."""
    return int(number) if number == int(number) else number


if __name__ == "__main__":
    sys.exit(main())
