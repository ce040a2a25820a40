"""Latent attention over the keys that an indexer chooses (DeepSeek sparse attention, DSA).

Sources: DeepSeek-V3.2-Exp, section 2: a light indexer scores all earlier keys with few heads, and attention sees the
best index_topk of them; DeepSeek-V3.2's model code in transformers for the indexer's projections.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import Degrees
from costmodels.blocks.contract import HeldParameters
from costmodels.blocks.graph import HIDDEN, ROWS, BlockGraph
from costmodels.blocks.latent_attention import LatentAttention
from costmodels.blocks.matrix import Matrix
from costmodels.blocks.operator import Operator
from costmodels.blocks.tally import BlockMemory, Tally
from hardware.arrays import FloatArray

INDEX_BYTES = 4
"""Size of the number of a chosen key (int32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseLatentAttention(LatentAttention):
    """Latent attention with an indexer; its mask's window is the number of keys that a query sees.

    Attributes:
        index_heads: Heads of the indexer; 0 where the layer takes the choice of an earlier one.
        index_head_dim: Size of one of its heads.
    """

    kind: ClassVar[str] = "sparse_latent_attention"

    index_heads: int
    index_head_dim: int

    @property
    def label(self) -> str:
        """Word for the block in the names of operators."""
        return "sparse_attention"

    @property
    def _index_parameters(self) -> int:
        if not self.index_heads:
            return 0
        queries = (self.q_lora_rank or self.hidden_size) * self.index_heads * self.index_head_dim
        return queries + self.hidden_size * (self.index_head_dim + self.index_heads) + 2 * self.index_head_dim

    @property
    def parameters(self) -> int:
        """Parameters of attention and of the indexer."""
        return self.attention_parameters + self._index_parameters

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]; every tp rank has the whole indexer (megatron-core dsa.py)."""
        own = LatentAttention.held(self, degrees)
        return replace(own, dense=own.dense + self._index_parameters)

    def core(self, build: OperatorBuilder) -> list[Operator]:
        """Return the indexer, and attention over the keys that it chose.

        The indexer scores every earlier key, half of the square; its choice reads each score. Its inputs are detached,
        so that it learns its own weights alone (megatron-core dsa.py).
        """
        attention = self._core(build.context).operators(build)
        if not self.index_heads:
            return attention
        context, build = build.context, build.as_core().of_module("core_attn")
        queries = np.asarray(context.sequences * (context.length / (context.degrees.cp * context.degrees.up)))
        keys, width = context.length / 2.0, self.index_heads * self.index_head_dim
        rank = self.q_lora_rank or self.hidden_size
        inputs = [
            *build.matmul("core.index_queries", context.tokens, rank, width),
            *build.matmul("core.index_keys", context.tokens, self.hidden_size, self.index_head_dim + self.index_heads),
        ]
        return [
            *(operator for operator in inputs if not operator.name.endswith(".data_gradient")),
            *build.chunked("core.index_scores", queries * self.index_heads, self.index_head_dim, keys),
            *build.elementwise("core.index_choice", queries * keys, 3, 0, is_fused=True),
            *attention,
        ]

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:
        """Return the matrices of attention, and those of the indexer, which every rank has whole."""
        own = LatentAttention.matrices(self, degrees, joins_gate=joins_gate, splits_qkv=splits_qkv)
        if not self.index_heads:
            return own
        tp, rank = degrees.tp.astype(np.float64), self.q_lora_rank or self.hidden_size
        sizes = (
            (self.index_heads * self.index_head_dim, rank),
            (self.index_head_dim, self.hidden_size),
            (self.index_heads, self.hidden_size),
        )
        return own + [Matrix(rows=rows, columns=columns, cut="none", ways=tp) for rows, columns in sizes]

    def _add_choice(self, graph: BlockGraph, normed: int, rank: int) -> int | None:
        """Add the indexer, and return the keys that it chose for each query.

        A layer that takes the choice of an earlier one is planned without it. The gradient of the choice stands for the
        indexer's own loss, which compares its scores with attention's (DeepSeek-V3.2-Exp, section 2.1).
        """
        if not self.index_heads:
            return None
        length = graph.sequence_length
        chosen = min(self.mask.window or length, length)
        graph = graph.sized(index_heads=self.index_heads, index_dim=self.index_head_dim, chosen=chosen)
        inner, pattern = ("query_rank", f"{ROWS} query_rank") if self.q_lora_rank else ("hidden", HIDDEN)
        weight = (f"{inner} index_heads index_dim", f"{ROWS} index_heads index_dim")
        (queries,) = graph.linear("index_queries", (rank, pattern), {"": weight}, is_detached=True)
        parts = {
            "key": ("hidden index_dim", f"{ROWS} index_dim"),
            "share": ("hidden index_heads", f"{ROWS} index_heads"),
        }
        keys, shares = graph.linear("index_keys", (normed, HIDDEN), parts, is_detached=True)
        keys = graph.norm("index_add_norm", keys, over="index_dim", has_bias=True)
        # half of the square of queries and keys is scored, and only the chosen keys' numbers are written
        (made,) = graph.kernel(
            "index_choice",
            "index_choice",
            {
                "queries": (queries, "batch queries index_heads index_dim"),
                "keys": (keys, "batch keys index_dim"),
                "shares": (shares, "batch queries index_heads"),
            },
            {"": "batch queries chosen"},
            whole=("keys", "index_heads", "index_dim", "chosen"),
            element_bytes=INDEX_BYTES,
            flop=graph.batch * length * length * self.index_heads * self.index_head_dim,
        )
        return made

    def mixing_flops(self, length: FloatArray | float) -> FloatArray | float:
        """Return the FLOPs of one token: the indexer over all earlier keys, and attention over those it chose."""
        indexer = 2.0 * length * self.index_heads * self.index_head_dim
        return LatentAttention.mixing_flops(self, length) + indexer

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally attention's tensors, the indexer's queries and keys, and one number per chosen key."""
        own, context = LatentAttention.memory(self, tally), tally.context
        chosen = np.minimum(self.mask.window, np.asarray(context.length, dtype=np.float64))
        per_token = tally.width * (self.index_heads + 1) * self.index_head_dim * bool(self.index_heads) + 4 * chosen
        return replace(own, kept=own.kept + context.tokens * per_token)

    def cached(self, tp: int) -> float:
        """Return the latent of one token and its key of the indexer."""
        return LatentAttention.cached(self, tp) + self.index_head_dim * bool(self.index_heads)
