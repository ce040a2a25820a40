"""Draws of step times after trials, and what they tell of a step: its range, and the chance that it is slower.

A step that no trial has timed behaves like those that trials have, or something slows it down that the cost model does
not know. One interval of both would reach from the first to the slowest of the second, and say little of either. So the
range is that of the first, and the second is told by its probability.

Letters: m candidates, M draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodels.surrogates.uncertainty import SIGMA, WIDE
from hardware.arrays import FloatArray

STEP_RANGE, SLOWER = "step_time_range_s", "slower_probability"
"""Keys of the range of a step time, and of the probability that it is slower, in answers."""

NOTABLE = 0.05
"""Chance to be slower than the range from which on it is told: twice what a range of 95% leaves above by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """Range of one step time after trials.

    Attributes:
        low_s: Lower end of the range that holds it with a probability of 95%, if it behaves like those measured [s].
        high_s: Upper end of the range [s].
        log_error: Half-width of the 68% interval of its logarithm, on the same condition.
        slower_probability: Probability that it takes longer than `high_s`, without any condition.
    """

    low_s: float
    high_s: float
    log_error: float
    slower_probability: float

    def as_json(self) -> dict[str, Any]:
        """Return the range, and the chance to be slower, by their keys."""
        return {STEP_RANGE: [self.low_s, self.high_s], SLOWER: self.slower_probability}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepDraws:
    """Joint draws of the log step times of a few candidates.

    Attributes:
        log_step_s: Draws [M, m].
        log_regular_s: Draws as if nothing slowed an untried candidate down that the cost model does not know [M, m].
    """

    log_step_s: FloatArray
    log_regular_s: FloatArray

    def shifted(self, log_change: float) -> StepDraws:
        """Return the draws of steps that differ from these by a log factor."""
        return StepDraws(log_step_s=self.log_step_s + log_change, log_regular_s=self.log_regular_s + log_change)

    def ranges(self) -> list[StepRange]:
        """Return the range of each step time [m]."""
        wide, narrow = ((1 - covered) / 2 for covered in (WIDE, SIGMA))
        low, below, above, high = np.quantile(self.log_regular_s, [wide, narrow, 1 - narrow, 1 - wide], axis=0)
        slower = (self.log_step_s > high).mean(axis=0)
        rows = np.transpose([np.exp(low), np.exp(high), (above - below) / 2, slower]).tolist()
        return [
            StepRange(low_s=low_s, high_s=high_s, log_error=log_error, slower_probability=chance)
            for low_s, high_s, log_error, chance in rows
        ]


def chance_in_words(probability: float | None) -> str:
    """Return the chance that a step is slower than its range, for a table; empty unless it is notable."""
    return f"{probability:.0%}" if probability is not None and probability >= NOTABLE else ""


def slower_in_words(probability: float | None) -> str:
    """Return the same as a clause to be put behind the range."""
    chance = chance_in_words(probability)
    return chance and f" if it behaves like those measured; {chance} chance to be slower than that"


BEYOND = "beyond"
"""Head of the column of these chances."""

BEYOND_IN_WORDS = "chance to be slower than the 95% range, which is that of steps like those measured"
