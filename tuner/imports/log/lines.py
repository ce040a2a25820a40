"""Lines of a log without what launchers and loggers put before and into them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO

LONGEST_LINE = 200_000
"""Number of characters that are read of a line: a configuration may be printed on one."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK = re.compile(r"\s*(?:\[(?:default|rank)?[0-9]{1,6}\]:?|[0-9]{1,6}:)[ ]?")
"""Rank before a line: `[default0]:` and `[rank0]:` of torchrun, `12: ` of srun and `[0]` of mpirun."""

_LOGGER = re.compile(
    r"""(?:
        \[NeMo\ [A-Z]\ [^\]]*\]\ ?                                              # NeMo
      | [0-9/]{10}\ [0-9:]{8}\ \[[A-Z]+\|[^\]]*\]:\ ?                           # nanotron
      | (?:\[titan\]\ )?[0-9-]{10}\ [0-9:,]{8,12}\ -\ \S+\ -\ [A-Z]+\ -\ ?       # torchtitan
      | \[[0-9-]{10}\ [0-9:,]{8,12}\]\ \[[A-Z]+\]\ \[[^\]]*\]\ ?                # DeepSpeed
      | [0-9]{4}-[0-9]{2}-[0-9]{2}[T\ ][0-9:.,]{8,18}(?:Z|[+-][0-9:]{4,6})?\ ?  # containers
    )""",
    re.VERBOSE,
)
"""Date, level and place that a logger writes before the first line of a message."""


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a log.

    Attributes:
        number: Number of the line, from 1.
        rank: Rank prefix of the line, or empty.
        text: Line without its rank prefix and colours.
    """

    number: int
    rank: str
    text: str

    @property
    def message(self) -> str:
        """Text without the logger's date, level and place."""
        text = self.text
        while (found := _LOGGER.match(text)) is not None and found.end():
            text = text[found.end() :]
        return text


def lines_of(stream: TextIO | Iterable[str], *, most_characters: int) -> Iterator[Line]:
    """Yield the lines of a log, as long as no more than `most_characters` have been read.

    The rest of a line beyond LONGEST_LINE is skipped, and a progress bar's carriage returns end a line.
    """
    read = number = 0
    skips = False
    for piece in _pieces(stream):
        read += len(piece)
        if not skips:
            number += 1
            yield _line_of(number, piece.rstrip("\r\n"))
        skips = len(piece) >= LONGEST_LINE and not piece.endswith(("\n", "\r"))
        if read >= most_characters:
            return


def _pieces(stream: TextIO | Iterable[str]) -> Iterator[str]:
    if not hasattr(stream, "readline"):
        yield from stream
        return
    while piece := stream.readline(LONGEST_LINE):
        yield piece


def _line_of(number: int, text: str) -> Line:
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    rank = _RANK.match(text)
    return Line(number, "", text) if rank is None else Line(number, rank[0].strip(), text[rank.end() :])
