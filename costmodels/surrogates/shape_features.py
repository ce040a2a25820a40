"""The sizes of an operator as its surrogate sees them: how alike two shapes are in what a prediction misses of them.

A prediction misses large operators all by much the same factor, and small ones by factors that change with size:
start-up, caches, tiles that are left half empty. So a size counts in doublings up to a knee and in a third of that
beyond. What is small may further be wrong by a fixed time, which no large operator tells of; columns that grow as a
size falls below its floor say so. Knees and floors were chosen on A100, V100 and L40S operators and quoted on others
(`python -m benchmarks.calibration.operator_calibration`).

Letters: k shapes, d sizes of a shape, f features, c columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from costmodels.operators.layer_operators import OpKind
from hardware.arrays import FloatArray

BEYOND_KNEE = 0.3
"""What a doubling counts for beyond the knee."""

FLOOR_ERROR = 0.3
"""Standard deviation of the log error per factor of e that a size is below its floor (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeFeature:
    """One feature: the product of some sizes.

    Attributes:
        sizes: Which sizes of the shape are multiplied.
        length: Its typical length scale, in doublings below the knee.
        knee: Where doublings begin to count less.
        floor: Below this, a fixed time may be missing; None where that makes no sense.
    """

    sizes: tuple[int, ...]
    length: float = 2.0
    knee: float = math.inf
    floor: float | None = None

    def size(self, shape: FloatArray) -> FloatArray:
        """The product of its sizes at `shape` [k, d], at least 1 [k]."""
        return np.asarray(np.maximum(shape[:, self.sizes].prod(axis=1), 1.0))


def _product(*sizes: int) -> tuple[ShapeFeature, ...]:
    return tuple(ShapeFeature(sizes=(size,), knee=2048, floor=512) for size in sizes)


COLLECTIVE = (
    ShapeFeature(sizes=(0,), knee=2**24, floor=2**22),
    ShapeFeature(sizes=(1,), length=0.7),
    ShapeFeature(sizes=(2,), length=0.7),
)
"""Message in bytes, members, hosts. Another number of members is another algorithm or another wire."""

FEATURES: dict[OpKind, tuple[ShapeFeature, ...]] = {
    OpKind.MATMUL: _product(0, 1, 2),
    OpKind.GROUPED_MATMUL: (ShapeFeature(sizes=(0,)), *_product(1, 2, 3)),
    OpKind.ATTENTION: (
        ShapeFeature(sizes=(0, 1), knee=64, floor=32),
        ShapeFeature(sizes=(2,), knee=2048, floor=1024),
        ShapeFeature(sizes=(3,), knee=2048),
        ShapeFeature(sizes=(4,), length=1.5),
    ),
    OpKind.NORM: (ShapeFeature(sizes=(0, 1), knee=2**24, floor=2**24), ShapeFeature(sizes=(1,), length=1.0)),
    OpKind.ELEMENTWISE: (ShapeFeature(sizes=(0,), knee=2**24, floor=2**24),),
}


def features_of(kind: OpKind) -> tuple[ShapeFeature, ...]:
    """The features of a kind; what is no kernel is a collective."""
    return FEATURES.get(kind, COLLECTIVE)


def feature_values(kind: OpKind, shape: FloatArray) -> FloatArray:
    """The features at `shape` [k, d] -> [k, f]."""
    values = []
    for feature in features_of(kind):
        size = feature.size(shape)
        values.append(np.log2(size) - (1 - BEYOND_KNEE) * np.log2(1 + size / feature.knee))
    return np.stack(values, axis=1)


def floor_columns(kind: OpKind, shape: FloatArray) -> FloatArray:
    """What a fixed time may add to the log error at `shape` [k, d], in standard deviations -> [k, c]."""
    columns = [
        FLOOR_ERROR * np.log1p(feature.floor / feature.size(shape))
        for feature in features_of(kind)
        if feature.floor is not None
    ]
    return np.stack(columns, axis=1)
