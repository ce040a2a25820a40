"""Sizes of vocabularies that the files of a tokenizer state, where a script names files that are on this machine.

The rows of a model's table are those of its config.json. A tokenizer alone has as many entries as its own file lists:
tokenizer.json (its vocabulary and the tokens added to it), a JSON mapping of tokens to numbers (GPT-2's vocab.json), or
the pieces of a SentencePiece model (sentencepiece/src/sentencepiece_model.proto: `repeated SentencePiece pieces = 1`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardware.io.config_file import parse_json, read_text
from hardware.io.errors import ConfigError
from hardware.io.input_file import read_input

MOST_BYTES = 64_000_000
"""Limit on the size of a tokenizer's file [bytes]; those of 262,144 entries have 33 MB."""

_PIECES = 1
"""Number of the field that holds the pieces in a SentencePiece model."""


def rows_of_files(path: str) -> tuple[int, Path] | None:
    """Return the vocabulary that files at a path state, and the file; None if none of them is here or states one.

    The path is a folder of a model or a tokenizer, or a tokenizer's file.
    """
    try:
        place = Path(path)
        places = _candidates(place) if place.exists() else []
        readable = [one for one in places if one.is_file()]
    except (OSError, ValueError):  # it may be any text of a script
        return None
    found = ((_rows_of(file), file) for file in readable)
    return next(((rows, file) for rows, file in found if rows), None)


def _candidates(place: Path) -> list[Path]:
    """Return the files that may state the size, the most telling first."""
    if place.is_dir():
        return [place / name for name in ("config.json", "tokenizer.json", "tokenizer.model", "vocab.json")]
    beside = [place.parent / "config.json"] if place.name in ("tokenizer.json", "tokenizer.model", "vocab.json") else []
    return [*beside, place]


def _rows_of(file: Path) -> int | None:
    try:
        if file.suffix == ".model":
            return _num_pieces(read_input(file, most_bytes=MOST_BYTES))
        loaded = parse_json(read_text(file, most_bytes=MOST_BYTES)) if file.suffix == ".json" else None
    except ConfigError:
        return None
    if not isinstance(loaded, dict):
        return None
    if file.name == "config.json":
        return _stated(loaded)
    if file.name == "tokenizer.json":
        return _num_entries(loaded)
    # a mapping of tokens to their numbers
    return len(loaded) if all(isinstance(number, int) for number in loaded.values()) else None


def _stated(config: dict[str, Any]) -> int | None:
    """Return the `vocab_size` of a config.json, or of the language model in one of a multimodal model."""
    inner = config.get("text_config")
    sizes = (config.get("vocab_size"), inner.get("vocab_size") if isinstance(inner, dict) else None)
    return next((size for size in sizes if type(size) is int and size > 0), None)


def _num_entries(tokenizer: dict[str, Any]) -> int | None:
    """Return the number of entries of a tokenizer.json: one more than the highest number."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        numbers = [number for number in vocabulary.values() if type(number) is int]
    elif isinstance(vocabulary, list):  # Unigram: pairs of a piece and its score
        numbers = [len(vocabulary) - 1]
    else:
        return None
    entries = added if isinstance(added, list) else []
    numbers += [one["id"] for one in entries if isinstance(one, dict) and type(one.get("id")) is int]
    return max(numbers, default=-1) + 1 or None


def _num_pieces(data: bytes) -> int | None:
    """Return the number of pieces of a SentencePiece model; None if the bytes are no such message."""
    try:
        return sum(field == _PIECES for field in _fields(data)) or None
    except (IndexError, ValueError):
        return None


def _fields(data: bytes) -> Iterator[int]:
    """Yield the numbers of the fields of a protobuf message, in their order.

    Source: protobuf.dev/programming-guides/encoding (tags, wire types, varints).

    Raises:
        IndexError: The message is cut off.
        ValueError: It is no message.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    while at < len(data):
        field, kind = divmod(varint(), 8)
        if kind == 0:
            varint()
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            size = varint()
            at += size
        else:
            raise ValueError("an unknown kind of field")
        if at > len(data):
            raise IndexError("a field is cut off")
        yield field
