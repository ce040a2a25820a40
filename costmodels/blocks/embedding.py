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
        further: Parameters of further tables and projections of a traced model, such as Gemma 4's embeddings of every
            layer, which tp is taken to divide (assumed).
    """

    kind: ClassVar[str] = "embedding"
    family: ClassVar[Family] = Family.EMBEDDING

    hidden_size: int
    vocab_size: int
    learned_positions: int = 0
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
    def parameters(self) -> int:
        """Parameters of all tables."""
        return self.table + self.positions + self.further

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]: tp divides the token table (Shoeybi et al. 2019, section 3)."""
        return HeldParameters(dense=(self.table + self.further) / degrees.tp.astype(np.float64) + self.positions)

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the lookup."""
        return build.elementwise("lookup", build.context.tokens * self.hidden_size, 2, 3)

    def memory(self, tally: Tally) -> BlockMemory:
        """Return that nothing is kept; the table's gradient counts apart (costmodels/step/memory)."""
        none = np.zeros_like(tally.tokens)
        return BlockMemory(kept=none, dropped=none, gradient=none)

    def exchanges(self, context: BlockContext) -> Exchanges:  # noqa: ARG002 # the contract's
        """Return nothing: an embedding scatters its output alone, which its family says."""
        return Exchanges()
