"""Small bin packing problem with weak bounds: minimise the sum of the fullest bin."""

import itertools
import math
from dataclasses import dataclass

from tuner.planners.engine.branch_and_bound import AbstractProblem
from tuner.planners.engine.frontier import Merit
from tuner.planners.engine.outcome import Incumbent


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition(AbstractProblem):
    """Assignment of `numbers` to bins that hold at most `capacity`.

    Attributes:
        numbers: Numbers that are assigned to bins.
        num_bins: Number of available bins.
        capacity: Largest sum of each bin.
        has_dominance: Whether nodes may be compared with each other.
        has_greedy: Whether the problem offers a heuristic.
    """

    numbers: tuple[int, ...]
    num_bins: int = 3
    capacity: float = math.inf
    has_dominance: bool = True
    has_greedy: bool = True

    def root(self):
        """Return the node in which no number is assigned."""
        return ()

    def sums(self, node):
        """Compute the sum of each bin."""
        return tuple(
            sum(number for number, place in zip(self.numbers, node, strict=False) if place == bin_)
            for bin_ in range(self.num_bins)
        )

    def children(self, node, _):
        """Put the next number into every bin up to the first empty one, because empty bins are interchangeable."""
        if len(node) < len(self.numbers):
            for place in range(min(self.num_bins, max(node, default=-1) + 2)):
                yield (*node, place)

    def lower_bound(self, node):
        """Return the larger of the fullest bin and the average of all bins."""
        fullest = max(*self.sums(node), sum(self.numbers) / self.num_bins)
        return math.inf if fullest > self.capacity else fullest

    def complete(self, node):
        """Check whether all numbers are assigned."""
        if len(node) < len(self.numbers):
            return None
        return Incumbent(cost=float(max(self.sums(node))), solution=node)

    def greedy(self, node):
        """Put each number into the bin with the smallest sum."""
        if not self.has_greedy:
            return None
        while len(node) < len(self.numbers):
            sums = self.sums(node)
            node = (*node, sums.index(min(sums)))
        return None if max(self.sums(node)) > self.capacity else self.complete(node)

    def merit(self, node):
        """Return the sorted sums of the bins, because bins are interchangeable."""
        key = len(node) if self.has_dominance else node
        return Merit(key, tuple(sorted(self.sums(node))))

    def least(self):
        """Find the optimum by exhaustive search; None if nothing fits."""
        costs = [max(self.sums(node)) for node in itertools.product(range(self.num_bins), repeat=len(self.numbers))]
        return min((cost for cost in costs if cost <= self.capacity), default=None)


HARD = Partition(numbers=(97, 89, 83, 71, 67, 61, 59, 53, 47, 43, 41, 37, 31), has_greedy=False, has_dominance=False)
"""Takes a few thousand nodes."""

HARD_OPTIMUM = 260
"""A third of the sum, rounded up."""
