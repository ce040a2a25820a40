"""Features of an operator's shape for its surrogate, chosen so that near shapes have similar prediction errors.

Large operators are all mispredicted by nearly the same factor. The factors of small ones change with size because of
start-up times, caches and half-empty tiles. A size therefore counts in doublings up to a knee, and in a third of that
beyond. Small operators may also be wrong by a fixed time, which large ones do not show; linear columns that grow as a
size falls below its floor represent it. Knees and floors were chosen on A100, V100 and L40S operators, and tested on
others (`python -m benchmarks.operator_calibration`).

Letters: k shapes, d sizes of a shape, f features, c columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from costmodels.blocks.operator import OpKind
from hardware.arrays import FloatArray

BEYOND_KNEE = 0.3
"""Weight of a doubling beyond the knee."""

FLOOR_ERROR = 0.3
"""Standard deviation of the log error per factor of e that a size is below its floor (assumed)."""

MOST_BELOW = 64.0
"""Factor below its floor from which on a smaller size makes an operator no shorter: start-up is all of it (assumed). A
message of no bytes would else be uncertain by any factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeFeature:
    """Feature of a shape: the product of some of its sizes.

    Attributes:
        sizes: Positions of the sizes that are multiplied.
        length: Typical length scale, in doublings below the knee.
        knee: Product beyond which doublings count less.
        floor: Product below which a fixed time may be missing; None if that makes no sense.
    """

    sizes: tuple[int, ...]
    length: float = 2.0
    knee: float = math.inf
    floor: float | None = None

    def size(self, shape: FloatArray) -> FloatArray:
        """Return the product of the sizes at `shape` [k, d], at least 1 [k]."""
        return np.asarray(np.maximum(shape[:, self.sizes].prod(axis=1), 1.0))


def _product(*sizes: int) -> tuple[ShapeFeature, ...]:
    return tuple(ShapeFeature(sizes=(size,), knee=2048, floor=512) for size in sizes)


COLLECTIVE = (
    ShapeFeature(sizes=(0,), knee=2**24, floor=2**22),
    ShapeFeature(sizes=(1,), length=0.7),
    ShapeFeature(sizes=(2,), length=0.7),
)
"""Features of a collective: message bytes, members, hosts. Other numbers of members use other algorithms or links."""

FEATURES: dict[OpKind, tuple[ShapeFeature, ...]] = {
    OpKind.MATMUL: _product(0, 1, 2),
    OpKind.GROUPED_MATMUL: (ShapeFeature(sizes=(0,)), *_product(1, 2, 3)),
    OpKind.ATTENTION: (
        ShapeFeature(sizes=(0, 1), knee=64, floor=32),
        ShapeFeature(sizes=(2,), knee=2048, floor=1024),
        ShapeFeature(sizes=(3,), knee=2048),
        ShapeFeature(sizes=(4,), length=1.5),
    ),
    OpKind.SCAN: _product(0, 1, 2),
    OpKind.NORM: (ShapeFeature(sizes=(0, 1), knee=2**24, floor=2**24), ShapeFeature(sizes=(1,), length=1.0)),
    OpKind.ELEMENTWISE: (ShapeFeature(sizes=(0,), knee=2**24, floor=2**24),),
}


def features_of(kind: OpKind) -> tuple[ShapeFeature, ...]:
    """Return the features of a kind; kinds without an entry are collectives."""
    return FEATURES.get(kind, COLLECTIVE)


def feature_values(kind: OpKind, shape: FloatArray) -> FloatArray:
    """Compute the features at `shape` [k, d] as [k, f]."""
    values = []
    for feature in features_of(kind):
        size = feature.size(shape)
        # slope 1 in log2(size) far below the knee and BEYOND_KNEE far above, with a smooth passage
        values.append(np.log2(size) - (1 - BEYOND_KNEE) * np.log2(1 + size / feature.knee))
    return np.stack(values, axis=1)


def floor_columns(kind: OpKind, shape: FloatArray) -> FloatArray:
    """Compute linear columns for a missing fixed time at `shape` [k, d], in standard deviations [k, c]."""
    # log(1 + floor / size) tends to zero for large operators and grows by FLOOR_ERROR per factor of e for small ones
    columns = [
        FLOOR_ERROR * np.log1p(np.minimum(feature.floor / feature.size(shape), MOST_BELOW))
        for feature in features_of(kind)
        if feature.floor is not None
    ]
    return np.stack(columns, axis=1)
