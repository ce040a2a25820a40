"""Targets: whole command lines, in whose words any text may stand, as Python hands them over."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from hardware.io.errors import ConfigError
from tests.fuzz.mutation import of_json
from tests.fuzz.target import Target
from tests.support.studies import launch_scripts as scripts
from tests.support.studies.broken_studies import study
from tests.support.studies.training_logs import LOG
from tuner.cli.main import _status_of_app
from tuner.cli.options import USERS_MISTAKE

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
    if not words or words[0] not in COMMANDS or (words[0] == "watch" and ("--once" not in words or "--" in words)):
        return
    folder = folder / "here"
    if not folder.exists():
        folder.mkdir()
        (folder / "study.yaml").write_text(study(), encoding="utf-8")
        (folder / "train.sh").write_text(scripts.ARRAYS.replace("--mock-data", '--data-path "$1"'), encoding="utf-8")
        (folder / "train.log").write_text(LOG, encoding="utf-8")
        (folder / "trace.csv").write_text("time_s,link,share\n0,intra,0.5\n", encoding="utf-8")
    here, given = Path.cwd(), sys.argv
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors) for errors in STREAMS)
    os.chdir(folder)
    sys.argv = ["meshtune", *words]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = _status_of_app()
    finally:
        os.chdir(here)
        sys.argv = given
    if "--json" in words and status == 0 and (printed := _printed(out)).strip():
        json.loads(printed)
    if status == USERS_MISTAKE:
        message = _printed(err)
        assert message.startswith("meshtune: "), message[:200]
        raise ConfigError(message.removeprefix("meshtune: "))


STREAMS = ("surrogateescape", "backslashreplace")
"""How Python writes text that is no UTF-8 to standard output, in a plain locale, and to standard error."""


def _printed(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO), "made above"
    return stream.buffer.getvalue().decode(errors="replace")


TARGETS = (
    Target(
        name="command line",
        read=_run,
        mutation=of_json,
        seeds=lambda: tuple(json.dumps(line).encode() for line in LINES if line[0] not in ("status", "report")),
    ),
)
