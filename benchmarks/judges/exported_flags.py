"""Export random configurations, read them with the frameworks' own parsers, and check that broken exports are refused.

    python -m benchmarks.judges.exported_flags [--count 500] [--target megatron,torchtitan] [--seed 0] [--json]

For each framework `--count` configurations that it can run are drawn (benchmarks/support/export_samples.py) and
exported. Our own reader reads each export back and checks it against the framework's published rules
(tests/oracles/frameworks). Where the framework's real parser is installed (`make frameworks`), it reads the export too;
benchmarks/support/framework_parsers.py says which parts are real.

Columns: refused counts configurations that our check refuses. differ counts configurations with dimensions that came
back changed without a note. real counts exports read by the framework's own parser; real refused and real differ count
the same mistakes for it. mutants counts broken exports, and missed those that our check accepts. All columns except the
counts must be 0, otherwise the exit status is 1.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from benchmarks.support.export_samples import MUTATIONS, differences, mutants, samples
from benchmarks.support.framework_parsers import PARSERS, Parser, Refused
from benchmarks.support.framework_rows import framework_parser, rows_of
from benchmarks.support.timing import USERS_MISTAKE, tell
from hardware.io.errors import ConfigError
from tests.oracles.frameworks.checks import CHECKS
from tests.oracles.frameworks.published_rules import facts_of
from tuner.export import find_exporter


def measure(target: str, count: int, seed: int, parser: Parser | None) -> dict[str, Any]:
    """Compute one row, with up to five examples of mistakes."""
    check, found, wrong = CHECKS[target], Counter[str](), list[str]()
    names: set[str] = set()
    start = time.process_time()
    for setting, config in samples(target, count, seed):
        export, facts = find_exporter(target)(setting, config), facts_of(setting)
        try:
            values = check.read(export, facts)
        except ConfigError as error:
            found["refused"] += 1
            wrong.append(f"{config}: {error}")
            continue
        unlike = differences(check.said(values, facts), setting, config, export)
        if unlike:
            found["differ"] += 1
            wrong.append(f"{config}: {unlike}")
        if parser is not None:
            found["real"] += 1
            try:
                read = parser(export, setting)
            except Refused as error:
                found["real_refused"] += 1
                wrong.append(f"{config}: {error}")
            else:
                unlike = differences(check.said(read, facts), setting, config, export)
                if unlike:
                    found["real_differ"] += 1
                    wrong.append(f"{config}: real parser: {unlike}")
        for name, mutant in mutants(target, export, values, setting):
            found["mutants"] += 1
            names.add(name)
            try:
                check.read(mutant, facts)
            except ConfigError:
                continue
            found["missed"] += 1
            wrong.append(f"{config}: {name} is not refused")
    columns = ("refused", "differ", "real", "real_refused", "real_differ", "mutants", "missed")
    return {
        "target": target,
        "configurations": count,
        **{name: found[name] for name in columns},
        "kinds": f"{len(names)}/{len({mutation.name for mutation in MUTATIONS[target]})}",
        "cpu_s": time.process_time() - start,
        "wrong": wrong[:5],
    }


def failed(row: dict[str, Any]) -> bool:
    """Return whether any of the mistakes was counted in the row."""
    return any(row[name] for name in ("refused", "differ", "real_refused", "real_differ", "missed"))


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each framework and return the exit status."""
    given = framework_parser("judges.exported_flags", __doc__, CHECKS).parse_args(arguments)
    try:
        rows = rows_of(given, PARSERS, lambda target, parser: measure(target, given.count, given.seed, parser))
    except ConfigError as error:
        tell(f"exported_flags: {error}")
        return USERS_MISTAKE
    return int(any(failed(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
