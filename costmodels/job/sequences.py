"""Sequences of varying length: a histogram of their lengths, and the way in which they fill micro-batches.

Packed sequences share rows of the job's `sequence_length` tokens, and attend to their own tokens only (block-diagonal
causal attention: Krell et al. 2021, arXiv 2107.02027; NVIDIA NeMo user guide, sequence packing). So the attention of a
row costs the sum of the squares of its sequences' lengths. Padded sequences are a row each, as long as the longest one
of their micro-batch.

Letters: l lengths of the histogram, n numbers of sequences, r rows, d sequences in rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hardware.arrays import FloatArray, IntArray
from hardware.io.errors import ConfigError, did_you_mean

LAYOUTS = ("packed", "padded")
"""Ways in which sequences fill micro-batches."""
ORDERS = ("shuffled", "balanced")
"""Orders in which rows come: at random, or dealt so that replicas get alike ones."""

MOST_LENGTHS = 1024
"""Number of distinct lengths that a histogram has; lengths of data are put together in bins if there are more."""

_DRAWN = 2**17
"""Sequences that are drawn to fill rows."""
_MOST_STREAMS, _LEAST_STREAMS = 256, 8
"""Numbers of packings that run side by side, each on a share of the sequences."""
_OPEN_ROWS = 8
"""Rows of a packing that are open at a time; frameworks keep more of them and fill rows a little better."""
_ROWS_OF_STREAM = 64
"""Rows that a packing should fill, so that those that are open at its end do not matter."""
_SEED = 20240731


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Histogram of the lengths of sequences, and the way in which they fill micro-batches.

    Attributes:
        lengths: Lengths in tokens, ascending [l].
        shares: Share of the sequences that have each length; they sum to 1 [l].
        layout: One of LAYOUTS.
        order: One of ORDERS.
    """

    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    layout: str = "packed"
    order: str = "shuffled"

    def __post_init__(self) -> None:
        """Refuse what is no histogram."""
        if not self.lengths or len(self.lengths) > MOST_LENGTHS:
            raise ConfigError(f"must have 1 to {MOST_LENGTHS:,} lengths", key="lengths", value=len(self.lengths))
        for before, length in zip((0, *self.lengths), self.lengths, strict=False):
            if type(length) is not int or length <= before:
                rule = "must be whole numbers of at least 1 that ascend"
                raise ConfigError(rule, key="lengths", value=length)
        if len(self.shares) != len(self.lengths):
            rule = f"must be as many as the lengths, which are {len(self.lengths)}"
            raise ConfigError(rule, key="shares", value=len(self.shares))
        for share in self.shares:
            if not 0 < share <= 1:
                raise ConfigError("must be above 0 and at most 1", key="shares", value=share)
        if abs(sum(self.shares) - 1) > 1e-6:
            raise ConfigError("must sum to 1", key="shares", value=sum(self.shares))
        for key, value, known in (("layout", self.layout, LAYOUTS), ("order", self.order, ORDERS)):
            if value not in known:
                raise ConfigError("is not known", key=key, value=value, nearest=did_you_mean(value, known))
        if self.order == "balanced" and not self.is_packed:
            raise ConfigError("needs packed sequences", key="order", value=self.order, nearest="layout: packed")

    @property
    def is_packed(self) -> bool:
        """Whether sequences share rows."""
        return self.layout == "packed"

    @property
    def longest(self) -> int:
        """Length of the longest sequence [tokens]."""
        return self.lengths[-1]

    @property
    def mean_length(self) -> float:
        """Mean length of the sequences [tokens]."""
        return sum(share * length for length, share in zip(self.lengths, self.shares, strict=True))

    @property
    def attended_length(self) -> float:
        """Mean length of the sequence in which a token stands: E[length^2] / E[length] [tokens].

        Attention costs every token in proportion to it, so it is the length for which attention is priced.
        """
        squares = sum(share * length * length for length, share in zip(self.lengths, self.shares, strict=True))
        return squares / self.mean_length

    def mean_longest(self, number: IntArray, *, power: int = 1) -> FloatArray:
        """Return the expected power of the length of the longest of `number` sequences drawn at random [n].

        The largest of n draws is at most a length with the n-th power of the share of sequences that are not longer.
        """
        below = np.cumsum(self.shares)
        below[-1] = 1.0  # a sum of shares may miss it by rounding
        at_most = below ** np.asarray(number)[..., None]
        chances = np.diff(at_most, axis=-1, prepend=0.0)
        return np.asarray(chances @ np.array(self.lengths, dtype=np.float64) ** power)


def check_rows(sequences: Sequences, row_tokens: int) -> None:
    """Refuse sequences that do not fit in a row, or of which a row holds more than are drawn to fill rows."""
    if sequences.longest > row_tokens:
        raise ConfigError(
            f"has a sequence of {sequences.longest} tokens, more than sequence_length={row_tokens}",
            key="sequences.lengths",
            nearest=f"a sequence_length of at least {sequences.longest}, or lengths cut to {row_tokens}",
        )
    most = _DRAWN // 2
    if sequences.is_packed and row_tokens > most * sequences.mean_length:
        raise ConfigError(
            f"makes rows of more than {most:,} sequences",
            key="sequence_length",
            value=row_tokens,
            nearest=f"at most {int(most * sequences.mean_length)}",
        )


def histogram(lengths: IntArray, counts: FloatArray, *, layout: str, order: str) -> Sequences:
    """Build the histogram of lengths with their counts, in any order; equal lengths are added up.

    More than MOST_LENGTHS of them are put together in as many bins of equal ratio, each with its mean as length.

    Raises:
        ConfigError: they are no histogram.
    """
    if not np.isfinite(counts).all() or (counts < 0).any() or not counts.sum() > 0:
        raise ConfigError("must be numbers of at least 0, and not all of them 0", key="counts")
    distinct, row = np.unique(lengths, return_inverse=True)
    total = np.bincount(row, weights=counts).astype(np.float64)
    if len(distinct) > MOST_LENGTHS:
        width = np.log(distinct[-1] / distinct[0]) / MOST_LENGTHS
        binned = np.minimum(np.log(distinct / distinct[0]) / width, MOST_LENGTHS - 1).astype(np.int64)
        of_bin = np.bincount(binned, weights=total).astype(np.float64)
        means = np.bincount(binned, weights=total * distinct)[of_bin > 0] / of_bin[of_bin > 0]
        return histogram(np.rint(means).astype(np.int64), of_bin[of_bin > 0], layout=layout, order=order)
    distinct, shares = distinct[total > 0], total[total > 0] / total.sum()
    return Sequences(lengths=tuple(distinct.tolist()), shares=tuple(shares.tolist()), layout=layout, order=order)


def sample_lengths(sequences: Sequences) -> IntArray:
    """Return the lengths of _DRAWN sequences, each length as often as the histogram says, ascending."""
    # each length gets the whole part of its expected number, and those with the largest remainders one more
    expected = np.array(sequences.shares) * _DRAWN
    counts = np.floor(expected).astype(np.int64)
    counts[np.argsort(counts - expected, kind="stable")[: max(_DRAWN - int(counts.sum()), 0)]] += 1
    return np.repeat(np.array(sequences.lengths), counts)[:_DRAWN]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """Rows into which sequences of a histogram are packed.

    Attributes:
        length: Length of each sequence, row by row [d].
        row: Row of each sequence, ascending [d].
        tokens: Tokens of the sequences in each row [r].
        squares: Sum of the squares of their lengths [r].
    """

    length: IntArray
    row: IntArray
    tokens: FloatArray
    squares: FloatArray


@lru_cache(maxsize=32)
def pack_rows(sequences: Sequences, row_tokens: int) -> PackedRows:
    """Pack a sample of sequences into rows of so many tokens, as a framework does that shuffles them first.

    A sequence goes to the first open row with room for it (first fit: NVIDIA NeMo, nlp/data/language_modeling/megatron
    and `packing_algorithm: first_fit_shuffle`). If there is none, the fullest row is closed. The sample has each length
    as often as the histogram says, in an order from a fixed seed: equal jobs get equal rows.

    Args:
        sequences: Histogram, no longer than a row.
        row_tokens: Tokens of a row.
    """
    drawn = np.random.default_rng(_SEED).permutation(sample_lengths(sequences))
    wanted = _DRAWN * sequences.mean_length / row_tokens / _ROWS_OF_STREAM
    if wanted < 1:
        # rows of thousands of sequences are full whatever the order: they are cut out of the stream
        row = np.cumsum(drawn) // row_tokens
        return _sort_rows(drawn[:, None], row[:, None], np.arange(row[-1] + 1)[None] < row[-1])
    num_streams = 2 ** int(np.clip(np.log2(max(wanted, 1)), np.log2(_LEAST_STREAMS), np.log2(_MOST_STREAMS)))
    drawn = drawn.reshape(-1, num_streams)
    streams = np.arange(num_streams)
    free = np.full((num_streams, _OPEN_ROWS), row_tokens)
    # rows of a stream are numbered in the order in which they are opened
    number = np.tile(np.arange(_OPEN_ROWS), (num_streams, 1))
    opened, row = np.full(num_streams, _OPEN_ROWS), np.empty_like(drawn)
    is_done = np.zeros((num_streams, _OPEN_ROWS + len(drawn)), dtype=np.bool_)
    for at, lengths in enumerate(drawn):
        fits = free >= lengths[:, None]
        has_room = fits.any(axis=1)
        slot = np.where(has_room, fits.argmax(axis=1), free.argmin(axis=1))
        closing, closed = streams[~has_room], slot[~has_room]
        is_done[closing, number[closing, closed]] = True
        number[closing, closed] = opened[closing]
        free[closing, closed] = row_tokens
        opened[closing] += 1
        free[streams, slot] -= lengths
        row[at] = number[streams, slot]
    # rows that are still open count where no sequence fits in any more
    is_full = free < sequences.lengths[0]
    if not is_done.any() and not is_full.any():
        is_full = free <= row_tokens // 2
    stream, slot = np.nonzero(is_full)
    is_done[stream, number[stream, slot]] = True
    return _sort_rows(drawn, row, is_done)


def _sort_rows(drawn: IntArray, row: IntArray, is_done: NDArray[np.bool_]) -> PackedRows:
    """Sort packed sequences by rows, and leave out the rows that are not done.

    Args:
        drawn: Lengths of sequences in the order in which each stream packs them [n, streams].
        row: Number of the row of its stream that each sequence is in [n, streams].
        is_done: Whether each row of each stream is done [streams, rows].
    """
    whole = np.arange(len(is_done)) * is_done.shape[1] + row
    order = np.argsort(whole.ravel(), kind="stable")
    order = order[is_done.ravel()[whole.ravel()[order]]]
    length = drawn.ravel()[order]
    _, rank = np.unique(whole.ravel()[order], return_inverse=True)
    return PackedRows(
        length=length,
        row=rank,
        tokens=np.bincount(rank, weights=length).astype(np.float64),
        squares=np.bincount(rank, weights=length.astype(np.float64) ** 2).astype(np.float64),
    )
