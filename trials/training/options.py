"""Options of measuring steps, which the backends that train by themselves share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions:
    """Options of measuring, which a study chooses and every process of a trial follows.

    Attributes:
        seed: Seed of weights and data.
        warmup_steps: Number of steps before the first measured one.
        min_steps: Smallest number of measured steps.
        max_steps: Largest number of measured steps.
        precision: Relative standard error of the median below which measuring ends.
    """

    seed: int = 0
    warmup_steps: int = 2
    min_steps: int = 5
    max_steps: int = 20
    precision: float = 0.02

    @property
    def fixed_steps(self) -> int | None:
        """Number of measured steps if it is fixed; None if it depends on the precision."""
        return self.max_steps if self.min_steps == self.max_steps else None

    def is_precise(self, seconds: Sequence[float]) -> bool:
        """Return whether the times of the steps so far are enough [s]."""
        return len(seconds) >= self.min_steps and median_error(seconds) <= self.precision


def median_error(values: Sequence[float]) -> float:
    """Return the relative standard error of the median; infinite for fewer than three values.

    It is sqrt(pi / 2) = 1.2533 standard errors of the mean, and the standard deviation is estimated robustly as the
    interquartile range over 1.349; both factors hold for normal errors.
    """
    if len(values) < 3:
        return math.inf
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return 1.2533 * (upper - lower) / 1.349 / math.sqrt(len(values)) / middle
