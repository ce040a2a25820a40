"""Command of trials that run inside of a training that goes on: it loads a checkpoint, and saves another one.

What the script says of checkpoints is left out of a trial's command; here it comes back with the trial's own folders.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hardware.io.errors import ConfigError
from trials.command.training_folder import CHECKPOINT, LAST_STEP, NEW_CHECKPOINT, step_in
from tuner.imports.imported import LaunchCommand

OPTION = "--checkpoints"
WHY = "trials run inside of a training, and load and save its checkpoints"

_FLAGS = {"--load": f"{{{CHECKPOINT}}}", "--save": f"{{{NEW_CHECKPOINT}}}", "--exit-interval": f"{{{LAST_STEP}}}"}
_RESHARDS = "--dist-ckpt-optim-fully-reshardable"
"""Flag without which the states of Megatron-LM's distributed optimizer keep to one dp (core 0.14 and later)."""


def in_training(command: LaunchCommand | None) -> LaunchCommand:
    """Return a command that goes on from a checkpoint and ends after its steps.

    Raises:
        ConfigError: There is no command, or none of Megatron-LM.
    """
    if command is None or command.framework != "megatron":
        raise ConfigError(
            "needs a launch script of Megatron-LM",
            key=OPTION,
            nearest="trial.training in the study file, for a command with {checkpoint} and {new_checkpoint}",
        )
    added = [word for flag in _FLAGS.items() for word in flag]
    added += [_RESHARDS] if "--use-distributed-optimizer" in command.arguments else []
    return replace(
        command,
        arguments=(*(word for word in command.arguments if word != _RESHARDS), *added),
        left_out=tuple(flag for flag in command.left_out if flag not in _FLAGS),
        reasons={**command.reasons, **dict.fromkeys([*_FLAGS, _RESHARDS], WHY)},
    )


def training_lines(command: LaunchCommand, folder: str, out: Path) -> list[str]:
    """Return the lines of `trial:` that name the checkpoints, for a study file `out`.

    The checkpoint that the script loads is where the training begins, if it is here and says how many steps it holds.
    """
    lines = ["  training:", f"    folder: {folder}  # of the checkpoints that trials leave; every host has to see it"]
    loaded = _value_of(command.words, "--load")
    if not loaded:
        return [*lines, "    # start: CHECKPOINT  # what the first trial loads; without it, the training begins anew"]
    place = out.parent / command.directory / loaded
    if place.is_dir() and step_in(place):
        return [
            *lines,
            f"    start: {os.path.relpath(place, out.parent) if not Path(loaded).is_absolute() else loaded}",
        ]
    return [*lines, f"    # start: {loaded}  # the script's --load, where no checkpoint was found"]


def _value_of(words: Sequence[str], flag: str) -> str:
    """Return the last value of a flag among words; empty if it has none."""
    found = ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
