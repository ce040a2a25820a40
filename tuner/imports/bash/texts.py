"""Text of a script, in which every part has its line number and the reason if it is unknown."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Part of a text from one line of the script.

    Attributes:
        text: Text of the part; the source text of the expansion if the part is unknown.
        line: Line number in the script.
        unknown: Reason why the value is unknown; empty if it is known.
        is_whole: Whether blanks in the part do not split words, because it was quoted.
        otherwise: Text that the part has unless it is empty, if it is unknown for no other reason; else empty.
    """

    text: str
    line: int
    unknown: str = ""
    is_whole: bool = False
    otherwise: str = ""


Text = tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """Word of a command.

    Attributes:
        text: Text of the word; unknown parts appear as in the script.
        line: Line number of the word.
        unknown: Reasons why parts of the word are unknown; empty if the whole word is known.
        otherwise: Text that the word has unless it is absent, if that is all that is unknown of it; else empty.
    """

    text: str
    line: int
    unknown: str = ""
    otherwise: str = ""


def split_words(text: Text) -> list[Text]:
    """Split a text into words at its blanks. Blanks in unknown and in quoted pieces do not split."""
    words: list[list[Piece]] = []
    is_open = False
    for piece in text:
        if piece.unknown or piece.is_whole:
            if not is_open:
                words.append([])
            words[-1].append(piece)
            is_open = True
            continue
        for share in re.split(r"(\s+)", piece.text):
            if not share:
                continue
            # A blank ends the word, so that the next piece does not continue it.
            if share.isspace():
                is_open = False
                continue
            if not is_open:
                words.append([])
            words[-1].append(Piece(text=share, line=piece.line))
            is_open = True
    return [tuple(word) for word in words]


def argument_of(text: Text) -> Argument:
    """Join the pieces of a text into one word."""
    return Argument(
        text="".join(piece.text for piece in text),
        line=text[0].line if text else 0,
        unknown="; ".join(dict.fromkeys(piece.unknown for piece in text if piece.unknown)),
        otherwise=" ".join(piece.otherwise for piece in text) if text and all(one.otherwise for one in text) else "",
    )
