"""Amounts that grow with a micro-batch: exact polynomials in its sequences and their length.

Letters: b = sequences of a micro-batch, s = tokens of a sequence. An amount is a sum over b^i s^j with i <= 1, j <= 2:
the rows of a product grow with b * s, the entries of attention's scores with b * s^2, a weight with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce

import numpy as np
from numpy.typing import NDArray

POWERS = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))
"""Exponents (i, j) of b^i s^j for each coefficient of an amount."""

NUM_LENGTHS = 3
NUM_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Amount:
    """A polynomial in b and s, with one coefficient for each entry of `POWERS`."""

    coefficients: tuple[float, float, float, float, float, float]

    def at(self, b: float | NDArray[np.float64], s: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the amount of b sequences of s tokens, in the shape of b and s together."""
        b, s = np.asarray(b, np.float64), np.asarray(s, np.float64)
        terms = (c * b**i * s**j for c, (i, j) in zip(self.coefficients, POWERS, strict=True) if c)
        return reduce(np.add, terms, np.zeros(np.broadcast(b, s).shape))

    def __add__(self, other: Amount) -> Amount:
        first, second = self.coefficients, other.coefficients
        return _amount([one + two for one, two in zip(first, second, strict=True)])


def constant(value: float) -> Amount:
    """Return an amount that does not grow."""
    return Amount((float(value), 0.0, 0.0, 0.0, 0.0, 0.0))


def per_token(value: float) -> Amount:
    """Return an amount that each token of a micro-batch adds."""
    return Amount((0.0, 0.0, 0.0, float(value), 0.0, 0.0))


NOTHING = constant(0)
ONE = constant(1)
TOKENS = per_token(1)
"""Tokens of a micro-batch, b * s."""


def fitted(shapes: Sequence[tuple[int, int]], values: Sequence[int]) -> Amount | None:
    """Return the amount that takes each of the values at its shape (b, s), or None where no polynomial does.

    The shapes are two batches times three lengths in any order, which fix the polynomial, and further ones, which it
    must meet exactly; or shapes of one length only, where the amount is linear in b.
    """
    if len(set(values)) == 1:
        return constant(values[0])
    batches, lengths = sorted({b for b, _ in shapes})[:NUM_BATCHES], sorted({s for _, s in shapes})
    at = dict(zip(shapes, values, strict=True))
    if len(lengths) == 1:
        first, second = (at[batch, lengths[0]] for batch in batches)
        slope = Fraction(second - first, batches[1] - batches[0])
        terms = [first - slope * batches[0], slope, *([Fraction(0)] * 4)]
    else:
        lengths = lengths[:NUM_LENGTHS]
        one, two = ([at[batch, length] for length in lengths] for batch in batches)
        step = batches[1] - batches[0]
        by_length = _parabola(lengths, [Fraction(second - first, step) for first, second in zip(one, two, strict=True)])
        alone = _parabola(
            lengths,
            [first - batches[0] * Fraction(second - first, step) for first, second in zip(one, two, strict=True)],
        )
        terms = [alone[0], by_length[0], alone[1], by_length[1], alone[2], by_length[2]]
    exact = all(
        sum(term * b**i * s**j for term, (i, j) in zip(terms, POWERS, strict=True)) == value
        for (b, s), value in at.items()
    )
    return _amount([float(term) for term in terms]) if exact else None


def _parabola(x: Sequence[int], y: Sequence[Fraction | int]) -> list[Fraction]:
    """Return the coefficients of the parabola through three points, by divided differences."""
    first = Fraction(y[1] - y[0]) / (x[1] - x[0])
    second = Fraction(y[2] - y[1]) / (x[2] - x[1])
    bend = (second - first) / (x[2] - x[0])
    return [y[0] - first * x[0] + bend * x[0] * x[1], first - bend * (x[0] + x[1]), bend]


def _amount(terms: Sequence[float]) -> Amount:
    one, b, s, bs, ss, bss = terms
    return Amount((one, b, s, bs, ss, bss))
