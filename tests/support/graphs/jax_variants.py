"""JAX primitives in forms that no program of the zoo contains."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

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


def factorized(matrices, sides):
    """Factorize, decompose and solve batches of matrices."""
    linalg = lax.linalg
    lower, off, upper = (matrices[:, :, dim] for dim in range(3))
    return (
        linalg.cholesky(matrices, symmetrize_input=False),
        linalg.eig(matrices, compute_left_eigenvectors=False),
        linalg.eigh(matrices, symmetrize_input=False),
        linalg.hessenberg(matrices),
        linalg.householder_product(matrices, lower),
        linalg.lu(matrices),
        linalg.qr(matrices[:, :, :4], full_matrices=False),
        linalg.qr(matrices, full_matrices=True),
        linalg.schur(matrices),
        linalg.svd(matrices[:, :, :4], full_matrices=False),
        linalg.svd(matrices, compute_uv=False),
        linalg.triangular_solve(matrices, sides, left_side=True, lower=True),
        linalg.triangular_solve(matrices, sides.swapaxes(1, 2), left_side=False, lower=True),
        linalg.tridiagonal(matrices, lower=True),
        linalg.tridiagonal_solve(lower, off, upper, sides),
    )


def transformed(x):
    """Transform one dim and two, from and to real numbers."""
    wave = jnp.fft.rfft2(x)
    return jnp.fft.fft(x), wave, jnp.fft.irfft2(wave), jnp.fft.ifft(wave, axis=1)


def grouped(rows, matrices, sizes):
    """Multiply groups of rows with a matrix each, and compute both gradients; also with a batch."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((2,), (2,)), ((0,), (1,))), lhs_ragged_dimensions=(1,), rhs_group_dimensions=(0,)
    )
    product, back = jax.vjp(lambda rows, matrices: lax.ragged_dot(rows, matrices, sizes), rows, matrices)
    pair = jnp.stack([rows, rows]), jnp.stack([matrices, matrices], axis=1)
    return product, back(product), lax.ragged_dot_general(*pair, sizes, numbers)


def various(x):
    """Apply primitives that seldom occur."""
    return (
        lax.approx_max_k(x, 2),
        checkpoint_name(x, "x"),
        jnp.stack([x, x * 2], axis=1),
        jnp.unstack(x, axis=1),
        jnp.tile(x, (2, 1, 3)),
        lax.reduce((x, x * 2), (0.0, 0.0), lambda one, other: (one[0] + other[0], one[1] * other[1]), (1,)),
        jnp.zeros_like(x).at[np.array([1])].subtract(x[:1]),
    )


VARIANTS = (
    (factorized, (jax.ShapeDtypeStruct((4, 8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8, 2), jnp.float32))),
    (transformed, (ROWS,)),
    (
        grouped,
        (
            jax.ShapeDtypeStruct((16, 6), jnp.float32),
            jax.ShapeDtypeStruct((4, 6, 8), jnp.float32),
            jax.ShapeDtypeStruct((4,), jnp.int32),
        ),
    ),
    (various, (ROWS,)),
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
