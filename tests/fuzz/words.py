"""Targets: whole command lines, in whose words any text may stand, as Python hands them over."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import typer

from hardware.io.errors import ConfigError
from tests.fuzz.mutation import of_json
from tests.fuzz.target import Target
from tests.support.studies import launch_scripts as scripts
from tests.support.studies.broken_studies import study
from tests.support.studies.training_logs import LOG
from tuner.cli.main import _UsageError, commands

LINES = (
    ["space", "study.yaml", "--list", "--json"],
    ["space", "study.yaml", "--why", "pp=8,tp=3", "--set", "name=other"],
    ["predict", "study.yaml", "--config", "tp=8", "--json"],
    ["rank", "study.yaml", "--top", "3", "--storage", "sqlite:///x.db"],
    ["simulate", "study.yaml", "--config", "tp=8", "--trace", "out.json"],
    ["export", "study.yaml", "--to", "megatron", "--config", "tp=8", "--out", "flags.txt"],
    ["estimate", "study.yaml", "--tokens", "1e9"],
    ["replan", "study.yaml", "--trace", "trace.csv"],
    ["watch", "study.yaml", "--hosts-from", "trace.csv", "--once", "--config", "tp=8", "--state", "state.json"],
    ["status", "study.yaml"],
    ["best", "study.yaml", "--json"],
    ["report", "study.yaml", "--out", "report.html"],
    ["init", "--from-megatron", "train.sh", "--cluster", "dgx-h100", "--out", "new.yaml", "--force", "--", "argument"],
    ["init", "--from-log", "train.log", "--cluster", "dgx-h100", "--out", "new.yaml", "--force"],
)
COMMANDS = frozenset(line[0] for line in LINES)
"""Commands that run nobody's code."""

RUN_CODE = ("--hook", "--capture", "--jax", "--torch", "--from-jax", "--from-torch", "--yes")


def _told(data: bytes) -> list[str]:
    try:
        words = json.loads(data)
    except (ValueError, RecursionError):
        return []
    return [word for word in map(str, words if isinstance(words, list) else []) if not word.startswith(RUN_CODE)]


def _run(data: bytes, folder: Path) -> None:
    """Run a command line in the folder; what it prints must be text that can be printed."""
    words = _told(data)
    if not words or words[0] not in COMMANDS:
        return
    folder = folder / "here"
    if not folder.exists():
        folder.mkdir()
        (folder / "study.yaml").write_text(study(), encoding="utf-8")
        (folder / "train.sh").write_text(scripts.ARRAYS.replace("--mock-data", '--data-path "$1"'), encoding="utf-8")
        (folder / "train.log").write_text(LOG, encoding="utf-8")
        (folder / "trace.csv").write_text("time_s,link,share\n0,intra,0.5\n", encoding="utf-8")
    here = Path.cwd()
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=sys.__stdout__.errors if sys.__stdout__ else "strict")
    os.chdir(folder)
    try:
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            commands().main(words, standalone_mode=False, prog_name="meshtune")
    except (typer.Exit, typer.Abort):
        pass
    finally:
        os.chdir(here)
    out.flush()
    if "--json" in words and out.buffer.getvalue().strip():  # type: ignore[attr-defined] # it is a BytesIO
        json.loads(out.buffer.getvalue())  # type: ignore[attr-defined] # as above


TARGETS = (
    Target(
        name="command line",
        read=_run,
        mutation=of_json,
        seeds=lambda: tuple(json.dumps(line).encode() for line in LINES if line[0] not in ("status", "report")),
        refusals=(ConfigError, _UsageError),
    ),
)
