"""Cross attention with its norm, projections and residual: queries of one row of layers, keys and values of another.

Both rows have equally many tokens. Source: Vaswani et al. 2017, section 3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from costmodels.blocks.attention import Attention
from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
from costmodels.blocks.mask import Mask
from costmodels.blocks.matrix import Matrix
from costmodels.blocks.operator import Family, Operator
from costmodels.blocks.tally import BlockMemory, Tally
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttention(AbstractBlock):
    """Attention of a decoder to the results of an encoder.

    Attributes:
        hidden_size: Width of a token of both rows.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Size of one head.
        bias: Whether the projections have biases.
        norms: Norms over the hidden size that belong to the block.
        norm_size: Parameters of one such norm.
    """

    kind: ClassVar[str] = "cross_attention"
    family: ClassVar[Family] = Family.MIXER

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    norms: float = 1.0
    norm_size: int

    @property
    def _own(self) -> Attention:
        """Attention of the same sizes, from which only the products before the core differ."""
        return Attention(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            qkv_bias=self.bias,
            output_bias=self.bias,
            rotary=False,
            mask=Mask(causal=False),
            norms=self.norms,
            norm_size=self.norm_size,
        )

    @property
    def parameters(self) -> int:
        """Parameters of projections, their biases, and the norms."""
        return self._own.parameters

    def mixing_flops(self, length: FloatArray | float) -> FloatArray | float:
        """Return the FLOPs of scores and context of one token: it sees all tokens of the other row."""
        return self._own.mixing_flops(length)

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]."""
        return self._own.held(degrees)

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the norm, the products of queries, and of keys and values, the core, the projection, the residual."""
        context, own = build.context, self._own
        queries, keys = self.num_heads / context.degrees.tp * self.head_dim, own.local_kv(context.degrees)
        return [
            *build.norm(self.hidden_size, norms=self.norms),
            *build.matmul("q", context.tokens, self.hidden_size, queries, kept_share=1.0),
            *build.matmul("kv", context.tokens, self.hidden_size, 2 * keys, kept_share=0.5),
            *self.core(build),
            *build.matmul("proj", context.tokens, queries, self.hidden_size),
            *build.add_residual(self.hidden_size),
        ]

    def core(self, build: OperatorBuilder) -> list[Operator]:
        """Return attention between the projections."""
        return self._own.core(build)

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally what attention keeps; the other row's results are kept once, by the last of its layers."""
        return self._own.memory(tally)

    def exchanges(self, context: BlockContext) -> Exchanges:
        """Return keys and values of the ring, and what Ulysses sends."""
        return self._own.exchanges(context)

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:  # noqa: ARG002
        """Return the matrices of queries, of keys and values, and of the output, which are apart."""
        return self._own.matrices(degrees, joins_gate=joins_gate, splits_qkv=True)

    def sizes(self) -> dict[str, int]:
        """Return the heads, and the width of the wider product."""
        kv_size = 2 * self.num_kv_heads * self.head_dim
        return self._own.sizes() | {"projection": max(self.num_heads * self.head_dim, kv_size)}

    def cached(self, tp: int) -> float:
        """Return the keys and values of one token."""
        return self._own.cached(tp)
