"""Rehearsals of a study by the command, as its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.studies.command_line import in_process


def rehearsed(study: Path, *words: str, status: int = 0) -> Any:
    """Return the answers of a rehearsal."""
    done = in_process("rehearse", study, "--yes", "--json", *words, cwd=study.parent, timeout_s=600)
    assert done.status == status, done.err
    return done.json


def calls(answer: Any, part: str) -> int:
    """Return the number of a rank's collectives whose name has a part."""
    return sum(one["count"] for one in answer["collectives"] if part in one["name"])
