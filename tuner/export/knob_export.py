"""Export of a configuration with the values of a study's knobs.

Flags and variables of knobs enter the exported flags in place of those that the exporter wrote. Keys of files enter the
export where that is such a file (JSON). Whatever the text cannot hold becomes a note.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from costmodels.job.parallel_config import KnobValue, ParallelConfig
from trials.knobs.knob import Knob, active_knobs, knob_environment, knob_words, without_knob_flags
from trials.knobs.places import set_key, text_of
from tuner.export.exporter import Export
from tuner.export.parts import format_comments

_ARRAY = re.compile(r"[A-Z_]+=\(")


def with_knobs(export: Export, knobs: Sequence[Knob], config: ParallelConfig) -> Export:
    """Return an export with the values that a configuration has of a study's knobs.

    Args:
        export: Configuration in the format of a framework.
        knobs: Knobs of the study.
        config: Configuration with its knobs.
    """
    if not knobs:
        return export
    if export.arguments:
        return _in_flags(export, knobs, config)
    return _in_file(export, knobs, config)


def _in_flags(export: Export, knobs: Sequence[Knob], config: ParallelConfig) -> Export:
    """Return flags, as a bash array, with those of the knobs."""
    owned = {name for knob, value in active_knobs(knobs, config) for name in knob.place.replaced_flags(value)}
    variables = {name: None if value is None else text_of(value) for name, value in knob_environment(knobs, config)}
    notes = tuple(_note(knob, value) for knob, value in active_knobs(knobs, config) if not _is_in_flags(knob))
    lines, is_inside = [], False
    for line in export.text.splitlines():
        words = line.split()
        if not is_inside and _ARRAY.fullmatch(line):
            lines += format_comments(notes)
            lines += [
                f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
                for name, value in variables.items()
            ]
            # first, because some flags end with a subcommand
            lines += [line, *(f"    {flags}" for flags in _flag_lines(knobs, config))]
            is_inside = True
            continue
        if is_inside and line == ")":
            is_inside = False
        elif (is_inside and words and words[0].partition("=")[0] in owned) or _variable(line) in variables:
            continue
        lines.append(line)
    return replace(
        export,
        text="\n".join(lines) + "\n",
        notes=(*export.notes, *notes),
        arguments=(*knob_words(knobs, config), *without_knob_flags(export.arguments, knobs, config)),
        environment=(
            *((name, value) for name, value in export.environment if name not in variables),
            *variables.items(),
        ),
    )


def _in_file(export: Export, knobs: Sequence[Knob], config: ParallelConfig) -> Export:
    """Return a file with the keys of the knobs, where it is JSON, and notes on the other knobs."""
    active = active_knobs(knobs, config)
    try:
        parsed = json.loads(export.text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        return replace(export, notes=(*export.notes, *(_note(knob, value) for knob, value in active)))
    # a study with one file means that of its framework
    files = {knob.place.file for knob in knobs if knob.place.file}
    own = {export.target} if export.target in files else files if len(files) == 1 else set()
    for knob, value in active:
        if knob.place.file in own:
            set_key(parsed, knob.place.key, value)
    notes = tuple(_note(knob, value) for knob, value in active if knob.place.file not in own)
    if isinstance(parsed.get("comments"), list):
        parsed["comments"] += notes
    return replace(export, text=json.dumps(parsed, indent=2), notes=(*export.notes, *notes))


def _flag_lines(knobs: Sequence[Knob], config: ParallelConfig) -> list[str]:
    """Return the flags of the knobs with their values, quoted for bash, one knob in a line."""
    return [
        " ".join(map(shlex.quote, words))
        for knob, value in active_knobs(knobs, config)
        if (words := knob.place.words(value))
    ]


def _is_in_flags(knob: Knob) -> bool:
    return knob.place.takes_flags or bool(knob.place.environment)


def _note(knob: Knob, value: KnobValue) -> str:
    """Say where the value of a knob goes that an export cannot hold."""
    shown = "absent" if value is None else text_of(value)
    place = knob.place
    if place.file:
        return f"{knob.name}: {place.key} is {shown} in the file {place.file}"
    if place.environment:
        return f"{knob.name}: the variable {place.environment} is {shown}"
    if place.takes_flags:
        words = shlex.join(place.words(value))
        return f"{knob.name}: {words}" if words else f"{knob.name}: without {', '.join(sorted(place.flag_names))}"
    return f"{knob.name}: {{{knob.name}}} in the command is {shown}"


def _variable(line: str) -> str:
    """Return the name of the environment variable that a line of bash sets or removes; empty for other lines."""
    match = re.match(r"(?:export|unset) ([A-Za-z_][A-Za-z0-9_]*)", line)
    return match[1] if match else ""
