"""Candidates of a measured group as points of a box, for general-purpose optimizers.

A candidate is a point with one coordinate for every dimension in which the candidates differ, except `dp`, which
follows from the other degrees. Distances are Euclidean between coordinates scaled to 0 to 1: logarithms of degrees, and
ranks of the values of all other dimensions. Ties are broken at random.

Letters: n candidates, d dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from costmodels.job.parallel_config import DEGREES, ConfigGrid
from hardware.arrays import FloatArray, IntArray

FAILURE_SLOWDOWN = 2.0
"""Factor by which a failed candidate is reported slower than the slowest timed one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Points:
    """Candidates as points of a box.

    Attributes:
        names: Dimensions in which the candidates differ, without dp.
        values: Distinct values of each dimension, in rising order.
        levels: Index into `values` for each candidate and dimension [n, d].
        coordinates: Coordinates scaled to 0 to 1 [n, d].
    """

    names: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]
    levels: IntArray
    coordinates: FloatArray

    def at(self, levels: Mapping[str, int]) -> FloatArray:
        """Return the coordinates [d] of the point with these levels."""
        return np.array([_scale(n, v)[levels[n]] for n, v in zip(self.names, self.values, strict=True)])

    def levels_of(self, position: int) -> dict[str, int]:
        """Return the levels of a candidate by dimension."""
        return dict(zip(self.names, self.levels[position].tolist(), strict=True))

    def nearest(self, point: FloatArray, closed: set[int], rng: np.random.Generator) -> int:
        """Return the candidate nearest to `point` [d] that is not in `closed`."""
        # The tolerance treats distances that differ only by rounding as ties, which are broken at random.
        squared = ((self.coordinates - point) ** 2).sum(axis=1)
        squared[list(closed)] = np.inf
        return int(rng.choice(np.flatnonzero(squared <= squared.min() + 1e-9)))


def points_of(grid: ConfigGrid) -> Points:
    """Build the points of a grid with at least two candidates."""
    columns = {name: getattr(grid, name).astype(np.int64) for name in grid.dimensions if name != "dp"}
    varying = {name: column for name, column in columns.items() if column.min() < column.max()}
    # Levels index the distinct values; samplers propose levels, distances use coordinates.
    pairs = [np.unique(column, return_inverse=True) for column in varying.values()]
    values = tuple(tuple(distinct.tolist()) for distinct, _ in pairs)
    scaled = [_scale(name, own)[levels] for name, own, (_, levels) in zip(varying, values, pairs, strict=True)]
    return Points(
        names=tuple(varying),
        values=values,
        levels=np.stack([levels for _, levels in pairs], axis=1),
        coordinates=np.stack(scaled, axis=1),
    )


def _scale(name: str, values: tuple[int, ...]) -> FloatArray:
    """Scale the values of a dimension to 0 to 1: degrees by their logarithms, all others by their order."""
    # Doubling a degree is one step whatever its size; all other values are evenly spaced.
    places = np.log2(values) if name in DEGREES else np.arange(len(values), dtype=np.float64)
    return np.asarray((places - places[0]) / (places[-1] - places[0]))
