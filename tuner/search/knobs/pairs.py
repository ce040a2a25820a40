"""Pairs of a layout and the values of knobs that were tried or are worth a trial, numbered in the order of their entry.

A pair's number stands for it as a candidate's position does in a search without knobs. Nothing enumerates all pairs.
"""

from __future__ import annotations

import numpy as np

from hardware.arrays import IntArray

Pair = tuple[int, tuple[int, ...]]
"""Position of a layout, and the positions of the knobs' values."""


class PairTable:
    """Table of pairs, which only grows."""

    def __init__(self, num_knobs: int) -> None:
        self._num_knobs = num_knobs
        self._numbers: dict[Pair, int] = {}
        self._arrays: tuple[IntArray, IntArray] | None = None

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._numbers)

    def number_of(self, pair: Pair) -> int:
        """Return the number of a pair, which enters the table if it is new."""
        if pair not in self._numbers:
            self._arrays = None
        return self._numbers.setdefault(pair, len(self._numbers))

    @property
    def layouts(self) -> IntArray:
        """Position of each pair's layout [p]."""
        return self._columns()[0]

    @property
    def codes(self) -> IntArray:
        """Positions of the knobs' values of each pair [p, j]."""
        return self._columns()[1]

    def _columns(self) -> tuple[IntArray, IntArray]:
        if self._arrays is None:
            layouts = np.array([layout for layout, _ in self._numbers], dtype=np.int64)
            codes = np.array([codes for _, codes in self._numbers], dtype=np.int64)
            self._arrays = layouts, codes.reshape(len(layouts), self._num_knobs)
        return self._arrays
