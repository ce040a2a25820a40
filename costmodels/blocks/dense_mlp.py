"""Dense MLP with its norm and residual: two matrices, or three if it is gated.

Sources: Shazeer 2020 (GLU variants) for gated MLPs; Shoeybi et al. 2019, section 3, for what tp cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
from costmodels.blocks.graph import ROWS, BlockGraph, enter, leave
from costmodels.blocks.matrix import Matrix, mlp_matrices
from costmodels.blocks.operator import Family, Operator
from costmodels.blocks.tally import BlockMemory, Tally
from hardware.arrays import FloatArray


def mlp_parameters(hidden_size: int, inner: int, *, gated: bool, bias: bool) -> int:
    """Return the parameters of one MLP."""
    inputs = 2 if gated else 1
    biases = inputs * inner + hidden_size if bias else 0
    return (inputs + 1) * hidden_size * inner + biases


def mlp_operators(
    build: OperatorBuilder, prefix: str, tokens: FloatArray, hidden_size: int, inner: FloatArray, *, gated: bool
) -> list[Operator]:
    """Return the products of an MLP and its activation.

    Of the products of a layer every second one may be kept: of w1 and w3, which are one operator here, w1, and w2,
    which is the seventh; without a gate up, but not down, which is the sixth.
    """
    kept_of_up, kept_of_down = (0.5, 1.0) if gated else (1.0, 0.0)
    return [
        *build.matmul(f"{prefix}up", tokens, hidden_size, inner * (1 + gated), kept_share=kept_of_up),
        *build.activation(f"{prefix}activation", tokens * inner, gated=gated),
        *build.matmul(f"{prefix}down", tokens, inner, hidden_size, kept_share=kept_of_down),
    ]


def add_mlp(
    graph: BlockGraph, x: int, ffn: str, *, gated: bool, bias: bool, rows: str = ROWS, width: str = "hidden"
) -> int:
    """Add the two products of an MLP and its activation to a graph, for all tokens or for each expert's own.

    The two inputs of a gate form a dim `gates`, so that a cut of the inner size splits both.

    Args:
        graph: Graph under construction.
        x: Input of the MLP.
        ffn: Factor of the inner size.
        gated: Whether there are three matrices instead of two.
        bias: Whether they have biases.
        rows: Pattern of the dims of tokens; experts' tokens begin with `experts`, who have a weight each.
        width: Factor of the tokens' width.
    """
    experts = "experts " if rows.startswith("experts ") else ""
    primitive, inner = "batch_matmul" if experts else "matmul", f"gates {ffn}" if gated else ffn
    graph = graph.sized(gates=2)
    weight = (f"{experts}{width} {inner}", f"{rows} {inner}")
    (y,) = graph.linear("up", (x, f"{rows} {width}"), {"": weight}, primitive=primitive)
    if bias:
        y = graph.bias("up_bias", y, f"{experts}{inner}")
    y = graph.activation("activation", y, f"{rows} {ffn}", is_gated=gated)
    weight = (f"{experts}{ffn} {width}", f"{rows} {width}")
    (y,) = graph.linear("down", (y, f"{rows} {ffn}"), {"": weight}, primitive=primitive)
    return graph.bias("down_bias", y, f"{experts}{width}") if bias else y


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseMlp(AbstractBlock):
    """MLP that every token visits.

    Attributes:
        hidden_size: Width of a token.
        ffn_size: Inner size.
        gated: Whether there are three matrices (SwiGLU, GeGLU) instead of two.
        bias: Whether the matrices have biases.
        norms: Norms over the hidden size that belong to the block.
        norm_size: Parameters of one such norm.
    """

    kind: ClassVar[str] = "dense_mlp"
    family: ClassVar[Family] = Family.MLP

    hidden_size: int
    ffn_size: int
    gated: bool
    bias: bool = False
    norms: float = 1.0
    norm_size: int

    @property
    def _cut_parameters(self) -> int:
        return mlp_parameters(self.hidden_size, self.ffn_size, gated=self.gated, bias=self.bias)

    @property
    def parameters(self) -> int:
        """Parameters of the MLP and its norms."""
        return self._cut_parameters + round(self.norms * self.norm_size)

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]: tp divides the matrices, norms are copied."""
        return HeldParameters(dense=self._cut_parameters / degrees.tp.astype(np.float64) + self.norms * self.norm_size)

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the norm, the products with the activation, and the residual."""
        context, own = build.context, build.of_module("mlp")
        inner = self.ffn_size / context.degrees.tp
        return [
            *build.norm(self.hidden_size, norms=self.norms, is_fused=True),
            *mlp_operators(own, "", context.tokens, self.hidden_size, inner, gated=self.gated),
            *build.add_residual(self.hidden_size),
        ]

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally the inputs of norm and first product, and the inner values before and after the activation."""
        first, last = tally.mlp(tally.tokens, self.ffn_size / tally.context.degrees.tp, gated=self.gated)
        kept = tally.hidden + tally.kept_input + first + last
        if tally.context.facts.selective_products:
            products = tally.second_products(first, gated=self.gated)
            dropped = np.maximum(kept - products - tally.scattered, 0.0)
        else:
            dropped = tally.drops("mlp") * (first + last)
        return BlockMemory(kept=kept, dropped=dropped, gradient=tally.hidden + first + tally.working)

    def exchanges(self, context: BlockContext) -> Exchanges:  # noqa: ARG002 # the contract's
        """Return that tp gathers the input and scatters the output."""
        return Exchanges(tensor=True)

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:  # noqa: ARG002
        """Return the two matrices, or the three of a gated MLP."""
        tp = degrees.tp.astype(np.float64)
        return mlp_matrices(self.hidden_size, self.ffn_size, tp, gated=self.gated, joins_gate=joins_gate)

    def add_to(self, graph: BlockGraph, x: int) -> int:
        """Add the norm, the products with the activation, and the residual."""
        normed, own = enter(self, graph, x), graph.sized(ffn=self.ffn_size)
        return leave(self, graph, x, add_mlp(own, normed, "ffn", gated=self.gated, bias=self.bias))

    def sizes(self) -> dict[str, int]:
        """Return the inner size."""
        return {"ffn": self.ffn_size}
