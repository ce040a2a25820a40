"""Numbers as people read them: with as many digits as are known. JSON has them all."""

from __future__ import annotations

PREDICTED_DIGITS, MEASURED_DIGITS = 3, 4
"""Significant digits of predictions, whose errors are 5 to 10% (docs/research/accuracy.md), and of measurements."""

NOT_MEASURED = ("predicted", "learned", "simulated")
"""Sources of figures that no trial has measured."""


def predicted(value: float) -> str:
    """Format a figure that the cost model, the simulator or the search predicts, such as `24.9` or `12,300`."""
    return _text(value, PREDICTED_DIGITS)


def measured(value: float) -> str:
    """Format a measured figure, such as `24.91`."""
    return _text(value, MEASURED_DIGITS)


def by_source(value: float, source: str) -> str:
    """Format a figure by its source, as the JSON of commands names it."""
    return predicted(value) if source in NOT_MEASURED else measured(value)


def rounded(value: float, digits: int) -> float:
    """Round a number to significant digits."""
    return float(f"{value:.{digits}g}")


def _text(value: float, digits: int) -> str:
    return f"{rounded(value, digits):,.15g}"
