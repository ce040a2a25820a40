"""Mixture of experts in JAX: routing, dispatch into slots, and combination, on whole tensors.

Letters: b = batch, c = chunks, t = tokens of a chunk, s = slots of an expert in a chunk, e = experts, h = hidden size.
`costmodels/sharding/frontends/transformer/experts.py` says why there are chunks. A token takes the next free slot of
each expert that it has chosen, in the order of tokens; beyond the last slot it is dropped there, as in GShard (Lepikhin
et al. 2020, algorithm 1).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from costmodels.sharding.graph import Op


def routing(logits: Array, *, top_k: int) -> Array:
    """Return the weights of each token's experts [b, c*t, e]: a softmax over the largest logits, and 0 for all others.

    Args:
        logits: Scores of all experts [b, c*t, e].
        top_k: Number of experts of a token; equal scores beside the last of them are chosen too.
    """
    least = jnp.sort(jax.lax.stop_gradient(logits), axis=-1)[..., -top_k, None]
    return jax.nn.softmax(jnp.where(logits >= least, logits, -jnp.inf), axis=-1)


def dispatch(op: Op, x: Array, weights: Array) -> tuple[Array, ...]:
    """Return the tokens in the slots of their experts [e, b, c*s, h], and zeros in slots that stay free."""
    places = _places(op, weights)
    return (jnp.einsum("bctes,bcth->ebcsh", places, _chunked(x, places, 1)).reshape(op.rule.result_shape(0)),)


def dispatch_gradient(op: Op, given: Array, weights: Array) -> tuple[Array, ...]:
    """Return the gradient of the tokens from that of the slots."""
    places = _places(op, weights)
    return (jnp.einsum("bctes,ebcsh->bcth", places, _chunked(given, places, 2)).reshape(op.rule.result_shape(0)),)


def combine(op: Op, slots: Array, weights: Array) -> tuple[Array, ...]:
    """Return for each token the sum of its slots times its weights [b, c*t, h]."""
    places = _places(op, weights)
    shares = places * _chunked(weights, places, 1)[..., None]
    return (jnp.einsum("bctes,ebcsh->bcth", shares, _chunked(slots, places, 2)).reshape(op.rule.result_shape(0)),)


def combine_gradient(op: Op, given: Array, slots: Array, weights: Array) -> tuple[Array, ...]:
    """Return the gradients of slots and weights from that of the tokens."""
    places = _places(op, weights)
    shares = places * _chunked(weights, places, 1)[..., None]
    tokens, outputs = _chunked(given, places, 1), _chunked(slots, places, 2)
    to_slots = jnp.einsum("bctes,bcth->ebcsh", shares, tokens)
    to_weights = (places * jnp.einsum("bcth,ebcsh->bctes", tokens, outputs)).sum(axis=-1)
    return to_slots.reshape(slots.shape), to_weights.reshape(weights.shape)


def _places(op: Op, weights: Array) -> Array:
    """Return 1 where a token lies in a slot, and 0 elsewhere [b, c, t, e, s]."""
    sizes = {factor.name: factor.size for factor in op.rule.factors}
    chosen = weights.reshape(weights.shape[0], sizes["chunks"], sizes["chunk_tokens"], -1) > 0
    turn = jnp.cumsum(chosen, axis=2) - 1
    is_there = chosen[..., None] & (turn[..., None] == jnp.arange(sizes["chunk_slots"]))
    return is_there.astype(weights.dtype)


def _chunked(array: Array, places: Array, dim: int) -> Array:
    """Return an array with one of its dims divided into the chunks of `places`."""
    return array.reshape(*array.shape[:dim], places.shape[1], -1, *array.shape[dim + 1 :])
