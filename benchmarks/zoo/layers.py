"""Layers that several models share.

Shape letters: B batch, T tokens, S those that are attended to, N heads, K heads of keys, G heads that share one of
them, H head, V vocabulary.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax


def rms_norm(x: Array, scale: Array) -> Array:
    """Divide by the root mean square over the last dim, and scale."""
    # Squares of bfloat16 would lose too many digits.
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6) * (1 + scale)).astype(x.dtype)


def cross_entropy(logits_btv: Array, targets_bt: Array) -> Array:
    """Compute the mean cross entropy over all tokens."""
    log_btv = jax.nn.log_softmax(logits_btv.astype(jnp.float32), axis=-1)
    return -jnp.mean(jnp.take_along_axis(log_btv, targets_bt[..., None], axis=-1))


def rotated(x: Array, positions: Array) -> Array:
    """Apply rotary position embedding to [B, T, ..., H] (Su et al. 2021), with the halves of H as pairs."""
    half = x.shape[-1] // 2
    # Each pair rotates at its own frequency, from 1 down to nearly 1/10,000 per position.
    speeds = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, *(None,) * (x.ndim - 2)].astype(jnp.float32) * speeds
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attention(queries: Array, keys: Array, values: Array, mask: Array) -> Array:
    """Apply attention under a mask [T, S].

    Args:
        queries: Queries [B, T, N, H], or [B, T, K, G, H] if several heads share keys.
        keys: Keys of one head for all [B, S, H], or with a dim of heads, N or K.
        values: Values in the shape of the keys.
        mask: Whether each token attends to each other one [T, S].
    """
    heads = "n" if queries.ndim == 4 else "kg"
    of_keys = heads[: keys.ndim - 3]
    # Scores are widened to float32 for the softmax; its weights return to the values' type.
    scores = jnp.einsum(f"bt{heads}h,bs{of_keys}h->b{heads}ts", queries, keys).astype(jnp.float32)
    scores = scores / math.sqrt(queries.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(values.dtype)
    return jnp.einsum(f"b{heads}ts,bs{of_keys}h->bt{heads}h", weights, values)
