"""Kimi delta attention (KDA): linear attention with a delta rule and a decay for every channel of a key.

Sources: Kimi Team 2025, Kimi Linear, arXiv 2510.26692, sections 3 and 4, for the chunked algorithm, which has the
products of a gated delta net; transformers' model code for the projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.graph import BlockGraph
from costmodels.blocks.operator import Operator
from costmodels.blocks.recurrent_mixer import RecurrentMixer
from hardware.arrays import FloatArray

CHUNK = 64
"""Tokens of a chunk (flash-linear-attention ops/kda/chunk.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaAttention(RecurrentMixer):
    """Kimi delta attention.

    Attributes:
        num_heads: Heads of queries, keys and values.
        head_dim: Size of one head, and rank of the projections to decays and to the gate.
        conv_size: Tokens that the convolution sees.
    """

    kind: ClassVar[str] = "delta_attention"

    num_heads: int
    head_dim: int
    conv_size: int = 4

    @property
    def inner_width(self) -> int:
        """Width of the values."""
        return self.num_heads * self.head_dim

    @property
    def input_width(self) -> int:
        """Width of queries, keys, values, of a learning rate per head, and of two vectors for decays and gate."""
        return 3 * self.inner_width + self.num_heads + 2 * self.head_dim

    @property
    def convolved_width(self) -> int:
        """Width of queries, keys and values."""
        return 3 * self.inner_width

    @property
    def small_parameters(self) -> int:
        """Parameters of the products to decays and gate, the convolution, the decays, and the norm of a head."""
        width, size = self.inner_width, self.head_dim
        return 2 * size * width + self.convolved_width * self.conv_size + width + self.num_heads + size

    @property
    def kept_width(self) -> float:
        """Elements of decays and gate, and of two triangular matrices of every chunk, a row of each per token."""
        return 2 * self.inner_width + 2 * self.num_heads * CHUNK

    @property
    def state_heads(self) -> int:
        """Heads, which tp deals whole."""
        return self.num_heads

    def add_to(self, graph: BlockGraph, x: int) -> int:
        """Refuse: the vectors behind decays and gate are of all heads, which no other such mixer has."""
        return AbstractBlock.add_to(self, graph, x)

    def scan(self, build: OperatorBuilder, tokens: FloatArray) -> list[Operator]:
        """Return the products to decays and gate, and those inside chunks, with values, and with the state."""
        heads, size = self.num_heads / build.context.degrees.tp, self.head_dim
        rows = tokens * heads
        return [
            *build.matmul("core.gates", tokens, size, 2 * heads * size),
            *build.chunked("core.chunk", rows, size, 3 * CHUNK),
            *build.chunked("core.values", rows, CHUNK, 2 * size),
            # the state is read for the new values and for the result, and it is written
            *build.chunked("core.state", rows, size, 3 * size),
        ]

    def mixing_flops(self, length: FloatArray | float) -> FloatArray | float:  # noqa: ARG002 # a state has no length
        """Return the FLOPs of the scan of one token."""
        return 2.0 * self.num_heads * self.head_dim * (5 * CHUNK + 3 * self.head_dim)

    def sizes(self) -> dict[str, int]:
        """Return the heads, which tp deals whole, and cp and up too."""
        return {"state_heads": self.num_heads, "scanned_heads": self.num_heads}
