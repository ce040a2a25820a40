"""Join of a multi-token prediction module: the hidden values and the next token's embedding, projected to one width.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; megatron-core transformer/multi_token_prediction.py (enorm, hnorm,
eh_proj with its output gathered over tp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
from costmodels.blocks.graph import HIDDEN, ROWS, BlockGraph
from costmodels.blocks.matrix import Matrix
from costmodels.blocks.operator import Family, Operator
from costmodels.blocks.tally import BlockMemory, Tally


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionJoin(AbstractBlock):
    """Beginning of a multi-token prediction module.

    Attributes:
        hidden_size: Width of a token.
        norm_size: Parameters of one norm.
    """

    kind: ClassVar[str] = "prediction_join"
    family: ClassVar[Family] = Family.MLP

    hidden_size: int
    norm_size: int

    @property
    def parameters(self) -> int:
        """Parameters of the projection and of the two norms."""
        return 2 * self.hidden_size**2 + 2 * self.norm_size

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]: tp divides the projection."""
        return HeldParameters(dense=2 * self.hidden_size**2 / degrees.tp.astype(np.float64) + 2 * self.norm_size)

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the two norms and the projection."""
        context, h = build.context, self.hidden_size
        return [*build.norm(h, norms=2.0), *build.matmul("proj", context.tokens, 2 * h, h / context.degrees.tp)]

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally the two inputs of the norms and the two halves of the projection's input."""
        kept = 2 * tally.hidden + 2 * tally.kept_input
        return BlockMemory(kept=kept, dropped=np.zeros_like(kept), gradient=2 * tally.hidden)

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:  # noqa: ARG002
        """Return the matrix of the projection."""
        tp, h = degrees.tp.astype(np.float64), self.hidden_size
        return [Matrix(rows=h, columns=2 * h, cut="rows", ways=tp)]

    def add_to(self, graph: BlockGraph, x: int) -> int:
        """Add the two norms and the projection of both halves to one width."""
        has_bias = self.norm_size > self.hidden_size
        hidden = graph.norm("norm", x, over="hidden", has_bias=has_bias)
        after = graph.norm("embedding_norm", graph.next_embedding("lookup"), over="hidden", has_bias=has_bias)
        graph, both = graph.sized(halves=2, joined=self.hidden_size), f"{ROWS} halves hidden"
        parts = {"hidden": (hidden, HIDDEN), "embedding": (after, HIDDEN)}
        (stacked,) = graph.kernel("join", "join", parts, {"": both}, whole=("halves",))
        (made,) = graph.linear("proj", (stacked, both), {"": ("halves hidden joined", f"{ROWS} joined")})
        return made

    def exchanges(self, context: BlockContext) -> Exchanges:  # noqa: ARG002 # the contract's
        """Return that tp gathers the input and gives each rank its part of the output."""
        return Exchanges(tensor=True)
