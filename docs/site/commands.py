"""Reference of the commands in docs/commands.md, generated from the command line's own definitions."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from docs.site.json_keys import JSON_KEYS
from tuner.cli.main import app


def command_reference() -> dict[str, str]:
    """Return the Markdown of all commands: arguments, options and JSON keys, under the region name `commands`."""
    group: Any = typer.main.get_command(app)
    return {"commands": "\n\n".join(_section(name, command) for name, command in group.commands.items())}


def _section(name: str, command: Any) -> str:
    """Return the section of one command: heading, help, usage, table of options, and one table per form of JSON."""
    context = command.make_context(name, [], resilient_parsing=True)
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join(["meshtune", name, *(_in_usage(one) for one in arguments), "[OPTIONS]"])
    parts = [f"## `meshtune {name}`", inspect.cleandoc(command.help), f"```text\n{usage}\n```"]
    rows = [_row(one, context) for one in command.params if not getattr(one, "hidden", False)]
    # The options come from `params`, so that arguments are rows of the same table; the help prints them apart.
    parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    for when, keys in JSON_KEYS.get(name, {}).items():
        head = [f"| key of `--json`{f' {when}' if when else ''} | meaning |", "|---|---|"]
        parts.append("\n".join(head + [f"| `{key}` | {_cell(meaning)} |" for key, meaning in keys.items()]))
    return "\n\n".join(parts)


def _in_usage(argument: Any) -> str:
    """Return an argument as the usage line shows it: in brackets if optional, with dots if it may be repeated."""
    text = argument.metavar + ("..." if argument.nargs == -1 else "")
    return text if argument.required else f"[{text}]"


def _row(parameter: Any, context: Any) -> str:
    """Return the table row of an option or argument, with the text of its help."""
    names, meaning = parameter.get_help_record(context)
    if parameter.param_type_name == "argument":
        names = parameter.metavar
    several = " May be given several times." if parameter.multiple else ""
    # Click appends the default to the help text in brackets; the table shows it as a sentence.
    meaning, bracket, default = meaning.partition("  [default: ")
    shown = f" Default: `{default.removesuffix(']')}`." if bracket else ""
    return f"| `{_cell(names)}` | {_cell(meaning)}{several}{shown} |"


def _cell(text: str) -> str:
    """Return a text on one line, with the characters escaped that would end a table cell."""
    return " ".join(text.split()).replace("|", "\\|")
