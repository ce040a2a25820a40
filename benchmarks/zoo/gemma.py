"""Gemma: a dense transformer with one head of keys and values, trained.

Shape letters: B batch, T tokens, D model, N heads, H head, F hidden, V vocabulary, K keys or values, G gate or up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.zoo.layers import attention, cross_entropy, rms_norm, rotated
from benchmarks.zoo.programs import Program, Tree, shape_of, train_program


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma:
    """Sizes of a dense transformer with one head of keys and values, gated hidden layers and tied embeddings."""

    layers: int
    model: int
    heads: int
    head: int
    hidden: int
    vocabulary: int
    batch: int
    tokens: int
    is_scanned: bool = False

    def layer(self, stacked: int = 0) -> Tree:
        """The parameters of one layer, or of all in one stack."""
        lead = (stacked,) if stacked else ()
        shapes = {
            "attention_norm": (self.model,),
            "query": (self.model, self.heads, self.head),
            "key_value": (2, self.model, self.head),
            "out": (self.heads, self.head, self.model),
            "hidden_norm": (self.model,),
            "gate_up": (2, self.model, self.hidden),
            "down": (self.hidden, self.model),
        }
        return {name: shape_of(*lead, *shape) for name, shape in shapes.items()}

    def params(self) -> Tree:
        """All parameters."""
        layers = (
            self.layer(self.layers) if self.is_scanned else {str(number): self.layer() for number in range(self.layers)}
        )
        return {
            "embedding": shape_of(self.vocabulary, self.model),
            "layers": layers,
            "norm": shape_of(self.model),
        }

    def attend(self, layer: Tree, x_btd: Array, positions: Array, mask: Array) -> Array:
        """What attention adds."""
        normed = rms_norm(x_btd, layer["attention_norm"])
        queries = rotated(jnp.einsum("btd,dnh->btnh", normed, layer["query"]), positions)
        keys, values = jnp.einsum("btd,kdh->kbth", normed, layer["key_value"])
        keys = rotated(keys[:, :, None, :], positions)[:, :, 0, :]
        return jnp.einsum("btnh,nhd->btd", attention(queries, keys, values, mask), layer["out"])

    def hide(self, layer: Tree, x_btd: Array) -> Array:
        """What the hidden layer adds."""
        gate, up = jnp.einsum("btd,gdf->gbtf", rms_norm(x_btd, layer["hidden_norm"]), layer["gate_up"])
        return jnp.einsum("btf,fd->btd", jax.nn.gelu(gate) * up, layer["down"])

    def loss(self, params: Tree, batch: Tree) -> Array:
        """Cross entropy of the next tokens."""
        positions = jnp.arange(self.tokens)
        mask = jnp.tril(jnp.ones((self.tokens, self.tokens), dtype=bool))

        def through(x_btd: Array, layer: Tree) -> Array:
            with jax.named_scope("attention"):
                x_btd = x_btd + self.attend(layer, x_btd, positions, mask)
            with jax.named_scope("mlp"):
                return x_btd + self.hide(layer, x_btd)

        with jax.named_scope("embedding"):
            x_btd = params["embedding"][batch["tokens"]] * math.sqrt(self.model)
        if self.is_scanned:
            with jax.named_scope("layers"):
                x_btd, _ = lax.scan(lambda x, layer: (through(x, layer), None), x_btd, params["layers"])
        else:
            for number in range(self.layers):
                with jax.named_scope(f"layers.{number}"):
                    x_btd = through(x_btd, params["layers"][str(number)])
        with jax.named_scope("head"):
            logits_btv = jnp.einsum("btd,vd->btv", rms_norm(x_btd, params["norm"]), params["embedding"])
            return cross_entropy(logits_btv, batch["targets"])

    def train_program(self) -> Program:
        """One training step."""
        tokens = shape_of(self.batch, self.tokens, dtype=jnp.int32)
        return train_program(self.loss, self.params(), {"tokens": tokens, "targets": tokens})


GEMMA_2B = Gemma(layers=18, model=2048, heads=8, head=256, hidden=16_384, vocabulary=256_128, batch=16, tokens=2048)
"""The sizes of Gemma 2B (Gemma team 2024, table 1), its vocabulary padded to a multiple of 128."""

SMALL_GEMMA = Gemma(layers=1, model=16, heads=4, head=8, hidden=24, vocabulary=36, batch=2, tokens=6)


def gemma_2b() -> Program:
    """Gemma 2B, its 18 layers one after the other."""
    return GEMMA_2B.train_program()


def gemma_2b_scan() -> Program:
    """Gemma 2B as a loop over stacked layers."""
    return replace(GEMMA_2B, is_scanned=True).train_program()


def gemma_small() -> Program:
    """One small layer."""
    return SMALL_GEMMA.train_program()


def gemma_small_scan() -> Program:
    """Three small layers as a loop."""
    return replace(SMALL_GEMMA, layers=3, is_scanned=True).train_program()
