"""Output head: the last norm, the product with the vocabulary, and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
from costmodels.blocks.operator import Family, Operator
from costmodels.blocks.tally import BlockMemory, Tally
from hardware.arrays import FloatArray


def local_vocabulary(vocab_size: int, context: BlockContext) -> FloatArray:
    """Return the rows of the vocabulary on one tp rank, with the runtime's padding [u]."""
    # the padded vocabulary divides by tp, so that the rows of one rank are padded
    tp, facts = context.degrees.tp, context.facts
    rows = vocab_size / tp
    padded = np.ceil(rows / facts.vocabulary_multiple) * facts.vocabulary_multiple
    return np.where((tp > 1) | facts.pads_whole_vocabulary, padded, rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head(AbstractBlock):
    """Output head over the vocabulary.

    Attributes:
        hidden_size: Width of a token.
        vocab_size: Rows of its table.
        has_table: Whether the table is its own, and not that of the embedding or of another head.
        norm_size: Parameters of the last norm.
        bias: Whether the logits have a bias.
        norms: Norms before the logits.
        transform_size: Parameters of a product of the width by itself before the logits, with an activation (Devlin et
            al. 2018, BERT); 0 without one. Every rank has all of it.
        is_pooled: Whether one token of each sequence alone has logits, which say its class (Dosovitskiy et al. 2021).
    """

    kind: ClassVar[str] = "head"
    family: ClassVar[Family] = Family.HEAD

    hidden_size: int
    vocab_size: int
    has_table: bool
    norm_size: int
    bias: bool = False
    norms: float = 1.0
    transform_size: int = 0
    is_pooled: bool = False

    @property
    def table(self) -> int:
        """Parameters of the table that the head multiplies with, whoever owns it."""
        return self.vocab_size * self.hidden_size

    @property
    def copied(self) -> int:
        """Parameters that every rank of tp has: norms and the product before the logits."""
        return round(self.norms * self.norm_size) + self.transform_size

    @property
    def parameters(self) -> int:
        """Parameters of its own table, the norms and the product before the logits."""
        return self.table * self.has_table + self.copied + self.bias * self.vocab_size

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]: tp divides the table."""
        cut = self.table * self.has_table + self.bias * self.vocab_size
        return HeldParameters(dense=cut / degrees.tp.astype(np.float64) + self.copied)

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the norm, the logits and the loss; the vocabulary is cut by tp, so logits are never gathered."""
        context = build.context
        vocabulary = local_vocabulary(self.vocab_size, context)
        rows = context.tokens / context.row_tokens if self.is_pooled else context.tokens
        # fp8 keeps the head in 16 bits (Transformer Engine, torchao)
        logits = build.matmul("logits", rows, self.hidden_size, vocabulary, is_wide=True)
        # one kernel reads the logits and writes their gradient; in parts they pass through memory in fp32 for the cast,
        # the maximum, the difference, the exponential and the sum, and back through softmax minus target (counted from
        # megatron-core tensor_parallel/cross_entropy.py)
        forward, backward = (3, 1) if context.facts.fused_cross_entropy else (17, 8)
        loss = build.elementwise("cross_entropy", rows * vocabulary, forward, backward, is_fused=True)
        return [*build.norm(self.hidden_size, norms=self.norms), *self._transform(build), *logits, *loss]

    def _transform(self, build: OperatorBuilder) -> list[Operator]:
        if not self.transform_size:
            return []
        rows, width = build.context.residual, self.hidden_size
        product = build.matmul("transform", rows, width, width, is_wide=True)
        return product + build.activation("activation", rows * width, gated=False)

    def memory(self, tally: Tally) -> BlockMemory:
        """Return that nothing is kept; logits count apart (costmodels/step/memory)."""
        none = np.zeros_like(tally.tokens)
        return BlockMemory(kept=none, dropped=none, gradient=none)

    def exchanges(self, context: BlockContext) -> Exchanges:  # noqa: ARG002 # the contract's
        """Return nothing: a head gathers its input and reduces the softmax, which its family says."""
        return Exchanges()
