"""A transformer that writes one more token for each of a batch of texts, with what it keeps of those before.

Shape letters: B batch, T tokens (one), S cached tokens, D model, N heads, H head, V vocabulary, K keys or values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.zoo.gemma import GEMMA_2B, SMALL_GEMMA, Gemma
from benchmarks.zoo.layers import attention, rms_norm, rotated
from benchmarks.zoo.programs import Program, Tree, shape_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """Sizes of a transformer that writes one token for each of a batch of texts."""

    base: Gemma
    cached: int

    def decode(self, params: Tree, cache: Tree, tokens: Array, position: Array) -> tuple[Array, Tree]:
        """The likeliest tokens, and the cache with the new keys and values."""
        x_btd = params["embedding"][tokens][:, None, :]
        positions = position[None]
        mask = (jnp.arange(self.cached) <= position)[None]
        found = {}
        for name, layer in params["layers"].items():
            with jax.named_scope(f"layers.{name}"):
                normed = rms_norm(x_btd, layer["attention_norm"])
                queries = rotated(jnp.einsum("btd,dnh->btnh", normed, layer["query"]), positions)
                key, value = jnp.einsum("btd,kdh->kbth", normed, layer["key_value"])
                key = rotated(key[:, :, None, :], positions)[:, :, 0, :]
                keys = lax.dynamic_update_slice(cache[name]["keys"], key, (0, position, 0))
                values = lax.dynamic_update_slice(cache[name]["values"], value, (0, position, 0))
                heads = attention(queries, keys, values, mask)
                x_btd = x_btd + jnp.einsum("btnh,nhd->btd", heads, layer["out"])
                x_btd = x_btd + self.base.hide(layer, x_btd)
                found[name] = {"keys": keys, "values": values}
        logits_btv = jnp.einsum("btd,vd->btv", rms_norm(x_btd, params["norm"]), params["embedding"])
        return jnp.argmax(logits_btv[:, 0, :], axis=-1), found

    def program(self) -> Program:
        """One step of decoding."""
        base = self.base
        cached = shape_of(base.batch, self.cached, base.head)
        cache = {str(number): {"keys": cached, "values": cached} for number in range(base.layers)}
        tokens = shape_of(base.batch, dtype=jnp.int32)
        return self.decode, (base.params(), cache, tokens, shape_of(dtype=jnp.int32)), ("cache",)


def decode() -> Program:
    """Gemma 2B with 2,048 cached tokens of 64 texts."""
    return Decoder(base=replace(GEMMA_2B, batch=64, tokens=1), cached=2048).program()


def decode_small() -> Program:
    """One small layer."""
    return Decoder(base=replace(SMALL_GEMMA, tokens=1), cached=6).program()
