"""A small problem with weak bounds: numbers are put into bins, and the fullest bin should hold little."""

import itertools
import math
from dataclasses import dataclass

from tuner.planners.engine.branch_and_bound import AbstractProblem
from tuner.planners.engine.frontier import Merit
from tuner.planners.engine.outcome import Incumbent


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition(AbstractProblem):
    """Puts `numbers` into bins that hold at most `capacity`.

    Attributes:
        numbers: What is put somewhere.
        num_bins: Bins.
        capacity: Of each.
        has_dominance: Whether nodes may be compared.
        has_greedy: Whether there is a heuristic.
    """

    numbers: tuple[int, ...]
    num_bins: int = 3
    capacity: float = math.inf
    has_dominance: bool = True
    has_greedy: bool = True

    def root(self):
        """No number has a place."""
        return ()

    def sums(self, node):
        """What each bin holds."""
        return tuple(
            sum(number for number, place in zip(self.numbers, node, strict=False) if place == bin_)
            for bin_ in range(self.num_bins)
        )

    def children(self, node, _):
        """The next number in every bin up to the first empty one, for empty bins are alike."""
        if len(node) < len(self.numbers):
            for place in range(min(self.num_bins, max(node, default=-1) + 2)):
                yield (*node, place)

    def lower_bound(self, node):
        """The fullest bin, or what all hold on average."""
        fullest = max(*self.sums(node), sum(self.numbers) / self.num_bins)
        return math.inf if fullest > self.capacity else fullest

    def complete(self, node):
        """All numbers have a place."""
        if len(node) < len(self.numbers):
            return None
        return Incumbent(cost=float(max(self.sums(node))), solution=node)

    def greedy(self, node):
        """Puts each number where least is."""
        if not self.has_greedy:
            return None
        while len(node) < len(self.numbers):
            sums = self.sums(node)
            node = (*node, sums.index(min(sums)))
        return None if max(self.sums(node)) > self.capacity else self.complete(node)

    def merit(self, node):
        """Bins are alike, so their sums in order decide."""
        key = len(node) if self.has_dominance else node
        return Merit(key, tuple(sorted(self.sums(node))))

    def least(self):
        """The optimum, by trying everything; None if nothing fits."""
        costs = [max(self.sums(node)) for node in itertools.product(range(self.num_bins), repeat=len(self.numbers))]
        return min((cost for cost in costs if cost <= self.capacity), default=None)


HARD = Partition(numbers=(97, 89, 83, 71, 67, 61, 59, 53, 47, 43, 41, 37, 31), has_greedy=False, has_dominance=False)
"""Takes a few thousand nodes."""

HARD_OPTIMUM = 260
"""A third of the sum, rounded up."""
