"""Multi-head latent attention (MLA): keys and values from one latent per token.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C; megatron-core multi_latent_attention.py for what tp
cuts and copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from costmodels.blocks.attention_core import AttentionCore
from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
from costmodels.blocks.graph import HEADS, HIDDEN, ROWS, BlockGraph, enter, leave
from costmodels.blocks.mask import Mask
from costmodels.blocks.matrix import Matrix
from costmodels.blocks.operator import Family, Operator
from costmodels.blocks.tally import BlockMemory, Tally
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention(AbstractBlock):
    """Multi-head latent attention.

    Attributes:
        hidden_size: Width of a token.
        num_heads: Heads.
        q_lora_rank: Rank of the query projection; 0 where queries are projected directly.
        kv_lora_rank: Rank of the joint key and value projection.
        qk_nope_head_dim: Part of a query head without positions.
        qk_rope_head_dim: Part of a query head with rotary positions; its key is shared by all heads.
        v_head_dim: Size of one value head.
        rank_norms: Whether the results of the two down projections are normalised.
        down_bias: Whether the two down projections have biases.
        output_bias: Whether the output has a bias.
        rotary: Whether there are rotary positions.
        mask: Mask.
        norms: Norms over the hidden size that belong to the block.
        norm_size: Parameters of one such norm.
    """

    kind: ClassVar[str] = "latent_attention"
    family: ClassVar[Family] = Family.MIXER

    hidden_size: int
    num_heads: int
    q_lora_rank: int = 0
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rank_norms: bool = True
    down_bias: bool = False
    output_bias: bool = False
    rotary: bool = True
    mask: Mask = field(default_factory=Mask)
    norms: float = 1.0
    norm_size: int

    @property
    def label(self) -> str:
        """Word for the block in the names of operators: that of every model's main attention."""
        return "attention"

    @property
    def head_dim(self) -> int:
        """Size of one query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def q_size(self) -> int:
        """Width of the queries."""
        return self.num_heads * self.head_dim

    @property
    def context_size(self) -> int:
        """Width of the heads' results."""
        return self.num_heads * self.v_head_dim

    @property
    def _down_parameters(self) -> int:
        return self.hidden_size * (self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim)

    @property
    def _whole_parameters(self) -> int:
        """Parameters without the norms over the hidden size: down to the ranks, their norms, up, and the output."""
        h, kv_down = self.hidden_size, self.kv_lora_rank + self.qk_rope_head_dim
        kv_up = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        keys_values = h * kv_down + self.rank_norms * self.kv_lora_rank + self.kv_lora_rank * kv_up
        biases = (self.q_lora_rank + kv_down if self.down_bias else 0) + (h if self.output_bias else 0)
        output = self.context_size * h
        if not self.q_lora_rank:
            return h * self.q_size + keys_values + biases + output
        queries = h * self.q_lora_rank + self.rank_norms * self.q_lora_rank + self.q_lora_rank * self.q_size
        return queries + keys_values + biases + output

    @property
    def attention_parameters(self) -> int:
        """Parameters of projections, their biases, and the norms."""
        return self._whole_parameters + round(self.norms * self.norm_size)

    @property
    def parameters(self) -> int:
        """Parameters of the whole block."""
        return self.attention_parameters

    def mixing_flops(self, length: FloatArray | float) -> FloatArray | float:
        """Return the FLOPs of scores and context of one token, a causal mask not halved (PaLM, appendix B)."""
        share = self.mask.share(length) * (2.0 if self.mask.causal else 1.0)
        return 2.0 * length * share * (self.q_size + self.context_size)

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]: down projections make the latent on every tp rank and are copied."""
        copied = self._down_parameters
        cut = (self._whole_parameters - copied) / degrees.tp.astype(np.float64)
        return HeldParameters(dense=cut + (copied + self.norms * self.norm_size))

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the norm, projections down to the ranks and up, rotary positions, the output and the residual."""
        context, h = build.context, self.hidden_size
        tokens, heads = context.tokens, self.num_heads / context.degrees.tp
        queries, up = heads * self.head_dim, build.of_module("mla_up_proj")
        operators = build.norm(h, norms=self.norms)
        if self.q_lora_rank:
            operators += build.matmul("q_down", context.residual, h, self.q_lora_rank)
        operators += up.matmul("q_up", tokens, self.q_lora_rank or h, queries)
        operators += build.matmul("kv_down", context.residual, h, self.kv_lora_rank + self.qk_rope_head_dim)
        operators += up.matmul("kv_up", tokens, self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim))
        if self.rotary:  # every head has its own key
            operators += build.elementwise("rotary", tokens * (2 * queries), 2, 2)
        operators += self.core(build)
        operators += build.matmul("proj", tokens, heads * self.v_head_dim, h)
        return operators + build.add_residual(h)

    def _core(self, context: BlockContext) -> AttentionCore:
        return AttentionCore(
            mask=self.mask,
            heads=self.num_heads / context.degrees.tp,
            head_dim=self.head_dim,
            value_head_dim=self.v_head_dim,
            kv_size=self.num_heads * self.v_head_dim / context.degrees.tp,
        )

    def core(self, build: OperatorBuilder) -> list[Operator]:
        """Return attention between the projections; keys and values are expanded to all heads."""
        return self._core(build.context).operators(build)

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally the inputs of norm and first products, latents, q, k, v, and the tensors of core and projection."""
        context, width, tokens = tally.context, tally.width, tally.tokens
        facts, heads = context.facts, self.num_heads / context.degrees.tp
        queries = width * tokens * heads * self.head_dim
        # Latent attention expands keys and values to all heads.
        key_values = width * tokens * heads * (self.head_dim + self.v_head_dim)
        output = width * tokens * heads * self.v_head_dim
        # Each latent is kept before and after its norm.
        latent = (1 + self.rank_norms) * width * tally.residual * (self.q_lora_rank + self.kv_lora_rank)
        core = self._core(context).kept_bytes(context)
        kept = tally.hidden + tally.kept_input + latent + queries + key_values + output + core
        if tally.input_share < 1:
            kept = kept + tally.input_share * output  # the projection's narrow input, beside attention's 16-bit output
        if not facts.fused_elementwise and self.rotary:
            kept = kept + key_values  # rotary embeddings write the keys anew beside the product's output
        kept = kept + np.where(context.degrees.up > 1, output, 0.0)  # the output before and after the exchange of heads
        if facts.selective_products:
            # the layer's input, the products of queries and values, and attention with its output
            products = tally.hidden + queries + key_values / 2 + output + core + tally.scattered
            dropped = np.maximum(kept - products, 0.0)
        else:
            dropped = tally.drops("core_attn") * core + tally.drops("layernorm") * tally.hidden
            dropped = dropped + tally.drops("mla_up_proj") * (queries + key_values)
        return BlockMemory(kept=kept, dropped=dropped, gradient=np.zeros_like(kept))

    def exchanges(self, context: BlockContext) -> Exchanges:
        """Return keys and values of the ring, and what Ulysses sends: q, k, v and the output of all heads."""
        tp = context.degrees.tp
        per_token = self.num_heads * (2 * self.head_dim + 2 * self.v_head_dim)
        return Exchanges(
            tensor=True,
            ring=2 * context.tokens * (self.num_heads * self.v_head_dim / tp),
            heads=context.tokens * per_token / tp,
        )

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:  # noqa: ARG002
        """Return the matrices down to the ranks, up from them, and of the output."""
        tp, h = degrees.tp.astype(np.float64), self.hidden_size
        up = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        query = [Matrix(rows=self.q_lora_rank, columns=h, cut="none", ways=tp)] if self.q_lora_rank else []
        return [
            *query,
            Matrix(rows=self.q_size, columns=self.q_lora_rank or h, cut="rows", ways=tp),
            Matrix(rows=self.kv_lora_rank + self.qk_rope_head_dim, columns=h, cut="none", ways=tp),
            Matrix(rows=up, columns=self.kv_lora_rank, cut="rows", ways=tp),
            Matrix(rows=h, columns=self.context_size, cut="columns", ways=tp),
        ]

    def add_to(self, graph: BlockGraph, x: int) -> int:
        """Add the norm, the heads from their latents, attention, the output and the residual."""
        graph = graph.sized(
            kv_heads=self.num_heads,
            query_groups=1,
            head_dim=self.head_dim,
            value_dim=self.v_head_dim,
            plain_dim=self.qk_nope_head_dim,
            rotary_dim=self.qk_rope_head_dim,
            query_rank=self.q_lora_rank or 1,
            latent_rank=self.kv_lora_rank,
        )
        normed = enter(self, graph, x)
        queries, rank = self._add_queries(graph, normed)
        keys, values = self._add_keys(graph, normed)
        if self.rotary:
            queries = graph.rotary("query_rotary", queries)
        y = graph.attention("core", (queries, keys, values), self.mask, chosen=self._add_choice(graph, normed, rank))
        (y,) = graph.linear("out", (y, f"{ROWS} {HEADS} value_dim"), {"": (f"{HEADS} value_dim hidden", HIDDEN)})
        if self.output_bias:
            y = graph.bias("out_bias", y, "hidden")
        return leave(self, graph, x, y)

    def _add_choice(self, graph: BlockGraph, normed: int, rank: int) -> int | None:  # noqa: ARG002
        """Return that a query sees all keys under the mask."""
        return None

    def _add_queries(self, graph: BlockGraph, normed: int) -> tuple[int, int]:
        """Add the queries; return them, and what they are projected from."""
        queries = f"{HEADS} head_dim"
        if not self.q_lora_rank:
            (made,) = graph.linear("q_up", (normed, HIDDEN), {"": (f"hidden {queries}", f"{ROWS} {queries}")})
            return made, normed
        (rank,) = graph.linear("q_down", (normed, HIDDEN), {"": ("hidden query_rank", f"{ROWS} query_rank")})
        if self.down_bias:
            rank = graph.bias("q_down_bias", rank, "query_rank")
        rank = graph.norm("q_norm", rank, over="query_rank")
        weight = (f"query_rank {queries}", f"{ROWS} {queries}")
        (made,) = graph.linear("q_up", (rank, f"{ROWS} query_rank"), {"": weight})
        return made, rank

    def _add_keys(self, graph: BlockGraph, normed: int) -> tuple[int, int]:
        """Add keys and values; the key's rotary part comes directly from the hidden vector."""
        down = {
            "latent": ("hidden latent_rank", f"{ROWS} latent_rank"),
            "rotary": ("hidden rotary_dim", f"{ROWS} rotary_dim"),
        }
        latent, turned = graph.linear("kv_down", (normed, HIDDEN), down)
        if self.down_bias:
            latent = graph.bias("kv_down_bias", latent, "latent_rank")
            turned = graph.bias("kv_down_rotary_bias", turned, "rotary_dim")
        latent = graph.norm("kv_norm", latent, over="latent_rank")
        up = {
            label: (f"latent_rank kv_heads {dim}", f"{ROWS} kv_heads {dim}")
            for label, dim in (("key", "plain_dim"), ("value", "value_dim"))
        }
        plain, values = graph.linear("kv_up", (latent, f"{ROWS} latent_rank"), up)
        return graph.latent_key("key_rotary", plain, turned), values

    def sizes(self) -> dict[str, int]:
        """Return the heads; every head has its own key."""
        return {"heads": self.num_heads, "kv_heads": self.num_heads}

    def cached(self, tp: int) -> float:  # noqa: ARG002 # every rank of tp has the whole latent
        """Return the latent of one token."""
        return self.kv_lora_rank + self.qk_rope_head_dim
