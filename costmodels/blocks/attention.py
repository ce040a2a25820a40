"""Softmax attention with its norm, projections and residual: multi-head or grouped-query, under any mask.

Sources: Vaswani et al. 2017 for the block; Ainslie et al. 2023 (GQA) for grouped keys; Shoeybi et al. 2019, section 3,
for what tp cuts; Jacobs et al. 2023, section 3.2, for the exchange of heads.
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
from hardware.io.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention(AbstractBlock):
    """Multi-head or grouped-query attention.

    Attributes:
        hidden_size: Width of a token.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Size of one head.
        qkv_bias: Whether queries, keys and values have biases.
        output_bias: Whether the output has a bias.
        qk_norm_size: Parameters of the norms of queries and keys; 0 without.
        kv_projections: Products of the hidden values that make keys and values: 2, 1 where values are keys (Gemma 4), 0
            where both are an earlier layer's (Gemma 3n).
        rotary: Whether queries and keys are rotated by their positions.
        gate_size: Outputs of a gate that scales the heads' results: one for each element, one for each head, or 0 for
            none (Qwen3-Next; Qiu et al. 2025, arXiv 2505.06708).
        sinks: Whether each head has a learned logit that no value belongs to (gpt-oss; Xiao et al. 2023).
        distance_table: Parameters of a learned bias of scores by the distance of a query and a key (Raffel et al. 2020,
            T5); 0 without.
        mask: Mask.
        norms: Norms over the hidden size that belong to the block.
        norm_size: Parameters of one such norm.
    """

    kind: ClassVar[str] = "attention"
    family: ClassVar[Family] = Family.MIXER

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_size: int = 0
    kv_projections: int = 2
    rotary: bool = True
    gate_size: int = 0
    sinks: bool = False
    distance_table: int = 0
    mask: Mask = field(default_factory=Mask)
    norms: float = 1.0
    norm_size: int

    @property
    def label(self) -> str:
        """Kind with its mask."""
        return f"{self.mask.label}_{self.kind}" if self.mask.label else self.kind

    @property
    def q_size(self) -> int:
        """Width of the queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def _cut_parameters(self) -> int:
        width = self.q_size + self.kv_projections * self.kv_size + self.gate_size
        inputs = self.hidden_size * width + (width if self.qkv_bias else 0)
        output = self.q_size * self.hidden_size + (self.hidden_size if self.output_bias else 0)
        return inputs + output + self.qk_norm_size + (self.num_heads if self.sinks else 0) + self.distance_table

    @property
    def parameters(self) -> int:
        """Parameters of projections, their biases, and the norms."""
        return self._cut_parameters + round(self.norms * self.norm_size)

    def mixing_flops(self, length: FloatArray | float) -> FloatArray | float:
        """Return the FLOPs of scores and context of one token, a causal mask not halved (PaLM, appendix B)."""
        share = self.mask.share(length) * (2.0 if self.mask.causal else 1.0)
        return 2.0 * length * share * 2 * self.q_size

    def local_kv(self, degrees: Degrees) -> FloatArray:
        """Return the key (or value) elements per token on a tp rank [n]; heads are copied where tp is more."""
        return np.maximum(self.num_kv_heads / degrees.tp, 1.0) * self.head_dim

    def _exchanged_kv(self, degrees: Degrees) -> FloatArray:
        """Return the key elements that Ulysses and the ring send: heads repeated until up divides them [n]."""
        size = self.local_kv(degrees)
        # Ulysses deals whole heads: the least common multiple of heads and up, over up
        heads = np.rint(size / self.head_dim).astype(np.int64)
        return size * (degrees.up // np.gcd(heads, degrees.up))

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]: tp divides matrices and heads, norms are copied."""
        tp = degrees.tp.astype(np.float64)
        # A rank has whole key-value heads: where tp exceeds their number, the heads are copied.
        extra_kv = self.local_kv(degrees) - self.num_kv_heads * self.head_dim / tp
        copied = self.norms * self.norm_size
        repeated = self.kv_projections * self.hidden_size * extra_kv
        return HeldParameters(dense=self._cut_parameters / tp + repeated + copied)

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the norm, the projections, rotary positions, the core and the residual."""
        context = build.context
        tokens, tp = context.tokens, context.degrees.tp
        queries, keys = self.num_heads / tp * self.head_dim, self.local_kv(context.degrees)
        gates = self.gate_size / tp
        width = queries + gates + self.kv_projections * keys
        operators = build.norm(self.hidden_size, norms=self.norms, is_fused=True)
        # of the products of queries, keys and values, the second is not kept
        operators += build.matmul("qkv", tokens, self.hidden_size, width, kept_share=1.0 - keys / width)
        if self.rotary:  # rotary positions change queries and keys, not values
            operators += build.elementwise("rotary", tokens * (queries + keys), 2, 2)
        operators += self.core(build)
        if self.gate_size:
            operators += build.activation("gate", tokens * queries, gated=True)
        operators += build.matmul("proj", tokens, queries, self.hidden_size)
        return operators + build.add_residual(self.hidden_size)

    def _core(self, context: BlockContext) -> AttentionCore:
        return AttentionCore(
            mask=self.mask,
            heads=self.num_heads / context.degrees.tp,
            head_dim=self.head_dim,
            value_head_dim=self.head_dim,
            kv_size=self.local_kv(context.degrees),
        )

    def core(self, build: OperatorBuilder) -> list[Operator]:
        """Return attention between the projections."""
        return self._core(build.context).operators(build)

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally the inputs of norm and first product, q, k, v, and the tensors of the core and the projection."""
        context, width, tokens = tally.context, tally.width, tally.tokens
        facts, heads = context.facts, self.num_heads / context.degrees.tp
        # Attention keeps q, k, v and its output per local head; keys and values may have fewer heads than queries.
        queries = width * tokens * heads * self.head_dim
        key_values = 2 * width * tokens * self.local_kv(context.degrees)
        output = width * tokens * heads * self.head_dim
        core = self._core(context).kept_bytes(context)
        kept = tally.hidden + tally.kept_input + queries + key_values + output + core
        if self.gate_size:  # the gate, and the output that it scales
            kept = kept + width * tokens * (self.gate_size / context.degrees.tp) + output
        if tally.input_share < 1:
            kept = kept + tally.input_share * output  # the projection's narrow input, beside attention's 16-bit output
        if self.qk_norm_size:
            kept = kept + queries + key_values / 2  # queries and keys before their norms
        if not facts.fused_elementwise and self.rotary:
            kept = kept + key_values  # rotary embeddings write the keys anew beside the product's output
        kept = kept + np.where(context.degrees.up > 1, output, 0.0)  # the output before and after the exchange of heads
        if facts.selective_products:
            # the layer's input, the products of queries and values, and attention with its output
            products = tally.hidden + queries + key_values / 2 + output + core + tally.scattered
            dropped = np.maximum(kept - products, 0.0)
        else:
            dropped = tally.drops("core_attn") * core
        return BlockMemory(kept=kept, dropped=dropped, gradient=np.zeros_like(kept))

    def exchanges(self, context: BlockContext) -> Exchanges:
        """Return keys and values of the ring, and what Ulysses sends: q, k, v and the output."""
        keys = self._exchanged_kv(context.degrees)
        queries = self.num_heads * self.head_dim / context.degrees.tp
        return Exchanges(tensor=True, ring=2 * context.tokens * keys, heads=context.tokens * 2 * (queries + keys))

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:  # noqa: ARG002
        """Return the matrices of queries, keys and values, apart or together, of the gate and of the output."""
        tp, h = degrees.tp.astype(np.float64), self.hidden_size
        # a rank has whole key-value heads, which are copied where tp exceeds their number
        kv_ways = self.kv_size / self.local_kv(degrees)
        output = Matrix(rows=h, columns=self.q_size, cut="columns", ways=tp)
        gate = [Matrix(rows=self.gate_size, columns=h, cut="rows", ways=tp)] if self.gate_size else []
        if not splits_qkv:
            number = self.kv_projections
            whole = self.q_size + number * self.kv_size
            ways = whole / (self.q_size / tp + number * self.kv_size / kv_ways)
            return [Matrix(rows=whole, columns=h, cut="rows", ways=ways), *gate, output]
        queries = Matrix(rows=self.q_size, columns=h, cut="rows", ways=tp)
        keys = Matrix(rows=self.kv_size, columns=h, cut="rows", ways=kv_ways, each=float(self.kv_projections))
        return [queries, *([keys] if self.kv_projections else []), *gate, output]

    def add_to(self, graph: BlockGraph, x: int) -> int:
        """Add the norm, the heads, attention, its gate, the output and the residual.

        Raises:
            ConfigError: Keys and values are an earlier layer's.
        """
        if not self.kv_projections:
            raise ConfigError(
                "has attention to the keys and values of an earlier layer, of which no graph is known",
                key="model",
                nearest="planner: {name: megatron}, the plan by hand",
            )
        graph = graph.sized(
            kv_heads=self.num_kv_heads,
            query_groups=self.num_heads // self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
        )
        made = self._add_heads(graph, enter(self, graph, x))
        sink = graph.parameter("core.sink", HEADS) if self.sinks else None
        y = graph.attention("core", (made["query"], made["key"], made["value"]), self.mask, sink=sink)
        if self.gate_size:
            y = graph.scale("gate", y, made["gate"])
        (y,) = graph.linear("out", (y, f"{ROWS} {HEADS} value_dim"), {"": (f"{HEADS} value_dim hidden", HIDDEN)})
        if self.output_bias:
            y = graph.bias("out_bias", y, "hidden")
        return leave(self, graph, x, y)

    def _add_heads(self, graph: BlockGraph, x: int) -> dict[str, int]:
        """Add queries, keys, values and the gate, computed from the hidden vectors.

        They are one operator, so that its input gradient is a single partial sum if heads are partitioned. With one key
        head for all queries, the query heads can be partitioned and the key head cannot, so there are two operators.
        """
        dims = {"query": f"{HEADS} head_dim", "key": "kv_heads head_dim", "value": "kv_heads head_dim"}
        if self.kv_projections == 1:
            del dims["value"]
        if self.gate_size:  # one for each head, or for each of its elements
            dims["gate"] = HEADS if self.gate_size == self.num_heads else f"{HEADS} value_dim"
        parts = {"qkv": tuple(dims)}
        if self.num_kv_heads == 1 < self.num_heads:
            of_keys = tuple(label for label in dims if label in ("key", "value"))
            parts = {"q": tuple(label for label in dims if label not in of_keys), "kv": of_keys}
        made: dict[str, int] = {}
        for role, labels in parts.items():
            weights = {label: (f"hidden {dims[label]}", f"{ROWS} {dims[label]}") for label in labels}
            made.update(zip(labels, graph.linear(role, (x, HIDDEN), weights), strict=True))
        for label, pattern in dims.items():
            if self.qkv_bias:
                made[label] = graph.bias(f"{label}_bias", made[label], pattern)
            if label == "key":  # values that are keys have no positions
                made.setdefault("value", made["key"])
            if label in ("query", "key"):
                made[label] = self._add_positions(graph, label, made[label])
        return made

    def _add_positions(self, graph: BlockGraph, label: str, x: int) -> int:
        """Add the norm and the rotary positions of queries or keys, where attention has them."""
        if self.qk_norm_size:
            # one weight for each element of a head, or of all heads, which are then normalised together
            heads = HEADS if label == "query" else "kv_heads"
            over = "head_dim" if self.qk_norm_size == 2 * self.head_dim else f"{heads} head_dim"
            x = graph.norm(f"{label}_add_norm", x, over=over)
        return graph.rotary(f"{label}_rotary", x) if self.rotary else x

    def sizes(self) -> dict[str, int]:
        """Return the heads, and the width of the product for queries, keys and values."""
        width = self.q_size + self.kv_projections * self.kv_size
        return {"heads": self.num_heads, "kv_heads": self.num_kv_heads, "projection": width}

    def cached(self, tp: int) -> float:
        """Return the keys and values of one token."""
        return 2 * max(self.num_kv_heads / tp, 1.0) * self.head_dim
