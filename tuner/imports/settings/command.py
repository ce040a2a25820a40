"""Conversion of a command with settings into a study's `trial.command`.

The words stay where they stand. The settings that depend on a candidate give way to `{flags}`, which stands where the
first of them stood; saving and loading, trackers and profilers are left out; every step is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tuner.imports.bash.script import Script
from tuner.imports.imported import LaunchCommand
from tuner.imports.settings.words import Item
from tuner.imports.torchrun import Launch, escape_braces, trial_command

_FLAGS = "{flags}"


def command_with_settings(
    launch: Launch,
    script: Script,
    items: Sequence[Item],
    *,
    framework: str,
    replaces: Callable[[str], bool],
    leaves: Callable[[str], bool],
    own: Iterable[str] = (),
    unknown: tuple[str, ...] = (),
    begin: Sequence[str] | None = None,
) -> LaunchCommand:
    """Return the command of a trial, with the reasons for its unknown words.

    Args:
        launch: Launch command of the script.
        script: The whole script, for its environment.
        items: Words behind the program.
        framework: Exporter that writes `{flags}`.
        replaces: Whether `{flags}` replaces the setting of a key.
        leaves: Whether a trial must not have the setting of a key.
        own: Further words of a trial, behind all others.
        unknown: Further reasons why the command is not known.
        begin: Words up to and including the program; None for those of torchrun.
    """
    kept: list[str] = []
    reasons: list[str] = []
    left_out: list[str] = []
    place: int | None = None
    for item in items:
        if item.keys and all(map(leaves, item.keys)):
            left_out += item.keys
        elif item.keys and all(map(replaces, item.keys)):
            place = len(kept) if place is None else place
        else:
            kept += [escape_braces(word.text) for word in item.words]
            reasons += [word.unknown for word in item.words if word.unknown]
    kept.insert(len(kept) if place is None else place, _FLAGS)
    is_torchrun = begin is None
    reasons = [*(launch.unknown(()) if is_torchrun else ()), *reasons]
    found = trial_command(
        launch,
        script,
        framework=framework,
        own=(*kept, *own),
        unknown=(*dict.fromkeys(reasons), *unknown),
        left_out=tuple(dict.fromkeys(left_out)),
    )
    return found if begin is None else replace(found, arguments=(*begin, *kept, *own))
