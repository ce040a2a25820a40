"""The times at which memory can run out, and what nodes hold at them.

What nodes hold together grows only where one begins, and shrinks only where one ends: a time is worth a look if an end
follows it before the next begin. All others see a part of the nodes that such a time sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hardware.arrays import FloatArray, IntArray
from tuner.planners.assignment.problem import AssignmentProblem


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """The times, by their numbers from 0 on.

    Attributes:
        size: How many they are.
        first: The first time at which each node holds its memory [n].
        end: The first time after which it holds none; equal to `first` if it never counts [n].
    """

    size: int
    first: IntArray
    end: IntArray

    def held(self, by_node: FloatArray) -> FloatArray:
        """What nodes hold together at each time.

        Args:
            by_node: What each holds [n].
        """
        begun, ended = (np.bincount(when, by_node, self.size + 1)[: self.size] for when in (self.first, self.end))
        together: FloatArray = np.cumsum(np.asarray(begun - ended, dtype=np.float64))
        return together

    def paid(self, prices: FloatArray) -> FloatArray:
        """What each node pays for one unit of memory that it holds [n].

        Args:
            prices: Of one unit at each time [times].
        """
        total: FloatArray = np.concatenate([[0.0], np.cumsum(prices)])
        return total[self.end] - total[self.first]


def timeline_of(problem: AssignmentProblem) -> Timeline:
    """The times of a problem at which its nodes may hold more than the limit."""
    begins, ends = problem.intervals[:, 0], problem.intervals[:, 1]
    lasts = ends > begins
    times = np.unique(begins[lasts])
    sorted_ends = np.sort(ends[lasts])
    following = np.append(times[1:], np.iinfo(np.int64).max)
    is_peak = np.searchsorted(sorted_ends, following, "right") > np.searchsorted(sorted_ends, times, "right")
    peaks = times[is_peak]
    most = np.maximum.reduceat(problem.usages, problem.starts[:-1]) if problem.num_nodes else np.zeros(0)
    everywhere = _on(peaks, problem)
    return _on(peaks[everywhere.held(most) > problem.limit], problem)


def _on(times: IntArray, problem: AssignmentProblem) -> Timeline:
    begins, ends = problem.intervals[:, 0], problem.intervals[:, 1]
    first = np.searchsorted(times, begins, "left")
    end = np.searchsorted(times, np.maximum(begins, ends), "left")
    return Timeline(size=len(times), first=first, end=np.maximum(first, end))
