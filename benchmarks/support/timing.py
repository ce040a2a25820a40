"""Helpers of all benchmarks: repeated timing, tables, the option `--json`, and messages about mistakes and progress."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.shipped_runs import shipped_runs
from hardware.io.errors import ConfigError

USERS_MISTAKE = 2
"""Exit status for a mistake in the arguments."""


def median_s(work: Callable[[], object], repeats: int) -> float:
    """Return the median wall time of `work` over `repeats` runs after one warm-up [s]."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process so far [bytes]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def arguments(description: str, **options: int) -> argparse.Namespace:
    """Parse `--json` and one integer option for each keyword, with its default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    return parser.parse_args()


def benchmark_parser(program: str, description: str | None, *, has_json: bool = True) -> argparse.ArgumentParser:
    """Make the parser of a benchmark, with `--json`.

    Args:
        program: Module of the benchmark below `benchmarks`.
        description: Text of its help, usually the module's docstring.
        has_json: Whether the benchmark can print one JSON object.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if has_json:
        parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def searching(program: str, description: str | None, *, least: int | None = None) -> argparse.ArgumentParser:
    """Make the parser of a benchmark that searches measured groups: `--measured`, `--workers` and `--json`.

    Args:
        program: Module of the benchmark below `benchmarks`.
        description: Text of its help, usually the module's docstring.
        least: Usual number of candidates of the smallest group, which adds `--min-candidates` and `--runtime`.
    """
    parser = benchmark_parser(program, description)
    parser.add_argument(
        "--measured",
        nargs="+",
        type=Path,
        default=shipped_runs(),
        metavar="CSV",
        help="files with the groups to search (all of configs/measured/runs)",
    )
    parser.add_argument("--workers", type=count_at_least(1), default=2, help="worker processes (2)")
    if least is not None:
        parser.add_argument(
            "--min-candidates",
            type=count_at_least(2),
            default=least,
            help=f"leave out groups with fewer candidates, timed or failed ({least})",
        )
        parser.add_argument("--runtime", help="runtime profile that predicts the runs of every source")
    return parser


def add_history(parser: argparse.ArgumentParser) -> None:
    """Add the option `--history`."""
    parser.add_argument(
        "--history",
        nargs="+",
        type=Path,
        default=[],
        metavar="CSV",
        help="measured runs that are known before the search",
    )


def count_at_least(least: int) -> Callable[[str], int]:
    """Make the type of an option that takes a whole number of at least `least`."""

    def count(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, but got {text}")
        return value

    return count


def answer(
    program: str,
    given: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> int:
    """Run a benchmark program: measure, print the figures to stdout, and return the exit status.

    Args:
        program: Name of the program, printed before the message on a mistake.
        given: Parsed arguments; `json` says whether to print one JSON object.
        measure: Function that computes the figures; it raises ConfigError on a mistake in the arguments.
        show: Function that prints the figures as tables.
    """
    try:
        figures = measure(given)
    except ConfigError as error:
        tell(f"{program}: {error}")
        return USERS_MISTAKE
    if given.json:
        print(json.dumps(figures, indent=2, allow_nan=False))
    else:
        show(figures)
    return 0


def publish(rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print the rows as a table, or as JSON."""
    if as_json:
        print(json.dumps({"rows": list(rows)}, indent=2))
        return
    header = list(rows[0])
    cells = [[_format_cell(row[name]) for name in header] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    for line in (header, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def tell(line: str) -> None:
    """Print progress, notes and mistakes to stderr, since stdout belongs to the result."""
    print(line, file=sys.stderr, flush=True)


def reasons(skipped: Mapping[str, int]) -> str:
    """Format what was left out as the end of a message; empty if nothing was."""
    return "skipped: " + "; ".join(f"{count} {reason}" for reason, count in skipped.items()) if skipped else ""


def _format_cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
