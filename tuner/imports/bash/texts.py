"""Text of a script, in which every part has its line number and the reason if it is unknown."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Part of a text from one line of the script, or a whole word of a command.

    Attributes:
        text: Known text; expansions that are unknown appear as in the script.
        line: Line number in the script.
        unknown: Reasons why parts of the value are unknown; empty if all is known.
        is_whole: Whether blanks in the piece do not split words, because it was quoted.
        otherwise: Words of which an unknown piece holds some or none; None if it may hold anything.
    """

    text: str
    line: int
    unknown: str = ""
    is_whole: bool = False
    otherwise: str | None = None


Argument = Piece
"""Word of a command."""

Text = tuple[Piece, ...]


def split_words(text: Text) -> list[Text]:
    """Split a text into words at its blanks. Blanks in unknown and in quoted pieces do not split."""
    words: list[list[Piece]] = []
    is_open = False
    for piece in text:
        protects = piece.unknown or piece.is_whole
        for share in [piece.text] if protects else filter(None, re.split(r"(\s+)", piece.text)):
            # A blank ends the word, so that the next piece does not continue it.
            if share.isspace() and not protects:
                is_open = False
                continue
            if not is_open:
                words.append([])
            words[-1].append(replace(piece, text=share))
            is_open = True
    return [tuple(word) for word in words]


def argument_of(text: Text) -> Argument:
    """Join the pieces of a text into one word."""
    held = [piece.otherwise if piece.unknown else piece.text for piece in text]
    return Argument(
        text="".join(piece.text for piece in text),
        line=text[0].line if text else 0,
        unknown="; ".join(dict.fromkeys(piece.unknown for piece in text if piece.unknown)),
        otherwise=None if None in held else "".join(filter(None, held)),
    )
