"""Check `meshtune init` over a folder of launch scripts: is each study right, asked for, refused or silently wrong?

    python -m benchmarks.launch_scripts FOLDER [--only TEXT] [--json]

Each shell script runs with stand-ins, as by `meshtune init --capture`, and its training command gives the truth: what
the framework's own argument names and defaults say (megatron_truth.py; file_truth.py for configuration files). The
studies that the capture and the reading of the script give are compared with it, fact by fact. Questions of `init` are
answered from the truth, and studies that needed answers are counted apart. A script that trains something else than a
whole decoder-only transformer is right if it is refused; scripts that train nothing are left out.

FOLDER has one folder for each project. `NAME.args` beside a script holds the words behind it, with variables of the
environment before them. Scripts really run, in scratch folders: check what you collect. What they write under absolute
paths stays. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.launch_scripts.corpus import Script, scripts_in
from benchmarks.launch_scripts.file_truth import torchtitan_truth, yaml_truth
from benchmarks.launch_scripts.judging import AFTER, REFUSED, RIGHT, VERDICTS, WRONG, verdict
from benchmarks.launch_scripts.megatron_truth import megatron_truth
from benchmarks.launch_scripts.study import Outcome, study_of
from benchmarks.launch_scripts.trainer_truth import trainer_truth
from benchmarks.launch_scripts.truth import NOTHING, UNKNOWN, Truth
from benchmarks.support.timing import answer, benchmark_parser, tell
from hardware.io.errors import ConfigError
from tuner.capture.run_script import Capture, capture
from tuner.imports.captured import import_captured
from tuner.study_file.new_study import read_import

_LIMIT_S = 30.0
"""Time limit of one captured script [s]."""
_BY_READING = ("megatron", "torchtitan")
"""Importers that read shell scripts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Verdicts on one script.

    Attributes:
        script: The script.
        truth: What it trains.
        ways: Verdict, differences and outcome for each way in: capture or file, and reading.
    """

    script: Script
    truth: Truth
    ways: dict[str, tuple[str, list[str], Outcome]]

    @property
    def best(self) -> str:
        """Best verdict of the ways in, but wrong if any is."""
        verdicts = [found for found, _, _ in self.ways.values()]
        return WRONG if WRONG in verdicts else min(verdicts, key=VERDICTS.index)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdicts and return the exit status."""
    parser = benchmark_parser("launch_scripts", __doc__)
    parser.add_argument("folder", type=Path, help="folder with one folder of scripts for each project")
    parser.add_argument("--only", default="", metavar="TEXT", help="only scripts whose path holds this text")
    return answer("launch_scripts", parser.parse_args(argv), _measure, _print)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    """Judge all scripts.

    Raises:
        ConfigError: there is no such folder.
    """
    if not given.folder.is_dir():
        raise ConfigError("is no folder", key="FOLDER", value=str(given.folder))
    judged = [
        found for one in scripts_in(given.folder.resolve()) if given.only in str(one.path) for found in _judge(one)
    ]
    return {"projects": _table(judged), "scripts": [_entry(one, given.folder.resolve()) for one in judged]}


def _judge(script: Script) -> Iterator[Judged]:
    """Yield the verdicts on a script that trains something, or that a way in takes for one that does."""
    tell(f"{script.project}: {script.path.name}")
    ways: dict[str, Outcome] = {}
    if script.is_shell:
        with contextlib.chdir(script.path.parent):
            captured = capture(script.command, limit_s=_LIMIT_S)
        truth = _truth(captured, script)
        ways["capture"] = study_of(lambda: import_captured(captured), truth, script.path)
        framework = "torchtitan" if truth.framework == "torchtitan" else "megatron"
        words = script.arguments or None
        ways["reading"] = study_of(
            lambda: read_import(framework, script.path, script.text, arguments=words), truth, script.path
        )
    else:
        is_toml = script.path.suffix == ".toml"
        truth = torchtitan_truth(script.text) if is_toml else yaml_truth(script.text, script.train_text)
        ways["reading"] = study_of(lambda: read_import(script.framework, script.path, script.text), truth, script.path)
    if truth.trains or (truth.trains is False and not all(found.refused for found in ways.values())):
        yield Judged(
            script=script, truth=truth, ways={name: (*verdict(found, truth), found) for name, found in ways.items()}
        )


def _truth(captured: Capture, script: Script) -> Truth:
    """Return the truth of the first training command that was captured."""
    last = UNKNOWN
    for record in captured.records:
        if record.held_back:
            continue
        found = megatron_truth(record, script.text) or trainer_truth(record, script.text) or NOTHING
        for name, text in record.files.items():
            found = found if found.trains else torchtitan_truth(text) if name.endswith(".toml") else yaml_truth(text)
        if found.trains:
            return found
        last = found
    return last


def _table(judged: Sequence[Judged]) -> dict[str, dict[str, int]]:
    """Count scripts by project: right by capture and by reading, asked, refused and wrong."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for one in judged:
        for name in (one.script.project, "all"):
            row = table[name]
            row["scripts"] += 1
            row["refusable"] += bool(one.truth.refusal)
            for way, (found, _, _) in one.ways.items():
                row[f"{way}: {found}"] += 1
            row[f"best: {one.best}"] += 1
    return {name: dict(row) for name, row in table.items()}


def _entry(one: Judged, folder: Path) -> dict[str, Any]:
    return {
        "script": str(one.script.path.relative_to(folder)),
        "framework": one.truth.framework,
        "refusable": one.truth.refusal,
        "best": one.best,
        "ways": {
            way: {
                "verdict": found,
                "differences": differences,
                "asked": list(outcome.asked),
                "refused": outcome.refused,
            }
            for way, (found, differences, outcome) in one.ways.items()
        },
    }


_COLUMNS = (
    "scripts",
    "refusable",
    *(f"capture: {name}" for name in VERDICTS),
    *(f"reading: {name}" for name in VERDICTS),
    *(f"best: {name}" for name in VERDICTS),
)


def _print(found: dict[str, Any]) -> None:
    short = {RIGHT: "right", AFTER: "asked", REFUSED: "refused", WRONG: "WRONG"}
    heads = [short.get(name.rpartition(": ")[2], name) for name in _COLUMNS]
    print(f"{'':20} {'':15} {'by capture':31} {'by reading':31} {'best':31}")
    print(f"{'project':20} " + " ".join(f"{head[:7]:>7}" for head in heads))
    for name, row in found["projects"].items():
        print(f"{name:20} " + " ".join(f"{row.get(column, 0):7}" for column in _COLUMNS))
    for title, wanted in (("Silently wrong", WRONG), ("Refused", REFUSED)):
        print(f"\n{title}:")
        for entry in found["scripts"]:
            for way, of in entry["ways"].items():
                if of["verdict"] == wanted:
                    print(f"  {entry['script']} by {way}: {'; '.join(of['differences']) or of['refused']}")


if __name__ == "__main__":
    sys.exit(main())
