"""Kind of block: Acme's MLP of two matrices."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
from costmodels.blocks.operator import Family, Operator
from costmodels.blocks.tally import BlockMemory, Tally


@dataclass(frozen=True, kw_only=True, slots=True)
class AcmeMlp(AbstractBlock):
    """MLP of two matrices, with its norm and residual.

    Attributes:
        hidden_size: Width of a token.
        ffn_size: Inner size.
        norm_size: Parameters of the norm.
    """

    kind: ClassVar[str] = "acme_mlp"
    family: ClassVar[Family] = Family.MLP

    hidden_size: int
    ffn_size: int
    norm_size: int

    @property
    def parameters(self) -> int:
        """Parameters of the matrices and the norm."""
        return 2 * self.hidden_size * self.ffn_size + self.norm_size

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank: tp divides the matrices."""
        cut = 2 * self.hidden_size * self.ffn_size / degrees.tp.astype(np.float64)
        return HeldParameters(dense=cut + self.norm_size)

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the norm, the two products with the activation, and the residual."""
        tokens, own = build.context.tokens, build.of_module("mlp")
        inner = self.ffn_size / build.context.degrees.tp
        return [
            *build.norm(self.hidden_size, norms=1.0, is_fused=True),
            *own.matmul("up", tokens, self.hidden_size, inner),
            *own.activation("activation", tokens * inner, gated=False),
            *own.matmul("down", tokens, inner, self.hidden_size),
            *build.add_residual(self.hidden_size),
        ]

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally the inputs of the norm and the first product, and the values around the activation."""
        first, last = tally.mlp(tally.tokens, self.ffn_size / tally.context.degrees.tp, gated=False)
        kept = tally.hidden + tally.kept_input + first + last
        return BlockMemory(
            kept=kept, dropped=tally.drops("mlp") * (first + last), gradient=tally.hidden + first + tally.working
        )

    def exchanges(self, context: BlockContext) -> Exchanges:  # noqa: ARG002 # the same in all
        """Return that tp gathers the input and scatters the output."""
        return Exchanges(tensor=True)

    def sizes(self) -> dict[str, int]:
        """Return the inner size, which tp divides."""
        return {"ffn": self.ffn_size}
