"""Times at which memory can run out, and the memory in use at these times.

The memory in use grows only as the interval of a node begins, and shrinks only as one ends. Only a begin that is
followed by an end before the next begin can be a peak. At all other times, a part of the nodes of such a peak hold
memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hardware.arrays import FloatArray, IntArray
from tuner.planners.assignment.problem import AssignmentProblem


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Times numbered from 0 on.

    Attributes:
        size: Number of times.
        first: Number of the time from which on each node holds its memory [n].
        end: Number of the first time after that; equal to `first` if the node holds memory at none of the times [n].
    """

    size: int
    first: IntArray
    end: IntArray

    def held(self, by_node: FloatArray) -> FloatArray:
        """Return the memory that all nodes hold together at each time [times].

        Args:
            by_node: Memory that each node holds [n].
        """
        begun, ended = (np.bincount(when, by_node, self.size + 1)[: self.size] for when in (self.first, self.end))
        together: FloatArray = np.cumsum(np.asarray(begun - ended, dtype=np.float64))
        return together

    def paid(self, prices: FloatArray) -> FloatArray:
        """Return the price that each node pays for one unit of memory [n].

        Args:
            prices: Price of one unit at each time [times].
        """
        # The price of an interval is a difference of running sums.
        total: FloatArray = np.concatenate([[0.0], np.cumsum(prices)])
        return total[self.end] - total[self.first]


def timeline_of(problem: AssignmentProblem) -> Timeline:
    """Return the times of a problem at which its nodes may hold more than the limit."""
    begins, ends = problem.intervals[:, 0], problem.intervals[:, 1]
    lasts = ends > begins
    times = np.unique(begins[lasts])
    sorted_ends = np.sort(ends[lasts])
    following = np.append(times[1:], np.iinfo(np.int64).max)
    # A begin is a peak if an interval ends after it, up to the next begin.
    is_peak = np.searchsorted(sorted_ends, following, "right") > np.searchsorted(sorted_ends, times, "right")
    peaks = times[is_peak]
    # Times at which even the largest strategies fit can never be exceeded.
    most = np.maximum.reduceat(problem.usages, problem.starts[:-1]) if problem.num_nodes else np.zeros(0)
    everywhere = _on(peaks, problem)
    return _on(peaks[everywhere.held(most) > problem.limit], problem)


def _on(times: IntArray, problem: AssignmentProblem) -> Timeline:
    """Return the timeline of some times."""
    begins, ends = problem.intervals[:, 0], problem.intervals[:, 1]
    # An interval excludes its end, so that a time equal to the end is the first one after it.
    first = np.searchsorted(times, begins, "left")
    end = np.searchsorted(times, np.maximum(begins, ends), "left")
    return Timeline(size=len(times), first=first, end=np.maximum(first, end))
