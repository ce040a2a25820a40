"""Choice of the option that runs in each time interval: the best timeline, by dynamic programming.

An option can run in some intervals and not in others. The steps of an option add up over the intervals in which it
runs. Between two intervals an option continues for free, or it ends at a price and another begins at a price. Both
prices are counted in steps, and each depends on the interval and one option only. The best value of every option
therefore follows from the best value over all options: the search is exact, and its time is proportional to intervals
times options.

Letters: t intervals, o options.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choices:
    """Options of every interval, with their steps and prices.

    Attributes:
        runs: Whether an option can run in an interval [t, o]; every interval has at least one.
        steps: Steps that an option makes if it runs during the whole interval; 0 if it cannot run [t, o].
        begin_steps: Price in steps of beginning an option with this interval [t, o]; free in the first interval.
        end_steps: Price in steps of ending an option that ran in the previous interval [t, o].
    """

    runs: NDArray[np.bool_]
    steps: FloatArray
    begin_steps: FloatArray
    end_steps: FloatArray

    def __post_init__(self) -> None:
        assert self.runs.any(axis=1).all(), "some option can run in every interval"
        assert (self.begin_steps >= 0).all(), "the price of beginning is not negative"
        assert (self.end_steps >= 0).all(), "the price of ending is not negative"


def best_timeline(choices: Choices) -> tuple[int, ...]:
    """Find the option of each interval [t] that maximises the steps; among equals, with the fewest changes."""
    count, options = choices.runs.shape
    # value[o]: most steps until the end of interval `at` if option o runs in it. The best predecessor of a change is
    # the same for all options, since the price of ending does not depend on the option that follows.
    value = np.where(choices.runs[0], choices.steps[0], -np.inf)
    before = np.tile(np.arange(options), (count, 1))
    for at in range(1, count):
        left = value - choices.end_steps[at]
        best = int(np.argmax(left))
        anew = left[best] - choices.begin_steps[at]
        switches = ~choices.runs[at - 1] | (anew > value)
        before[at, switches] = best
        value = np.where(switches, anew, value) + choices.steps[at]
        value[~choices.runs[at]] = -np.inf
    # Follow the predecessors back from the best last option.
    timeline = [int(np.argmax(value))]
    for at in range(count - 1, 0, -1):
        timeline.append(int(before[at, timeline[-1]]))
    return tuple(reversed(timeline))


def unforeseen_timeline(choices: Choices, lengths_s: FloatArray) -> tuple[int, ...]:
    """Choose the option of each interval [t] without knowledge of later events.

    Each choice is the best one if nothing happened until the end; among equals the running option continues.

    Args:
        choices: Options of every interval.
        lengths_s: Length of each interval [t] [s].
    """
    timeline: list[int] = []
    for at in range(len(lengths_s)):
        # Extrapolate the present speed of every option to the end, since no later event is known.
        value = choices.steps[at] / lengths_s[at] * lengths_s[at:].sum()
        if timeline:
            before = timeline[-1]
            costs = choices.begin_steps[at] + choices.end_steps[at, before]
            costs[before] = 0.0
            value = value - costs
        value[~choices.runs[at]] = -np.inf
        best = int(np.argmax(value))
        goes_on = timeline and choices.runs[at, timeline[-1]] and value[timeline[-1]] >= value[best]
        timeline.append(timeline[-1] if goes_on else best)
    return tuple(timeline)


def steps_of(choices: Choices, timeline: Sequence[int]) -> FloatArray:
    """Compute the steps that a timeline makes in each interval [t], minus the price of the change at its beginning."""
    assert all(choices.runs[at, option] for at, option in enumerate(timeline)), (
        "a timeline holds only options that can run"
    )
    made = np.array([choices.steps[at, option] for at, option in enumerate(timeline)])
    for at, (before, option) in enumerate(itertools.pairwise(timeline), start=1):
        if option != before:
            made[at] -= choices.end_steps[at, before] + choices.begin_steps[at, option]
    return made
