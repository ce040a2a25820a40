"""Tables of the commands: plain text for pipes and files, and with colour, fitted to its width, on a terminal.

rich draws them on a terminal only. It takes 40 ms to load, which a program that reads a pipe need not wait for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence

import typer

GAP = 2
"""Blanks between two columns."""

NARROWEST_TEXT = 24
"""Width down to which a column of words is broken over lines."""

MEANINGS = {
    "pp": "pipeline",
    "tp": "tensor",
    "dp": "data",
    "cp": "context",
    "up": "Ulysses",
    "vpp": "chunks per stage",
    "ep": "experts",
    "mbs": "micro-batch",
}
"""Meaning of each degree, in one or two words."""

BEST, CURRENT, WORSE = "green", "bold", "red"
"""Styles of rows: the best one, the current configuration, and one that does not run."""


def terminal_width() -> int | None:
    """Return the width of the terminal that stdout is, in characters; None where it is none."""
    return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[int] = (),
    spare: Sequence[str] = (),
    styles: Sequence[str] = (),
) -> tuple[str, ...]:
    """Print a table with columns aligned to the right, and those at the positions `left` to the left.

    Args:
        header: Heads of the columns.
        rows: Cells of each row.
        left: Positions of the columns that are aligned to the left; they are broken over lines on a narrow terminal.
        spare: Heads of the columns that a narrow terminal gets no room for, those first that matter least.
        styles: Style of each row on a terminal; empty for none.

    Returns:
        Heads of the columns that were left out.
    """
    columns = [[*column] for column in zip(header, *rows, strict=True)]
    room = terminal_width()
    is_left = [at in left for at in range(len(header))]
    if room is None:
        _print_plain(columns, is_left)
        return ()
    dropped = _without_room(columns, is_left, spare, room)
    shown = [at for at, head in enumerate(header) if head not in dropped]
    _print_rich([columns[at] for at in shown], [is_left[at] for at in shown], styles or [""] * len(rows), room)
    return dropped


def print_lines(lines: Sequence[str], styles: Mapping[int, str]) -> None:
    """Print lines of a table that is fitted already, with styles on a terminal.

    Args:
        lines: Lines, none of them broken.
        styles: Style of some lines by their positions.
    """
    if terminal_width() is None:
        typer.echo("\n".join(lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    for at, line in enumerate(lines):
        console.print(Text(line, style=styles.get(at, "")), soft_wrap=True)


def has_room_for(columns: Mapping[str, Sequence[str]]) -> bool:
    """Return whether stdout has room for columns, by their heads; a file always has."""
    room = terminal_width()
    return room is None or sum(GAP + _width([head, *cells]) for head, cells in columns.items()) - GAP <= room


def degrees_in_words(names: Collection[str]) -> str:
    """Return the meanings of those names that are degrees, on one line; empty without any."""
    return ", ".join(f"{name} {meaning}" for name, meaning in MEANINGS.items() if name in names)


def _without_room(
    columns: Sequence[Sequence[str]], is_left: Sequence[bool], spare: Sequence[str], room: int
) -> tuple[str, ...]:
    """Return the heads of the spare columns to leave out, so that the others fit into `room` if they can."""
    needed = {column[0]: GAP + _least(column, words) for column, words in zip(columns, is_left, strict=True)}
    dropped: list[str] = []
    for head in spare:
        if sum(needed.values()) - GAP <= room:
            break
        if needed.pop(head, None) is not None:
            dropped.append(head)
    return tuple(dropped)


def _width(column: Sequence[str]) -> int:
    return max(map(len, column))


def _least(column: Sequence[str], words: bool) -> int:
    """Return the least width of a column: words can be broken over lines, and numbers cannot."""
    return min(NARROWEST_TEXT, _width(column)) if words else _width(column)


def _print_plain(columns: Sequence[Sequence[str]], is_left: Sequence[bool]) -> None:
    padded = [
        [cell.ljust(_width(column)) if words else cell.rjust(_width(column)) for cell in column]
        for column, words in zip(columns, is_left, strict=True)
    ]
    for cells in zip(*padded, strict=True):
        line = (" " * GAP).join(cells)
        typer.echo(line.rstrip() if any(is_left) else line)


def _print_rich(columns: Sequence[Sequence[str]], is_left: Sequence[bool], styles: Sequence[str], room: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column, words in zip(columns, is_left, strict=True):
        table.add_column(
            Text(column[0]),
            justify="left" if words else "right",
            no_wrap=not words,
            overflow="fold",
            min_width=_least(column, words),
        )
    for cells, style in zip(zip(*(column[1:] for column in columns), strict=True), styles, strict=True):
        table.add_row(*map(Text, cells), style=style or None)
    # what is wider than the terminal runs on, as a number that is cut would be another one
    needed = sum(GAP + _least(column, words) for column, words in zip(columns, is_left, strict=True))
    console = Console(file=sys.stdout, highlight=False, width=max(room, needed))
    console.print(table)
