"""Precision of a trial's step time: the standard error of the median of its steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median_error(values: Sequence[float]) -> float:
    """Return the relative standard error of the median; infinite for fewer than three values.

    It is sqrt(pi / 2) = 1.2533 standard errors of the mean, and the standard deviation is estimated robustly as the
    interquartile range over 1.349; both factors hold for normal errors.
    """
    if len(values) < 3:
        return math.inf
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return 1.2533 * (upper - lower) / 1.349 / math.sqrt(len(values)) / middle
