"""Part of `meshtune init` that runs the user's own script to capture its training command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hardware.io.errors import ConfigError
from hardware.io.temporary import check_temporary
from tuner.terminal.console import printable

if TYPE_CHECKING:  # this loads numpy
    from tuner.imports import Imported

NAME = "capture"
"""Name of the way in, beside those of the importers."""


def captured_import(command: Sequence[str], *, yes: bool) -> tuple[Imported, Path]:
    """Run the command with stand-ins, after the user agreed, and return what it would have trained and its script.

    Raises:
        ConfigError: there is no command, the user did not agree, or no training command was captured.
    """
    from tuner.capture.run_script import LIMIT_S, capture
    from tuner.imports.captured import import_captured
    from tuner.study_file.answers import SCRIPTS

    if not command:
        raise ConfigError("needs the command that trains", key="--capture", nearest="--capture -- bash train.sh")
    script = next((Path(word) for word in command if word.endswith(SCRIPTS)), Path(command[0]))
    typer.echo(_explanation(command, LIMIT_S), err=True)
    if not yes and not (sys.stdin.isatty() and typer.confirm("Run it?", err=True)):
        raise ConfigError("runs your script, and was not confirmed", key="--capture", nearest="--yes confirms it")
    check_temporary("the script's scratch folder")
    try:
        captured = capture(command)
    except OSError as error:
        raise ConfigError(f"cannot be started: {error}", key="--capture", value=shlex.join(command)) from None
    try:
        return import_captured(captured), script
    except ConfigError as error:
        raise error.in_file(str(script)) from None


def _explanation(command: Sequence[str], limit_s: float) -> str:
    """Say what the capture is about to do, before it does it."""
    from tuner.capture.launchers import HELD_BACK, THROUGH, TRAINING

    return "\n".join(
        (
            f"Capture: runs `{printable(shlex.join(command))}` for at most {limit_s:.0f} s.",
            f"  Nothing trains: {', '.join(TRAINING[:5])} and the like only write down their arguments.",
            f"  Looked through, so that the command in them is captured too: {', '.join(THROUGH)}.",
            f"  Held back: {', '.join(HELD_BACK)}.",
            "  All other commands of the script really run, also `python -c` and a program on Python's standard input.",
            "  They run in a scratch folder with copies of the small files here and links to the folders here: what",
            "  they write into those folders, or under absolute paths, stays.",
        )
    )
