"""Rows of benchmarks that check each framework with its own parser, where that is installed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from benchmarks.support.timing import benchmark_parser, count_at_least, publish, tell
from hardware.io.errors import ConfigError, did_you_mean

P = TypeVar("P")
Row = dict[str, Any]


def framework_parser(program: str, description: str | None, targets: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Make the parser of such a benchmark: `--count`, `--target`, `--seed` and `--json`."""
    parser = benchmark_parser(program, description)
    parser.add_argument("--count", type=count_at_least(1), default=500, help="configurations of each framework (500)")
    parser.add_argument("--target", default=",".join(targets), help="comma-separated frameworks (all)")
    parser.add_argument("--seed", type=count_at_least(0), default=0, help="seed of the draws (0)")
    return parser


def rows_of(
    given: argparse.Namespace, parsers: Mapping[str, Callable[[], P]], measure: Callable[[str, P | None], Row | None]
) -> list[Row]:
    """Print the row of each framework with its mistakes, and return all rows.

    Args:
        given: Parsed arguments.
        parsers: Functions that load a framework's own parser, by framework.
        measure: Function that computes a row, with examples of mistakes under `wrong`; the parser is None where it is
            not installed, for which there may be no row.

    Raises:
        ConfigError: A framework is not known.
    """
    rows = []
    for target in given.target.split(","):
        if target not in parsers:
            raise ConfigError("is no framework", key="--target", value=target, nearest=did_you_mean(target, parsers))
        parser = None
        try:
            parser = parsers[target]()
        except ImportError as error:
            tell(f"{target}: no real parser: {error}")
        row = measure(target, parser)
        if row is None:
            continue
        rows.append(row)
        for line in row["wrong"]:
            tell(f"{target}: {line}")
    if given.json:
        print(json.dumps({"rows": rows}, indent=2))
    else:
        publish([{name: value for name, value in row.items() if name != "wrong"} for row in rows], as_json=False)
    return rows
