"""Which option runs when: the best timeline over stretches of time, by dynamic programming.

An option is whatever can run in some stretches and not in others. Steps that an option makes add up over the stretches
in which it runs. Between two stretches it goes on for nothing, or ends at a price and another begins at a price, both
counted in steps. Both prices depend on the stretch and on one option each, so the best value of every option follows
from the best of all: the search is exact, and takes time proportional to stretches times options.

Letters: t stretches, o options.
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
    """What can run when, and what it makes.

    Attributes:
        runs: Whether an option can run in a stretch [t, o]; in every stretch some can.
        steps: The steps that it makes if it runs all of the stretch; 0 where it cannot [t, o].
        begin_steps: What it costs to begin it with this stretch [t, o]; the first stretch begins for nothing.
        end_steps: What it costs that it ran in the stretch before and does not in this one [t, o].
    """

    runs: NDArray[np.bool_]
    steps: FloatArray
    begin_steps: FloatArray
    end_steps: FloatArray

    def __post_init__(self) -> None:
        assert self.runs.any(axis=1).all(), "in every stretch some option can run"
        assert (self.begin_steps >= 0).all(), "to begin costs nothing at least"
        assert (self.end_steps >= 0).all(), "to end costs nothing at least"


def best_timeline(choices: Choices) -> tuple[int, ...]:
    """The options, one for each stretch [t], that make the most steps; of equals the one that switches least often."""
    count, options = choices.runs.shape
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
    timeline = [int(np.argmax(value))]
    for at in range(count - 1, 0, -1):
        timeline.append(int(before[at, timeline[-1]]))
    return tuple(reversed(timeline))


def unforeseen_timeline(choices: Choices, lengths_s: FloatArray) -> tuple[int, ...]:
    """The options, one for each stretch [t], of somebody who never knows what comes next.

    Each choice is the best if nothing happened any more until the end; of equals what runs already goes on.

    Args:
        choices: What can run when.
        lengths_s: How long each stretch is [t].
    """
    timeline: list[int] = []
    for at in range(len(lengths_s)):
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
    """The steps that a timeline makes in each stretch [t], less what the switch at its beginning costs."""
    assert all(choices.runs[at, option] for at, option in enumerate(timeline)), "a timeline holds what can run"
    made = np.array([choices.steps[at, option] for at, option in enumerate(timeline)])
    for at, (before, option) in enumerate(itertools.pairwise(timeline), start=1):
        if option != before:
            made[at] -= choices.end_steps[at, before] + choices.begin_steps[at, option]
    return made
