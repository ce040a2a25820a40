"""Attention with grouped heads, and its gradient from the kept log-sum-exp, on whole tensors.

Scores and their softmax are float32. Products take the type of queries, keys and values, as flash attention does.

Letters: b = batch, q = queries, k = keys, h = key heads, g = query heads per key head, d = size of a head.

Source: FlashAttention-2 (Dao 2023), section 2.3 and algorithm 2, without tiles.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array


def attend(query: Array, key: Array, value: Array, *, causal: bool) -> tuple[Array, Array]:
    """Return the context [b, q, h*g, d] and the log-sum-exp of each query's scores [b, q, h*g].

    Args:
        query: Queries [b, q, h*g, d], in which the heads of one key head are neighbours.
        key: Keys [b, k, h, d].
        value: Values [b, k, h, d].
        causal: Whether a query sees only keys up to its own position.
    """
    scores = _scores(_grouped(query, key), key, causal=causal)
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    context = jnp.einsum("bqhgk,bkhd->bqhgd", (weights / total).astype(value.dtype), value)
    normaliser = (largest + jnp.log(total))[..., 0]
    return context.reshape(*query.shape[:3], value.shape[-1]), normaliser.reshape(query.shape[:3])


def attend_gradient(
    query: Array, key: Array, value: Array, context: Array, normaliser: Array, given: Array, *, causal: bool
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and values.

    Args:
        query: Queries, as in `attend`.
        key: Keys, as in `attend`.
        value: Values, as in `attend`.
        context: Context that `attend` returned.
        normaliser: Log-sum-exp that `attend` returned.
        given: Gradient of the context.
        causal: Whether a query sees only keys up to its own position.
    """
    grouped = _grouped(query, key)
    given_grouped = _grouped(given, key)
    weights = jnp.exp(_scores(grouped, key, causal=causal) - normaliser.reshape(grouped.shape[:4])[..., None])
    to_value = jnp.einsum("bqhgk,bqhgd->bkhd", weights.astype(given.dtype), given_grouped)
    inner = (given * context).sum(axis=-1, dtype=jnp.float32).reshape(grouped.shape[:4])
    to_weights = jnp.einsum("bqhgd,bkhd->bqhgk", given_grouped, value, preferred_element_type=jnp.float32)
    to_scores = weights * (to_weights - inner[..., None])
    to_scores = (to_scores / math.sqrt(query.shape[-1])).astype(query.dtype)
    to_query = jnp.einsum("bqhgk,bkhd->bqhgd", to_scores, key).reshape(query.shape)
    return to_query, jnp.einsum("bqhgk,bqhgd->bkhd", to_scores, grouped), to_value


def _grouped(query: Array, key: Array) -> Array:
    """Return queries [b, q, h*g, d] as [b, q, h, g, d]."""
    heads = key.shape[2]
    return query.reshape(*query.shape[:2], heads, query.shape[2] // heads, query.shape[3])


def _scores(grouped: Array, key: Array, *, causal: bool) -> Array:
    """Return the scaled scores [b, q, h, g, k], minus infinity where a query must not look."""
    scores = jnp.einsum("bqhgd,bkhd->bqhgk", grouped, key, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(grouped.shape[-1])
    if not causal:
        return scores
    is_seen = jnp.arange(grouped.shape[1])[:, None] >= jnp.arange(key.shape[1])
    return jnp.where(is_seen[:, None, None, :], scores, -jnp.inf)
