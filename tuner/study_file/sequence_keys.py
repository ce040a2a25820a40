"""Keys of a study's `job.sequences`, and the reading of a file of lengths."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from costmodels.job.sequences import Sequences, histogram, pack_rows
from hardware.arrays import FloatArray, IntArray
from hardware.io.config_file import DocumentedModel
from hardware.io.errors import ConfigError
from hardware.io.input_file import read_input
from trials.trial_keys import PositiveInt

MAX_FILE_BYTES = 16_000_000
"""Largest file of lengths: two million sequences, a line each."""
MAX_LENGTH = 10**8
"""Largest length of a sequence, and largest count of sequences of one length in a file."""


class SequenceKeys(DocumentedModel):
    """`job.sequences`."""

    lengths: Annotated[list[PositiveInt], Field(min_length=1)] | str
    """Lengths of the sequences in tokens, or a CSV file of them. Its header is `length,count`, or `length` alone with a
    line for each sequence. Its path is relative to the study file.
    """

    shares: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)] | None = None
    """Share of the sequences that have each length, or their count: what counts is the ratio.

    Default: equal shares, or the file's counts
    """

    layout: Literal["packed", "padded"] = "packed"
    """Filling of micro-batches. `packed` sequences share rows of `sequence_length` tokens, and each attends to its own
    tokens only. `padded` ones are a row each, as long as the longest of their micro-batch.
    """

    order: Literal["shuffled", "balanced"] = "shuffled"
    """Order of packed rows: at random, or `balanced` by the framework, which deals the rows of a step so that replicas
    get alike ones.
    """

    per_step: PositiveInt | None = None
    """Sequences of an optimizer step, in place of `global_batch_size`. The packed rows that hold them follow, rounded
    by up to 3% to a number that divides well.

    Default: what `global_batch_size` or `global_batch_tokens` gives
    """


def read_sequences(keys: SequenceKeys, base_dir: Path) -> Sequences:
    """Return the histogram of the keys.

    Args:
        keys: Checked keys.
        base_dir: Folder to which the path of a file is relative.

    Raises:
        ConfigError: the file cannot be read, or the keys are no histogram.
    """
    if isinstance(keys.lengths, str):
        if keys.shares is not None:
            raise ConfigError("are in the file of lengths, as its counts", key="shares", nearest="leave shares out")
        lengths, counts = _read_lengths(base_dir / keys.lengths)
    else:
        shares = keys.shares or [1.0] * len(keys.lengths)
        if len(shares) != len(keys.lengths):
            rule = f"must be as many as the lengths, which are {len(keys.lengths)}"
            raise ConfigError(rule, key="shares", value=len(shares))
        lengths, counts = np.array(keys.lengths), np.array(shares, dtype=np.float64)
    if lengths.max() > MAX_LENGTH:
        raise ConfigError(f"must be at most {MAX_LENGTH:,} tokens", key="lengths", value=int(lengths.max()))
    return histogram(lengths, counts, layout=keys.layout, order=keys.order)


def _read_lengths(path: Path) -> tuple[IntArray, FloatArray]:
    """Read a CSV file of lengths and counts, or of lengths alone."""
    file = str(path)
    try:
        text = read_input(path, most_bytes=MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError("is no text in UTF-8", file=file) from None
    form = "the header is length,count, or length alone"
    lines = enumerate(text.splitlines(), start=1)
    header = [cell.strip() for cell in next(lines, (0, ""))[1].split(",")]
    if header not in (["length", "count"], ["length"]):
        raise ConfigError(
            "is no header of a file of lengths", key="line 1", value=",".join(header), nearest=form, file=file
        )
    rows: list[tuple[int, int]] = []
    for number, line in lines:
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            cells = [cell.strip() for cell in next(csv.reader([line], strict=True))]
        except csv.Error as error:
            raise ConfigError(f"is not valid CSV ({error})", file=place) from None
        if len(cells) != len(header):
            raise ConfigError(f"has {len(cells)} cells where the header has {len(header)}", file=place)
        length, count = (
            _whole(cell, name, place) for cell, name in zip((*cells, "1")[:2], ("length", "count"), strict=True)
        )
        rows.append((length, count))
    if not rows:
        raise ConfigError("holds no lengths", file=file, nearest=form)
    lengths, counts = np.array(rows).T
    return lengths, counts.astype(np.float64)


def _whole(text: str, name: str, place: str) -> int:
    least = 1 if name == "length" else 0
    if not text.isascii() or not text.isdigit() or not least <= int(text[:10]) <= MAX_LENGTH or len(text) > 9:
        raise ConfigError(f"must be a whole number from {least} to {MAX_LENGTH:,}", key=name, value=text, file=place)
    return int(text)


def rows_of_step(
    rows: int | None, *, tokens: int | None, per_step: int | None, sequence_length: int, sequences: Sequences | None
) -> int:
    """Return the rows of an optimizer step, of which one of three keys says how many there are.

    Args:
        rows: `global_batch_size`.
        tokens: `global_batch_tokens`.
        per_step: `sequences.per_step`.
        sequence_length: Tokens of a row.
        sequences: Sequences of varying length; None if all have `sequence_length` tokens.

    Raises:
        ConfigError: not exactly one of the keys is given, or the tokens are no whole number of rows.
    """
    given = {"global_batch_size": rows, "global_batch_tokens": tokens, "sequences.per_step": per_step}
    names = [name for name, value in given.items() if value is not None]
    if not names:
        raise ConfigError("is required and missing", key="global_batch_size", nearest="or give global_batch_tokens")
    if len(names) > 1:
        raise ConfigError(f"says the same as {names[0]}", key=names[1], value=given[names[1]], nearest="leave one out")
    if rows is not None:
        return rows
    is_padded = sequences is not None and not sequences.is_packed
    if tokens is not None:
        if is_padded:
            assert sequences is not None, "padded"
            return round_well(tokens / sequences.mean_length)
        if tokens % sequence_length:
            rule = f"must be a multiple of sequence_length={sequence_length}"
            nearest = str(max(round(tokens / sequence_length), 1) * sequence_length)
            raise ConfigError(rule, key="global_batch_tokens", value=tokens, nearest=nearest)
        return tokens // sequence_length
    assert sequences is not None, "per_step is a key of sequences"
    assert per_step is not None, "the third key"
    if is_padded:
        return per_step
    return round_well(per_step * sequences.mean_length / pack_rows(sequences, sequence_length).tokens.mean())


def round_well(number: float) -> int:
    """Round to a whole number of at least 1 that divides well: to a multiple of a power of two, by up to 3%."""
    step = 1
    while 32 * step <= number:
        step *= 2
    return max(round(number / step), 1) * step
