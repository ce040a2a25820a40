"""Part of `meshtune init` that runs the user's own script to capture its training command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hardware.io.errors import ConfigError
from hardware.io.secret_texts import hide_words
from hardware.io.temporary import check_temporary
from tuner.terminal.console import printable

if TYPE_CHECKING:  # the second loads numpy
    from tuner.capture.run_script import Capture
    from tuner.imports import Imported

NAME = "capture"
"""Name of the way in, beside those of the importers."""


NAMED = 8
"""Number of written files that a note names."""
_WORDS = {"namespaces": "namespaces of its own", "guard": "Landlock and a filter of system calls"}


def captured_import(
    command: Sequence[str], *, yes: bool, unconfined: bool, beside: Sequence[Path] = ()
) -> tuple[Imported, Path, Capture]:
    """Run the command with stand-ins, after the user agreed, and return what it would have trained and its script.

    Args:
        command: Program and arguments.
        yes: Whether the user has agreed already.
        unconfined: Whether the user has agreed to a run without a boundary.
        beside: Files with the recipe that the captured command runs.

    Raises:
        ConfigError: there is no command, the user did not agree, no boundary is possible, or no training command was
            captured.
    """
    from hardware.io.config_file import read_text
    from tuner.capture.run_script import LIMIT_S
    from tuner.imports.captured import import_captured, without_known_secrets
    from tuner.study_file.answers import SCRIPTS
    from tuner.study_file.new_study import MOST_BYTES

    recipe = "\n".join(read_text(file, most_bytes=MOST_BYTES) for file in beside)
    if not command:
        raise ConfigError("needs the command that trains", key="--capture", nearest="--capture -- bash train.sh")
    script = next((Path(word) for word in command if word.endswith(SCRIPTS)), Path(command[0]))
    typer.echo(_explanation(command, LIMIT_S), err=True)
    if not yes and not (sys.stdin.isatty() and typer.confirm("Run it?", err=True)):
        raise ConfigError("runs your script, and was not confirmed", key="--capture", nearest="--yes confirms it")
    check_temporary("the script's scratch folder")
    captured = _captured(command, yes=yes, unconfined=unconfined)
    try:
        imported = import_captured(captured, recipe=recipe)
    except ConfigError as error:
        raise error.in_file(str(script)) from None
    told = without_known_secrets(captured)
    return replace(imported, notes=(*imported.notes, *_notes(told))), script, told


def _captured(command: Sequence[str], *, yes: bool, unconfined: bool) -> Capture:
    """Run the command behind a boundary; without one only if the user wants that too."""
    from tuner.capture.run_script import NoBoundaryError, capture

    try:
        try:
            return capture(command, unconfined=unconfined)
        except NoBoundaryError as error:
            words = "; ".join(f"{_WORDS[name]}: {reason}" for name, reason in error.reasons.items())
            typer.echo(f"Nothing can be put between the script and this machine ({printable(words)}).", err=True)
            question = "Run it without, so that what it does under absolute paths and over the network really happens?"
            if yes or not sys.stdin.isatty() or not typer.confirm(question, err=True):
                raise ConfigError(
                    "runs no script of which nothing keeps this machine apart",
                    key="--capture",
                    value=shlex.join(hide_words(command)),
                    nearest="--unconfined runs it all the same; --from-megatron and others only read a script",
                ) from None
            return capture(command, boundaries=(), unconfined=True)
    except OSError as error:
        raise ConfigError(
            f"cannot be started: {error}", key="--capture", value=shlex.join(hide_words(command))
        ) from None


def _notes(captured: Capture) -> list[str]:
    """Return the notes on what the script did besides starting its training."""
    notes = list(captured.unread)
    if captured.written:
        named = ", ".join(captured.written[:NAMED])
        more = f" and {len(captured.written) - NAMED} more" if len(captured.written) > NAMED else ""
        where = "" if captured.boundary else " in its copy of the working directory"
        notes.append(f"what the script wrote{where} is gone, with - before what it removed: {named}{more}")
    if captured.unseen:
        notes.append(f"the script did not see {', '.join(captured.unseen[:NAMED])}")
    if not captured.boundary:
        notes.append("the script ran without a boundary: what it did under absolute paths or over the network stays")
    return notes


def _explanation(command: Sequence[str], limit_s: float) -> str:
    """Say what the capture is about to do, before it does it."""
    from tuner.capture.launchers import HELD_BACK, THROUGH, TRAINING

    return "\n".join(
        (
            f"Capture: runs `{printable(shlex.join(hide_words(command)))}` for at most {limit_s:.0f} s.",
            "  The kernel keeps it apart from this machine: what it writes is named and does not stay, and it has no",
            "  network. Where this machine allows that in no way, it does not run.",
            f"  Nothing trains: {', '.join(TRAINING[:5])} and the like only write down their arguments.",
            f"  Looked through, so that the command in them is captured too: {', '.join(THROUGH)}.",
            f"  Held back: {', '.join(HELD_BACK)}.",
            "  All other commands of the script really run, also `python -c`, a program on Python's standard input,",
            "  and one whose output the script reads, as in `$(python3 tool.py)`.",
        )
    )
