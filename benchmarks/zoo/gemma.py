"""Training step of Gemma, a dense transformer, and the parts that other transformers share with it.

Shape letters: B batch, T tokens, D model, N heads, H head, F hidden, V vocabulary, C keys or values, G gate or up.
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
    """Sizes of a dense transformer with gated hidden layers.

    Attributes:
        layers: Number of layers.
        model: Width of the residual stream.
        heads: Number of heads of queries.
        head: Width of one head.
        hidden: Width of gate and of up; TOAST's hidden dim is the sum of both.
        vocabulary: Number of tokens of the vocabulary.
        batch: Number of texts of a step.
        tokens: Number of tokens of a text.
        key_heads: Number of heads of keys and values: one, as many as of queries, or one for several of these.
        is_tied: Whether the embedding is also the head.
        is_scanned: Whether layers are a loop over stacked parameters.
    """

    layers: int
    model: int
    heads: int
    head: int
    hidden: int
    vocabulary: int
    batch: int
    tokens: int
    key_heads: int = 1
    is_tied: bool = True
    is_scanned: bool = False

    def layer(self, stacked: int = 0) -> Tree:
        """Return the shapes of one layer's parameters, or of all layers' parameters in one stack."""
        # Grouped queries have two dims of heads: the key head, and the queries that share it.
        lead = (stacked,) if stacked else ()
        heads: tuple[int, ...] = (self.heads,)
        if 1 < self.key_heads < self.heads:
            heads = (self.key_heads, self.heads // self.key_heads)
        of_keys = (self.key_heads,) if self.key_heads > 1 else ()
        shapes = {
            "attention_norm": (self.model,),
            "query": (self.model, *heads, self.head),
            "key_value": (2, self.model, *of_keys, self.head),
            "out": (*heads, self.head, self.model),
            "hidden_norm": (self.model,),
            "gate_up": (2, self.model, self.hidden),
            "down": (self.hidden, self.model),
        }
        return {name: shape_of(*lead, *shape) for name, shape in shapes.items()}

    def params(self) -> Tree:
        """Return the shapes of all parameters."""
        layers = (
            self.layer(self.layers) if self.is_scanned else {str(number): self.layer() for number in range(self.layers)}
        )
        embedding = shape_of(self.vocabulary, self.model)
        head = {} if self.is_tied else {"head": embedding}
        return {"embedding": embedding, "layers": layers, "norm": shape_of(self.model), **head}

    def attend(self, layer: Tree, x_btd: Array, positions: Array, mask: Array) -> Array:
        """Apply attention behind a norm, without the residual."""
        normed = rms_norm(x_btd, layer["attention_norm"])
        queries, keys, values = self.projected(layer, normed, positions)
        heads = "n" if queries.ndim == 4 else "kg"
        return jnp.einsum(f"bt{heads}h,{heads}hd->btd", attention(queries, keys, values, mask), layer["out"])

    def projected(self, layer: Tree, normed_btd: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Project to queries, keys and values as `attention` takes them, with rotary positions."""
        # The shapes of the parameters tell whether heads share keys; the einsums name the dims of heads accordingly.
        heads = "n" if layer["query"].ndim == 3 else "kg"
        queries = rotated(jnp.einsum(f"btd,d{heads}h->bt{heads}h", normed_btd, layer["query"]), positions)
        of_keys = heads[: layer["key_value"].ndim - 3]
        keys, values = jnp.einsum(f"btd,cd{of_keys}h->cbt{of_keys}h", normed_btd, layer["key_value"])
        # `rotated` expects a dim of heads, which a single shared head lacks.
        keys = rotated(keys, positions) if of_keys else rotated(keys[:, :, None, :], positions)[:, :, 0, :]
        return queries, keys, values

    def logits(self, params: Tree, x_btd: Array) -> Array:
        """Compute the logits of the next tokens [B, T, V]."""
        normed = rms_norm(x_btd, params["norm"])
        return jnp.einsum("btd,vd->btv", normed, params["embedding" if self.is_tied else "head"])

    def hide(self, layer: Tree, x_btd: Array) -> Array:
        """Apply the hidden layer behind a norm, without the residual."""
        # Gate and up are one product with stacked weights.
        gate, up = jnp.einsum("btd,gdf->gbtf", rms_norm(x_btd, layer["hidden_norm"]), layer["gate_up"])
        return jnp.einsum("btf,fd->btd", jax.nn.gelu(gate) * up, layer["down"])

    def loss(self, params: Tree, batch: Tree) -> Array:
        """Compute the cross entropy of the next tokens."""
        positions = jnp.arange(self.tokens)
        mask = jnp.tril(jnp.ones((self.tokens, self.tokens), dtype=bool))

        def through(x_btd: Array, layer: Tree) -> Array:
            with jax.named_scope("attention"):
                x_btd = x_btd + self.attend(layer, x_btd, positions, mask)
            with jax.named_scope("mlp"):
                return x_btd + self.hide(layer, x_btd)

        with jax.named_scope("embedding"):
            # Gemma scales embeddings by the root of the width.
            x_btd = params["embedding"][batch["tokens"]] * math.sqrt(self.model)
        if self.is_scanned:
            with jax.named_scope("layers"):
                # One traced layer for all, which keeps the program short.
                x_btd, _ = lax.scan(lambda x, layer: (through(x, layer), None), x_btd, params["layers"])
        else:
            for number in range(self.layers):
                with jax.named_scope(f"layers.{number}"):
                    x_btd = through(x_btd, params["layers"][str(number)])
        with jax.named_scope("head"):
            return cross_entropy(self.logits(params, x_btd), batch["targets"])

    def train_program(self) -> Program:
        """Build one training step."""
        tokens = shape_of(self.batch, self.tokens, dtype=jnp.int32)
        return train_program(self.loss, self.params(), {"tokens": tokens, "targets": tokens})


GEMMA_2B = Gemma(layers=18, model=2048, heads=8, head=256, hidden=16_384, vocabulary=256_128, batch=16, tokens=2048)
"""Sizes of Gemma 2B (Gemma team 2024, tables 1 and 2: 2,506,434,560 parameters)."""

GEMMA_7B = replace(GEMMA_2B, layers=28, model=3072, heads=16, key_heads=16, hidden=24_576)
"""Sizes of Gemma 7B (same tables: 8,538,074,112 parameters)."""

TOKENS_OF_A_STEP = 65_536
"""Number of tokens of a step with long sequences: two texts of 32k."""

SMALL_GEMMA = Gemma(layers=1, model=16, heads=4, head=8, hidden=24, vocabulary=36, batch=2, tokens=6)


def gemma_2b() -> Program:
    """Build Gemma 2B with its 18 layers one after the other."""
    return GEMMA_2B.train_program()


def gemma_2b_4k() -> Program:
    """Build Gemma 2B on 16 texts of 4,096 tokens."""
    return _of_length(4096)


def gemma_2b_8k() -> Program:
    """Build Gemma 2B on 8 texts of 8,192 tokens."""
    return _of_length(8192)


def gemma_2b_16k() -> Program:
    """Build Gemma 2B on 4 texts of 16,384 tokens."""
    return _of_length(16_384)


def gemma_2b_32k() -> Program:
    """Build Gemma 2B on 2 texts of 32,768 tokens."""
    return _of_length(32_768)


def _of_length(tokens: int) -> Program:
    return replace(GEMMA_2B, batch=TOKENS_OF_A_STEP // tokens, tokens=tokens).train_program()


def gemma_7b() -> Program:
    """Build Gemma 7B with its 28 layers one after the other."""
    return GEMMA_7B.train_program()


def gemma_2b_scan() -> Program:
    """Build Gemma 2B as a loop over stacked layers."""
    return replace(GEMMA_2B, is_scanned=True).train_program()


def gemma_small() -> Program:
    """Build one small layer."""
    return SMALL_GEMMA.train_program()


def gemma_small_scan() -> Program:
    """Build three small layers as a loop."""
    return replace(SMALL_GEMMA, layers=3, is_scanned=True).train_program()
