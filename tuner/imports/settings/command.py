"""Conversion of a command with settings into a study's `trial.command`.

The words stay as they are. A trial exchanges the settings in which its configuration differs from today's, in place.
Saving and loading, trackers and profilers are left out, and every step is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trials.command.placeholders import escape_braces
from tuner.imports.bash.script import Script
from tuner.imports.imported import LaunchCommand
from tuner.imports.settings.words import Item
from tuner.imports.torchrun import Launch
from tuner.imports.trial_words import launch_command

EVERY_STEP = "each step of a trial is logged"
_NOT_IN_TRIALS = "a trial saves, profiles and reports nothing"


def command_with_settings(
    launch: Launch,
    script: Script,
    items: Sequence[Item],
    *,
    framework: str,
    leaves: Callable[[str], bool],
    sets: Mapping[str, tuple[str, ...]],
    unknown: tuple[str, ...] = (),
    starts_itself: bool = False,
) -> LaunchCommand:
    """Return the command of a trial, with the reasons for its unknown words.

    Args:
        launch: Launch command of the script.
        script: The whole script, for its environment.
        items: Words behind the program.
        framework: Exporter of the settings that are exchanged.
        leaves: Whether a trial must not have the setting of a key.
        sets: Words of settings that every trial has of its own, by key.
        unknown: Further reasons why the command is not known.
        starts_itself: Whether the program starts the processes of the devices itself, without torchrun, srun or mpirun.
    """
    kept: list[str] = []
    left_out: dict[str, str] = {}
    left = dict(sets)
    hidden = []
    for item in items:
        own = next((key for key in item.keys if key in sets), None)
        if own is not None:
            kept += left.pop(own, ())
        elif item.keys and all(map(leaves, item.keys)):
            name, equals, _ = item.words[0].text.partition("=")
            left_out[name + equals] = _NOT_IN_TRIALS
        else:
            kept += [escape_braces(word.text) for word in item.words]
            hidden += [word.unknown for word in item.words if word.unknown]
    kept += [word for words in left.values() for word in words]
    own_unknown = [word.unknown for word in (*launch.launcher, *launch.program) if word.unknown]
    reasons = own_unknown if starts_itself else launch.unknown(())
    found = launch_command(
        launch,
        script,
        framework=framework,
        arguments=kept,
        left_out=left_out,
        reasons={words[0]: EVERY_STEP for words in sets.values()},
        unknown=(*reasons, *hidden, *unknown),
    )
    return replace(found, left_out=tuple(name.rstrip("=") for name in left_out))
