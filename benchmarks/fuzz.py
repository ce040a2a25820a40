"""Feeds changed inputs to everything that reads a file or an option, and tells what was not refused in words.

    python -m benchmarks.fuzz [--targets NAME ...] [--inputs N] [--seconds S] [--folder DIR] [--json]

Each target of tests/fuzz runs in a process of its own (benchmarks/support/fuzz_target.py), guided by coverage (atheris,
of the extra `fuzz`), for so many inputs or seconds, whichever is first. A defect is any exception but the one by which
a target refuses, a message of more than LONGEST_MESSAGE characters, more than 5 seconds, or more than half a GiB for
one input. The folder keeps the corpus of each target, with which the next run goes on, and the input of every defect.

    python -m benchmarks.fuzz --targets study --inputs 100000

The exit status is 1 if there are defects.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.fuzz_tally import Counts, counted
from benchmarks.support.timing import answer, count_at_least, publish, tell
from hardware.io.errors import ConfigError
from tests.fuzz.targets import TARGETS

START_S = 120
"""How long a process may take beyond its seconds: it imports the packages with counters in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What became of one target.

    Attributes:
        target: Its name.
        inputs: Read.
        accepted: Of these, not refused.
        seconds: Spent on them.
        worst_s: The longest that one took [s].
        covered: Places of the program that were reached, as libFuzzer counts them.
        corpus: Inputs that each reach a place of their own.
        defects: Files of inputs, with what is wrong.
    """

    target: str
    inputs: int
    accepted: int
    seconds: float
    worst_s: float
    covered: int
    corpus: int
    defects: tuple[tuple[str, str], ...]


def fuzzed(name: str, *, inputs: int, seconds: int, folder: Path) -> Row:
    """Fuzzes one target, in as many processes as its inputs end."""
    folder.mkdir(parents=True, exist_ok=True)
    done, covered, corpus = Counts(), 0, 0
    while done.inputs < inputs and done.seconds < seconds:
        left = {"inputs": inputs - done.inputs, "seconds": max(1, round(seconds - done.seconds))}
        (folder / "tally").unlink(missing_ok=True)
        status, log = _run(name, left, folder)
        now = counted(folder / "tally")
        done = done.and_then(now)
        reached = re.findall(r"cov: (\d+) ft: \d+ corp: (\d+)", log)
        covered, corpus = map(int, reached[-1]) if reached else (covered, corpus)
        if status and not now.inputs:
            raise ConfigError(f"ended with status {status} before its first input: {log[-400:]}", key=name)
        if not status:
            break
    return Row(
        target=name,
        inputs=done.inputs,
        accepted=done.accepted,
        seconds=round(done.seconds, 1),
        worst_s=round(done.worst_s, 2),
        covered=covered,
        corpus=corpus,
        defects=tuple(_defects(folder)),
    )


def _run(name: str, left: Mapping[str, int], folder: Path) -> tuple[int, str]:
    """The exit status of one process, and what it printed."""
    limits = [word for option, limit in left.items() for word in (f"--{option}", str(limit))]
    line = [sys.executable, "-m", "benchmarks.support.fuzz_target", name, *limits, "--folder", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
        try:
            status = process.wait(left["seconds"] + START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
    return status, (folder / "log").read_text(encoding="utf-8", errors="replace")


def _defects(folder: Path) -> Iterator[tuple[str, str]]:
    """The inputs that were left, and what is wrong with them."""
    for path in sorted(folder.glob("defect-*.json")):
        yield str(path.with_suffix(".input")), json.loads(path.read_text(encoding="utf-8"))["kind"]
    for kind in ("timeout", "crash", "oom"):
        for path in sorted(folder.glob(f"{kind}-*")):
            yield str(path), kind


def _folder(folder: Path, name: str) -> Path:
    return folder / re.sub(r"[^a-z.]+", "-", name)


def figures(given: argparse.Namespace) -> dict[str, Any]:
    """A row for each target."""
    if importlib.util.find_spec("atheris") is None:
        raise ConfigError("is not installed", key="atheris", nearest="pip install 'meshtune[fuzz]'")
    rows = []
    for name in given.targets:
        tell(f"fuzzing {name} ...")
        folder = _folder(given.folder, name)
        rows.append(asdict(fuzzed(name, inputs=given.inputs, seconds=given.seconds, folder=folder)))
    return {"rows": rows, "inputs": sum(row["inputs"] for row in rows), "folder": str(given.folder)}


def show(found: Mapping[str, Any]) -> None:
    """Prints the rows as a table, and the defects under it."""
    publish([{**row, "defects": len(row["defects"])} for row in found["rows"]], as_json=False)
    print(f"{found['inputs']:,} inputs")
    for row in found["rows"]:
        for path, kind in row["defects"]:
            print(f"{row['target']}: {kind}\n  {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzzes the targets that are named; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="NAME", help="all")
    parser.add_argument("--inputs", type=count_at_least(1), default=10_000, help="of each target (10,000)")
    parser.add_argument("--seconds", type=count_at_least(1), default=60, help="of each target (60)")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="build/fuzz")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    status = answer("fuzz", given, figures, show)
    return status or int(any(True for name in given.targets for _ in _defects(_folder(given.folder, name))))


if __name__ == "__main__":
    sys.exit(main())
