"""Decoding step of a transformer: one more token for each text of a batch, with the cached keys and values.

Shape letters: B batch, T tokens (one), S cached tokens, D model, N heads, H head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.zoo.gemma import GEMMA_2B, SMALL_GEMMA, Gemma
from benchmarks.zoo.layers import attention, rms_norm
from benchmarks.zoo.programs import Program, Tree, shape_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """Sizes of a transformer that writes one token for each text of a batch."""

    base: Gemma
    cached: int

    def decode(self, params: Tree, cache: Tree, tokens: Array, position: Array) -> tuple[Array, Tree]:
        """Return the most likely tokens, and the cache with the new keys and values."""
        x_btd = params["embedding"][tokens][:, None, :]
        positions = position[None]
        # Cache entries after the current position are not written yet.
        mask = (jnp.arange(self.cached) <= position)[None]
        found = {}
        for name, layer in params["layers"].items():
            with jax.named_scope(f"layers.{name}"):
                normed = rms_norm(x_btd, layer["attention_norm"])
                queries, key, value = self.base.projected(layer, normed, positions)
                keys = lax.dynamic_update_slice(cache[name]["keys"], key, (0, position, 0))
                values = lax.dynamic_update_slice(cache[name]["values"], value, (0, position, 0))
                heads = attention(queries, keys, values, mask)
                x_btd = x_btd + jnp.einsum("btnh,nhd->btd", heads, layer["out"])
                x_btd = x_btd + self.base.hide(layer, x_btd)
                found[name] = {"keys": keys, "values": values}
        return jnp.argmax(self.base.logits(params, x_btd)[:, 0, :], axis=-1), found

    def program(self) -> Program:
        """Build one decoding step."""
        base = self.base
        cached = shape_of(base.batch, self.cached, base.head)
        cache = {str(number): {"keys": cached, "values": cached} for number in range(base.layers)}
        tokens = shape_of(base.batch, dtype=jnp.int32)
        return self.decode, (base.params(), cache, tokens, shape_of(dtype=jnp.int32)), ("cache",)


def decode() -> Program:
    """Build Gemma 2B with 2,048 cached tokens of 64 texts."""
    return Decoder(base=replace(GEMMA_2B, batch=64, tokens=1), cached=2048).program()


ITX = Decoder(
    base=Gemma(
        layers=32, model=2048, heads=32, head=64, hidden=4096, vocabulary=50_257, batch=256, tokens=1, is_tied=False
    ),
    cached=2048,
)
"""Sizes that TOAST, section 5.1, lists for its transformer for inference.

Prompt and answer have 1,024 tokens each, and there is one head of keys and values. They give 1.29 B parameters, while
the paper states 5 B.
"""


def itx() -> Program:
    """Build a decoding step of 256 texts."""
    return ITX.program()


def decode_small() -> Program:
    """Build one small layer."""
    return Decoder(base=replace(SMALL_GEMMA, tokens=1), cached=6).program()
