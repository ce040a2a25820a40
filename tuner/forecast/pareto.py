"""Pareto front: the entries of a table that no other entry beats in every column.

Letters: n entries, k values of each, M draws.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hardware.arrays import FloatArray


def pareto_front(values: FloatArray) -> NDArray[np.bool_]:
    """Return whether each entry is on the front [n]: no other is at most as large in all values and smaller in one.

    Entries with a value that is not finite are never on it. Equal entries are on it together.

    Args:
        values: Values of the entries, of which smaller ones are better [n, k].
    """
    is_finite = np.asarray(np.isfinite(values).all(axis=1))
    at_most = (values[:, None] <= values[None]).all(axis=2)  # [n, n]: the first is nowhere worse than the second
    smaller = (values[:, None] < values[None]).any(axis=2)
    is_beaten = (at_most & smaller & is_finite[:, None]).any(axis=0)
    return np.asarray(is_finite & ~is_beaten)


def front_chances(draws: FloatArray) -> FloatArray:
    """Return the share of draws in which each entry is on the front [n].

    Args:
        draws: Joint draws of the values of all entries [M, n, k].
    """
    if not len(draws):
        return np.zeros(draws.shape[1])
    return np.asarray(np.mean([pareto_front(values) for values in draws], axis=0))
