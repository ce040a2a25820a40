"""Product of tokens with one matrix, with a norm of its input or an activation of its output.

Towers begin with one, which makes tokens of patches, and end with some, which give tokens the language model's width
(Dosovitskiy et al. 2021, arXiv 2010.11929, equation 1; Liu et al. 2023, LLaVA, arXiv 2304.08485, section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
from costmodels.blocks.matrix import Matrix
from costmodels.blocks.operator import Family, Operator
from costmodels.blocks.tally import BlockMemory, Tally


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection(AbstractBlock):
    """Projection of tokens to another width.

    Attributes:
        inputs: Width of a token before it.
        outputs: Width of a token behind it.
        bias: Whether there is a bias.
        activation: Whether an activation follows.
        norm_width: Elements of a token that are normalised together before the product; 0 without a norm.
        norm_size: Parameters of that norm.
        table: Further parameters that are added to the outputs: positions, and tokens that stand for a whole image.
    """

    kind: ClassVar[str] = "projection"
    family: ClassVar[Family] = Family.MLP

    inputs: int
    outputs: int
    bias: bool = False
    activation: bool = False
    norm_width: int = 0
    norm_size: int = 0
    table: int = 0

    @property
    def _cut_parameters(self) -> int:
        return self.inputs * self.outputs + self.bias * self.outputs

    @property
    def parameters(self) -> int:
        """Parameters of the matrix, its bias, the norm and the table."""
        return self._cut_parameters + self.norm_size + self.table

    @property
    def active_parameters(self) -> int:
        """Parameters without the table, of which a token reads its own row."""
        return self._cut_parameters + self.norm_size

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]: tp divides the matrix, norm and table are copied."""
        return HeldParameters(dense=self._cut_parameters / degrees.tp.astype(np.float64) + self.norm_size + self.table)

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the norm, the product, the addition of the table, and the activation."""
        tokens, outputs = build.context.tokens, self.outputs / build.context.degrees.tp
        operators = build.norm(self.norm_width, norms=self.inputs / self.norm_width) if self.norm_width else []
        operators += build.matmul("proj", tokens, self.inputs, outputs)
        if self.table:
            operators += build.elementwise("table", tokens * outputs, 3, 2)
        return operators + (build.activation("activation", tokens * outputs, gated=False) if self.activation else [])

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally the inputs of the norm, the product and the activation."""
        inputs = tally.width * tally.tokens * self.inputs
        outputs = tally.width * tally.tokens * (self.outputs / tally.context.degrees.tp)
        kept = tally.input_share * inputs + (inputs if self.norm_width else 0.0) + (outputs if self.activation else 0.0)
        return BlockMemory(kept=kept, dropped=np.zeros_like(kept), gradient=inputs + outputs)

    def exchanges(self, context: BlockContext) -> Exchanges:  # noqa: ARG002 # the contract's
        """Return that tp gathers the input and gives each rank its part of the output."""
        return Exchanges(tensor=True)

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:  # noqa: ARG002
        """Return the matrix."""
        return [Matrix(rows=self.outputs, columns=self.inputs, cut="rows", ways=degrees.tp.astype(np.float64))]
