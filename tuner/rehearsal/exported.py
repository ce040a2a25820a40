"""Start of a training program with the flags of an export, to rehearse whether they train."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hardware.io.errors import ConfigError
from trials.started import Started
from tuner.export.exporter import Export


def with_exported_flags(starts: Started, exported: Export, program: str | None, directory: Path) -> Started:
    """Return the start of a program with exported flags behind its own, so that of equal flags the exported ones count.

    Args:
        starts: What a trial of the study starts; its command is taken if no program is given.
        exported: Configuration as flags of a framework.
        program: Python file or command of the user, with its own flags; None for the study's command.
        directory: Directory in which that program is started.

    Raises:
        ConfigError: the target has no flags, or there is no program.
    """
    if not exported.arguments:
        rule = "is written as a file or as overrides, and not as flags that a rehearsal can hand on"
        raise ConfigError(rule, key="--export", value=exported.target, nearest="megatron, torchtitan or mindspeed")
    variables: Mapping[str, str | None] = dict(exported.environment)
    if program is not None:
        words = shlex.split(program)
        if words and words[0].endswith(".py"):
            words.insert(0, "python3")
        starts = Started(in_words="", command=tuple(words), directory=directory)
    if not starts.command:
        nearest = "--program 'pretrain_gpt.py YOUR FLAGS', with the flags of model and data"
        raise ConfigError("names no program, and the trials of the study start none", key="--export", nearest=nearest)
    return replace(
        starts, command=(*starts.command, *exported.arguments), environment={**starts.environment, **variables}
    )
