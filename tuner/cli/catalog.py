"""Command `catalog`: the devices, clusters, models, runtimes and knobs that studies may name."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from tuner.cli import completion as cli_completion
from tuner.cli.options import AsJson
from tuner.terminal.console import print_json, printable, say, warn
from tuner.terminal.tables import print_table

if TYPE_CHECKING:  # these load numpy
    from tuner.catalog.entry import Entry
    from tuner.catalog.listing import Listing

_PROSE = ("description", "fitted_on", "text")
"""Columns of words, which are last and are cut to the width of the terminal."""


def catalog(
    kind: Annotated[
        str,
        Argument(
            metavar="KIND",
            help="devices, clusters, models, runtimes or knobs.",
            autocompletion=cli_completion.catalog_kinds,
        ),
    ],
    name: Annotated[
        str | None, Argument(metavar="NAME", help="Entry to print as a whole, with its sources, in YAML.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what studies may name: devices, clusters, models, runtime profiles and knobs.

    Your own entries, and those of installed packages, stand among them and are marked.
    """
    from hardware.io.catalogs import unread_in_user_catalog
    from tuner.catalog.listing import find_entries, find_listing, read_listing

    listing = find_listing(kind)
    if name is None:
        entries, broken = read_listing(listing)
    else:
        entries, broken = find_entries(kind, name)
    unread = [*(f"{each.mistake}" for each in broken), *unread_in_user_catalog()]
    if as_json:
        shown = [entry.as_json() if name is None else entry.whole_as_json() for entry in entries]
        print_json({"kind": kind, "entries": shown, "unread": unread})
        return
    warn(unread)
    if name is None:
        _print_entries(listing, entries)
        return
    for entry in entries:
        whose = f" ({entry.origin_in_words})" if entry.origin_in_words else ""
        say(f"# {printable(entry.file.name)}{whose}, from {printable(str(entry.file.path))}")
        typer.echo(entry.text, nl=False)  # not by `say`: no terminal shall break the lines of a file


def _print_entries(listing: Listing, entries: tuple[Entry, ...]) -> None:
    """Print the table of all entries; the last column is cut where the terminal ends."""
    whose = any(entry.origin_in_words for entry in entries)
    prose = [key for key in listing.columns if key in _PROSE]
    keys = [key for key in listing.columns if key not in prose]
    heads = ["name", *(listing.columns[key] for key in keys), *(["whose"] if whose else [])]
    rows = [
        [
            printable(entry.file.name),
            *(_cell(key, entry.row[key]) for key in keys),
            *([printable(entry.origin_in_words)] if whose else []),
        ]
        for entry in entries
    ]
    width = shutil.get_terminal_size((160, 24)).columns
    if prose:
        used = sum(max(map(len, column)) + 2 for column in zip(heads, *rows, strict=True))
        heads.append(listing.columns[prose[0]])
        for row, entry in zip(rows, entries, strict=True):
            row.append(_cut(printable(str(entry.row[prose[0]])), max(width - used, 20)))
    words = {0, *([len(heads) - 1] if prose or whose else []), *([len(heads) - 1 - len(prose)] if whose else [])}
    words |= {at for at, key in enumerate(keys, 1) if any(isinstance(entry.row[key], str | list) for entry in entries)}
    print_table(heads, rows, left=sorted(words))


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return _cut(", ".join(_value(one) for one in value), 40)
    if isinstance(value, str):
        return value
    if key.endswith("parameters"):
        return f"{value / 1e9:,.1f}B"
    if key == "step_error":
        return f"{value:.0%}"
    return f"{value:,.4g}" if value < 1e4 and isinstance(value, float) else f"{value:,.0f}"


def _value(value: Any) -> str:
    """Return a value of a knob as studies write it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
