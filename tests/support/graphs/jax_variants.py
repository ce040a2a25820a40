"""JAX primitives in forms that no program of the zoo contains."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.zoo import FACTORIES

ROWS = jax.ShapeDtypeStruct((4, 6, 8), jnp.float32)
INDICES = jax.ShapeDtypeStruct((10,), jnp.int32)
IMAGE = jax.ShapeDtypeStruct((4, 8, 8, 12), jnp.float32)
PLACE = jax.ShapeDtypeStruct((), jnp.int32)


def several(x):
    """Apply elementwise operators with scalars, and cumulative, sorting and reversing ones."""
    return (
        lax.clamp(0.2, x, 0.8),
        lax.cummax(x, axis=1, reverse=True),
        lax.cumprod(x, axis=2),
        lax.sort([x, x * 2], dimension=1, num_keys=1),
        lax.argmin(x, 1, jnp.int32),
        lax.reduce_min(x, (0, 2)),
        lax.reduce_or(x > 0.5, (1,)),
        lax.reduce_and(x > 0.5, (1,)),
        lax.rev(x, (0, 2)),
        lax.expand_dims(x, (0, 2)),
        lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0), (0, 0, 1))),
        lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0), (0, 0, 0))),
        lax.slice(x, (0, 0, 1), (4, 6, 8), (1, 2, 1)),
        lax.reduce_precision(x, 8, 7),
        lax.bitcast_convert_type(x, jnp.int32),
        lax.bitcast_convert_type(x, jnp.int16),
        lax.optimization_barrier((x, x * 2)),
    )


def reshaped(x):
    """Apply reshapes that merge, split, and cross dims, and one whose dims have nothing in common."""
    return [
        x.reshape(shape)
        for shape in (
            (24, 8),
            (4, 48),
            (192,),
            (2, 2, 6, 4, 2),
            (8, 24),
            (4, 8, 6),
            (8, 6, 4),
            (1, 4, 1, 6, 8),
            (3, 64),
        )
    ]


def windowed(x):
    """Pool with and without strides and overlap, and compute the gradients of pooling."""

    def pooled(x):
        return lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    halves, back = jax.vjp(pooled, x)
    return (halves, back(halves), lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"))


def looked_up(x, indices):
    """Gather and scatter along one dim, with whole slices and with short ones."""
    rows = x[:, indices]
    short = lax.gather(
        x,
        indices[:, None],
        lax.GatherDimensionNumbers(offset_dims=(0, 2, 3), collapsed_slice_dims=(), start_index_map=(1,)),
        (4, 2, 8),
    )
    return (
        rows,
        short,
        x[indices, indices],
        jnp.zeros_like(x).at[:, indices].add(rows),
        jnp.zeros_like(x).at[indices, indices].add(rows[0]),
    )


def written(x, place):
    """Slice and update at an index that is known only at run time."""
    part = lax.dynamic_slice(x, (0, place, 0), (4, 2, 8))
    return part, lax.dynamic_update_slice(x, part * 2, (0, place, 0))


def convolved(x):
    """Convolve with feature groups (gradients have batch groups) and without a window."""
    weight = jnp.ones((3, 3, 3, 8))

    def conv(x, weight):
        return lax.conv_general_dilated(
            x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4
        )

    _, back = jax.vjp(conv, x, weight + x[0, 0, 0, 0])
    whole = lax.conv_general_dilated(x, x, (1, 1), "VALID", dimension_numbers=("NHWC", "OHWI", "NHWC"))
    return back(jnp.ones((4, 8, 8, 8)) * x[0, 0, 0, 1]), whole


VARIANTS = (
    (several, (ROWS,)),
    (reshaped, (ROWS,)),
    (windowed, (IMAGE,)),
    (looked_up, (ROWS, INDICES)),
    (written, (ROWS, PLACE)),
    (convolved, (IMAGE,)),
)
"""Functions and the shapes of what they take."""

PROGRAMS = (*VARIANTS, *(factory()[:2] for name, factory in FACTORIES.items() if "small" in name))
"""These and the small programs of the zoo."""
