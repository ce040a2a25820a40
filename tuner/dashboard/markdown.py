"""Markdown of the dashboard's notes: GitHub's, without HTML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

_STEERING = re.compile(r"([\\`*_\[\]<>#!|~&])")
"""Characters with a meaning in Markdown, which are escaped."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Escape sequences of terminal colours."""

_GAP = "\N{EM SPACE}"
"""Space between columns, since the dashboard draws them without any."""

LINE = 96
"""Number of characters of a line of code; longer lines would widen the whole page."""


def plain(text: str) -> str:
    """Escape text so that Markdown shows it literally, on one line."""
    return _STEERING.sub(r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """Format words of ours as code; they must not contain backticks or bars."""
    return f"`{text}`"


def block(text: str) -> str:
    """Format any lines as a code block; long lines are wrapped, and terminal colours are removed."""
    text = _COLOURS.sub("", text)
    lines = [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, LINE, replace_whitespace=False, drop_whitespace=False) or [""]
    ]
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}text", *lines, fence])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells, which are Markdown already, as a table."""
    lines = [[f"{cell}{_GAP}" for cell in cells] for cells in (head, *rows)]
    lines.insert(1, [":---"] * len(head))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def paragraphs(*parts: str) -> str:
    """Join the non-empty parts with blank lines."""
    return "\n\n".join(part for part in parts if part)
