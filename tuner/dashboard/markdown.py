"""Text as the dashboard's notes take it: GitHub's Markdown, of which HTML is shown as it stands."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

_STEERING = re.compile(r"([\\`*_\[\]<>#!|~&])")

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

_GAP = "\N{EM SPACE}"
"""Keeps columns apart, which the dashboard draws with nothing between them."""

LINE = 96
"""Characters of a line of code; a longer one would make the whole page as wide as itself."""


def plain(text: str) -> str:
    """Text on one line that means nothing but itself."""
    return _STEERING.sub(r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """A few words of ours as code; they hold neither backticks nor bars."""
    return f"`{text}`"


def block(text: str) -> str:
    """Lines as code, whatever stands in them; long ones are broken, and a terminal's colours left out."""
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
    """Rows of cells that are Markdown already."""
    lines = [[f"{cell}{_GAP}" for cell in cells] for cells in (head, *rows)]
    lines.insert(1, [":---"] * len(head))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def paragraphs(*parts: str) -> str:
    """The parts that are not empty, one below the other."""
    return "\n\n".join(part for part in parts if part)
