"""Embedding of tokens, and of learned positions where a model has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
from costmodels.blocks.operator import Family, Operator
from costmodels.blocks.tally import BlockMemory, Tally


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding(AbstractBlock):
    """Tables of tokens and positions.

    Attributes:
        hidden_size: Width of a token.
        vocab_size: Rows of the token table.
        learned_positions: Rows of the position table; 0 without one.
        token_types: Rows of a table of parts of a text, to which tokens belong (BERT); 0 without one.
        norm_size: Parameters of a norm of the sum (BERT); 0 without.
        layer_inputs: Width of further values of a token for all layers together, which are the sum of a row of a table
            of their own and of a product of the token's values, normalised (Gemma 3n and 4); 0 without.
        layer_vocab_size: Rows of that table.
        layer_norm_size: Parameters of that norm.
        further: Parameters of further tables and projections of a traced model, such as Gemma 4's embeddings of every
            layer, which tp is taken to divide (assumed).
    """

    kind: ClassVar[str] = "embedding"
    family: ClassVar[Family] = Family.EMBEDDING

    hidden_size: int
    vocab_size: int
    learned_positions: int = 0
    token_types: int = 0
    norm_size: int = 0
    layer_inputs: int = 0
    layer_vocab_size: int = 0
    layer_norm_size: int = 0
    further: int = 0

    @property
    def table(self) -> int:
        """Parameters of the token table."""
        return self.vocab_size * self.hidden_size

    @property
    def positions(self) -> int:
        """Parameters of the position table."""
        return self.learned_positions * self.hidden_size

    @property
    def multiplied(self) -> int:
        """Parameters that a product multiplies."""
        return self.hidden_size * self.layer_inputs

    @property
    def _cut(self) -> int:
        return self.table + self.layer_vocab_size * self.layer_inputs + self.multiplied + self.further

    @property
    def _copied(self) -> int:
        return self.positions + self.token_types * self.hidden_size + self.norm_size + self.layer_norm_size

    @property
    def parameters(self) -> int:
        """Parameters of the tables, the product and the norms."""
        return self._cut + self._copied

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]: tp divides the tables of tokens (Shoeybi et al. 2019, section 3)."""
        return HeldParameters(dense=self._cut / degrees.tp.astype(np.float64) + self._copied)

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the lookups, the norm, and the product for the layers' inputs with its norm."""
        tokens = build.context.tokens
        found = build.elementwise("lookup", tokens * self.hidden_size, 2, 3)
        if self.norm_size:
            found += build.norm(self.hidden_size)
        if self.layer_inputs:
            inputs = self.layer_inputs / build.context.degrees.tp
            found += build.elementwise("layer_lookup", tokens * inputs, 2, 3)
            found += build.matmul("layer_inputs", tokens, self.hidden_size, inputs)
            # the norm, and the sum with what was looked up
            found += build.elementwise("layer_sum", tokens * inputs, 5, 5)
        return found

    def memory(self, tally: Tally) -> BlockMemory:
        """Return that nothing is kept; the table's gradient counts apart (costmodels/step/memory)."""
        none = np.zeros_like(tally.tokens)
        return BlockMemory(kept=none, dropped=none, gradient=none)

    def exchanges(self, context: BlockContext) -> Exchanges:  # noqa: ARG002 # the contract's
        """Return nothing: an embedding scatters its output alone, which its family says."""
        return Exchanges()
