"""Text of a script with the line of each part, and what is unknown of it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Text of one line; `unknown` says why it is none, and blanks don't split one that `is_whole`."""

    text: str
    line: int
    unknown: str = ""
    is_whole: bool = False


Text = tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One word of a command.

    Attributes:
        text: The word; what is unknown stands in it as the script has it.
        line: Where it stands.
        unknown: Why a part of it is unknown; empty where nothing is.
    """

    text: str
    line: int
    unknown: str = ""


def split_words(text: Text) -> list[Text]:
    """The words between the blanks of a text."""
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
            if share.isspace():
                is_open = False
                continue
            if not is_open:
                words.append([])
            words[-1].append(Piece(text=share, line=piece.line))
            is_open = True
    return [tuple(word) for word in words]


def argument_of(text: Text) -> Argument:
    """The word that a text is."""
    return Argument(
        text="".join(piece.text for piece in text),
        line=text[0].line if text else 0,
        unknown="; ".join(dict.fromkeys(piece.unknown for piece in text if piece.unknown)),
    )
