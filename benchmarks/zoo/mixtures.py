"""Training step of a mixture of experts.

Shape letters: B batch, T tokens, D model, F hidden, V vocabulary, E experts, C an expert's capacity, K the experts of a
token, G gate or up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.zoo.gemma import SMALL_GEMMA, Gemma
from benchmarks.zoo.layers import cross_entropy, rms_norm
from benchmarks.zoo.programs import Program, Tree, shape_of, train_program


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Sizes of a transformer whose hidden layers are experts, two of which serve a token up to their capacity."""

    base: Gemma
    experts: int
    capacity: int

    def params(self) -> Tree:
        """Return the shapes of all parameters."""
        found = self.base.params()
        for layer in found["layers"].values():
            layer["router"] = shape_of(self.base.model, self.experts)
            layer["gate_up"] = shape_of(2, self.experts, self.base.model, self.base.hidden)
            layer["down"] = shape_of(self.experts, self.base.hidden, self.base.model)
        return found

    def hide(self, layer: Tree, x_btd: Array) -> Array:
        """Apply the experts; products send tokens to their places and back (GShard, algorithm 1)."""
        normed = rms_norm(x_btd, layer["hidden_norm"])
        chances_bte = jax.nn.softmax(jnp.einsum("btd,de->bte", normed, layer["router"]).astype(jnp.float32), axis=-1)
        # The weights of the two chosen experts are normalised to sum up to 1.
        weights_btk, chosen_btk = lax.top_k(chances_bte, 2)
        weights_btk = weights_btk / jnp.sum(weights_btk, axis=-1, keepdims=True)
        chosen_btke = jax.nn.one_hot(chosen_btk, self.experts, dtype=jnp.float32)
        # A token's place in an expert is the number of earlier tokens of that expert; beyond the capacity one_hot drops
        # it.
        taken_bte = jnp.sum(chosen_btke, axis=2)
        places_bte = jnp.cumsum(taken_bte, axis=1) - taken_bte
        slots_btec = jax.nn.one_hot(places_bte.astype(jnp.int32), self.capacity, dtype=jnp.float32)
        sent_btec = slots_btec * taken_bte[..., None]
        # The same slots bring results back, weighted by the router.
        combined_btec = jnp.einsum("btk,btke->bte", weights_btk, chosen_btke)[..., None] * slots_btec
        inside_ebcd = jnp.einsum("btec,btd->ebcd", sent_btec.astype(x_btd.dtype), normed)
        gate, up = jnp.einsum("ebcd,gedf->gebcf", inside_ebcd, layer["gate_up"])
        done_ebcd = jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(gate) * up, layer["down"])
        return jnp.einsum("btec,ebcd->btd", combined_btec.astype(x_btd.dtype), done_ebcd)

    def loss(self, params: Tree, batch: Tree) -> Array:
        """Compute the cross entropy of the next tokens."""
        base = self.base
        positions = jnp.arange(base.tokens)
        mask = jnp.tril(jnp.ones((base.tokens, base.tokens), dtype=bool))
        x_btd = params["embedding"][batch["tokens"]]
        for name, layer in params["layers"].items():
            with jax.named_scope(f"layers.{name}.attention"):
                x_btd = x_btd + base.attend(layer, x_btd, positions, mask)
            with jax.named_scope(f"layers.{name}.experts"):
                x_btd = x_btd + self.hide(layer, x_btd)
        with jax.named_scope("head"):
            return cross_entropy(base.logits(params, x_btd), batch["targets"])

    def train_program(self) -> Program:
        """Build one training step."""
        tokens = shape_of(self.base.batch, self.base.tokens, dtype=jnp.int32)
        return train_program(self.loss, self.params(), {"tokens": tokens, "targets": tokens})


FOUR_LAYERS = Mixture(
    base=Gemma(layers=4, model=4096, heads=32, head=128, hidden=14_336, vocabulary=32_000, batch=16, tokens=2048),
    experts=8,
    capacity=512,
)
"""Four layers of Mixtral's sizes; an expert's capacity is its number of tokens under equal load."""

MIXTRAL = replace(FOUR_LAYERS, base=replace(FOUR_LAYERS.base, layers=32, key_heads=8, is_tied=False))
"""Sizes of Mixtral 8x7B (Jiang et al. 2024, table 1), 46.7 B parameters."""


def mixtral() -> Program:
    """Build Mixtral 8x7B, with a capacity although its own dispatch has none."""
    return MIXTRAL.train_program()


def moe() -> Program:
    """Build four layers of the size of Mixtral 8x7B's, with one head of keys and values."""
    return FOUR_LAYERS.train_program()


def moe_small() -> Program:
    """Build one small layer of four experts."""
    return Mixture(base=SMALL_GEMMA, experts=4, capacity=10).train_program()
