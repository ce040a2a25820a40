"""Fuzz everything that reads a file or an option, and list the inputs that were not refused with a clear message.

    python -m benchmarks.endurance.fuzz [--targets NAME ...] [--inputs N] [--seconds S] [--blind SEED]
        [--folder DIR] [--json]

Each target of tests/fuzz runs in a process of its own. Coverage guides the mutation of its inputs (atheris, from the
extra `fuzz`; benchmarks/support/fuzz_target.py). With `--blind`, good inputs are changed at random, repeatably and
without that library (fuzz_blindly.py). A target ends after the given number of inputs or seconds,
whichever comes first. A defect is one of these: an exception other than the one with which the target refuses input, a
message of more than LONGEST_MESSAGE characters, more than 5 seconds for one input, or more than half a GiB for one
input. The folder keeps the corpus of each target, with which the next run continues, and the input of every defect.

    python -m benchmarks.endurance.fuzz --targets study --inputs 100000

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
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from hardware.io.errors import ConfigError
from tests.fuzz.targets import TARGETS

START_S = 120
"""Extra time that a process may take beyond its seconds [s]: importing the instrumented packages is slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Result of fuzzing one target.

    Attributes:
        target: Name of the target.
        inputs: Number of inputs that were read.
        accepted: Number of inputs that were not refused.
        seconds: Time spent on all inputs [s].
        worst_s: Longest time spent on one input [s].
        covered: Number of reached program locations, as counted by libFuzzer.
        corpus: Number of inputs kept because each reaches new locations.
        defects: Paths of the inputs that are defects, with the kind of each.
    """

    target: str
    inputs: int
    accepted: int
    seconds: float
    worst_s: float
    covered: int
    corpus: int
    defects: tuple[tuple[str, str], ...]


def fuzzed(name: str, *, inputs: int, seconds: int, blind: int | None, folder: Path) -> Row:
    """Fuzz one target, starting a new process whenever an input ended the previous one."""
    folder.mkdir(parents=True, exist_ok=True)
    done, covered, corpus, ended = Counts(), 0, 0, 0
    while done.inputs + ended < inputs and done.seconds < seconds:
        left = {"inputs": inputs - done.inputs - ended, "seconds": max(1, round(seconds - done.seconds))}
        for stale in ("tally", "current"):
            (folder / stale).unlink(missing_ok=True)
        first = done.inputs + ended
        if blind is None:
            status, log = _run("fuzz_target", name, left, folder)
        else:
            status, log = _run("fuzz_blindly", name, {"seed": blind, "first": first, **left}, folder)
        now = counted(folder / "tally")
        done = done.and_then(now)
        ended += status != 0
        reached = re.findall(r"cov: (\d+) ft: \d+ corp: (\d+)", log)
        covered, corpus = map(int, reached[-1]) if reached else (covered, corpus)
        if status and (folder / "current").exists():
            (folder / "current").rename(folder / f"crash-{blind}-{first + now.inputs}")
        elif status and not now.inputs:
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


def _run(program: str, name: str, options: Mapping[str, int], folder: Path) -> tuple[int, str]:
    """Run one process and return its exit status and its output."""
    words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    line = [sys.executable, "-m", f"benchmarks.support.{program}", name, *words, "--folder", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
        try:
            status = process.wait(options["seconds"] + START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
    return status, (folder / "log").read_text(encoding="utf-8", errors="replace")


def _defects(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the kind of each stored defect."""
    for path in sorted(folder.glob("defect-*.json")):
        yield str(path.with_suffix(".input")), json.loads(path.read_text(encoding="utf-8"))["kind"]
    for kind in ("timeout", "crash", "oom"):
        for path in sorted(folder.glob(f"{kind}-*")):
            yield str(path), kind


def _folder(folder: Path, name: str) -> Path:
    return folder / re.sub(r"[^a-z.]+", "-", name)


def figures(given: argparse.Namespace) -> dict[str, Any]:
    """Compute a row for each target."""
    if given.blind is None and importlib.util.find_spec("atheris") is None:
        raise ConfigError("is not installed", key="atheris", nearest="pip install 'meshtune[fuzz]', or --blind 0")
    rows = []
    for name in given.targets:
        tell(f"fuzzing {name} ...")
        folder = _folder(given.folder, name)
        limits = {"inputs": given.inputs, "seconds": given.seconds}
        rows.append(asdict(fuzzed(name, **limits, blind=given.blind, folder=folder)))
    return {"rows": rows, "inputs": sum(row["inputs"] for row in rows), "folder": str(given.folder)}


def show(found: Mapping[str, Any]) -> None:
    """Print the rows as a table, and list the defects below it."""
    publish([{**row, "defects": len(row["defects"])} for row in found["rows"]], as_json=False)
    print(f"{found['inputs']:,} inputs")
    for row in found["rows"]:
        for path, kind in row["defects"]:
            print(f"{row['target']}: {kind}\n  {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz the selected targets and return the exit status."""
    parser = benchmark_parser("endurance.fuzz", __doc__)
    parser.add_argument(
        "--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="NAME", help="targets to fuzz (all)"
    )
    parser.add_argument("--inputs", type=count_at_least(1), default=10_000, help="inputs of each target (10,000)")
    parser.add_argument("--seconds", type=count_at_least(1), default=60, help="seconds for each target (60)")
    parser.add_argument(
        "--blind", type=count_at_least(0), metavar="SEED", help="change inputs at random, without regard to coverage"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("build/fuzz"), help="folder for corpora and defects (build/fuzz)"
    )
    given = parser.parse_args(arguments)
    status = answer("fuzz", given, figures, show)
    return status or int(any(True for name in given.targets for _ in _defects(_folder(given.folder, name))))


if __name__ == "__main__":
    sys.exit(main())
