"""Amounts as polynomials of a micro-batch's sequences and their length."""

import numpy as np
import pytest

from costmodels.traced.amounts import NOTHING, ONE, TOKENS, Amount, constant, fitted

SHAPES = [(b, s) for b in (2, 3) for s in (256, 512, 768)] + [(5, 1024)]


@pytest.mark.parametrize(
    ("value", "coefficients"),
    [
        (lambda _b, _s: 7, (7, 0, 0, 0, 0, 0)),
        (lambda b, _s: 3 * b + 1, (1, 3, 0, 0, 0, 0)),
        (lambda _b, s: 4 * s, (0, 0, 4, 0, 0, 0)),
        (lambda b, s: b * s // 64, (0, 0, 0, 1 / 64, 0, 0)),
        (lambda b, s: b * s * (s + 1) // 2 + 5 * s * s, (0, 0, 0, 0.5, 5, 0.5)),
    ],
)
def test_a_polynomial_is_found_exactly(value, coefficients):
    """What grows as a polynomial in b and s, at most linear in b and quadratic in s, is found with its coefficients."""
    found = fitted(SHAPES, [value(b, s) for b, s in SHAPES])

    assert found == Amount(tuple(float(one) for one in coefficients))
    assert found.at(7, 8192) == value(7, 8192)


@pytest.mark.parametrize(
    "value", [lambda _b, s: s**3, lambda b, _s: b * b, lambda _b, s: min(s, 600), lambda _b, s: s // 500]
)
def test_what_is_no_polynomial_is_not_fitted(value):
    """The further shape must be met too, so a cube, a square of b, a limit and a step are told and not fitted."""
    assert fitted(SHAPES, [value(b, s) for b, s in SHAPES]) is None


def test_one_length_leaves_an_amount_linear_in_the_batch():
    """Where a model has one length, as of images, the fit uses the batches alone."""
    shapes = [(2, 197), (3, 197), (5, 197)]

    assert fitted(shapes, [2 * 197, 3 * 197, 5 * 197]) == Amount((0.0, 197.0, 0.0, 0.0, 0.0, 0.0))
    assert fitted(shapes, [4, 9, 25]) is None


def test_amounts_add_and_take_arrays():
    """Sums add coefficients, and an amount of many micro-batches is computed at once."""
    total = sum([ONE, TOKENS, constant(2)], start=NOTHING)

    assert total.at(np.array([1, 2]), np.array([10, 20])).tolist() == [13, 43]
