"""Operators and tensors of softmax attention between its projections, for every kind of attention.

Letters: u unique shape rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext
from costmodels.blocks.mask import Mask
from costmodels.blocks.operator import Operator, OpKind, Phase
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionCore:
    """Softmax attention of one tp rank.

    Attributes:
        mask: Mask.
        heads: Query heads of a tp rank, before Ulysses deals them [u].
        head_dim: Size of one query and key head.
        value_head_dim: Size of one value head.
        kv_size: Value elements of one token on a tp rank, before Ulysses deals them [u].
    """

    mask: Mask
    heads: FloatArray
    head_dim: int
    value_head_dim: int
    kv_size: FloatArray

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the core's operators, and the merging of partial results where some rows have a ring."""
        build = build.as_core().of_module("core_attn")
        operators = self._flash(build) if build.context.facts.fused_attention else self._unfused(build)
        if np.any(build.context.degrees.cp > 1):
            operators += self._merge_of_ring(build)
        return operators

    def _flash(self, build: OperatorBuilder) -> list[Operator]:
        """Return flash attention, whose work the cp ranks share evenly.

        Sequences of varying length are priced as so many equal ones, each of the length in which a mean token stands.
        That keeps the number of tokens, the sum of the squares of the lengths, and the time of every row's start and
        end; only the last rows to run are those of a mean sequence (assumed).

        The forward pass has two products of 2*s*s*size under the mask; the backward pass has five instead of two
        (Dao 2023, FlashAttention-2, section 4.1).
        """
        context = build.context
        degrees, length = context.degrees, context.length
        batch = np.asarray(context.sequences, dtype=np.float64)
        both_sizes = self.head_dim + self.value_head_dim
        local_heads, queries, share = self.heads / degrees.up, length / degrees.cp, self.mask.share(length)
        # two products over queries and keys, each of 2 flop per element of its sum
        flop = 2 * batch * local_heads * queries * length * both_sizes * share
        # queries and results of all heads; keys and values of as many heads as the model has for them
        keys_values = self.kv_size / degrees.up * both_sizes / self.value_head_dim
        moved_bytes = context.element_bytes * (batch * queries * (local_heads * both_sizes + keys_values))
        seen = length * (2.0 * share) if self.mask.causal else length * share
        shape = (batch, local_heads, queries, seen, self.head_dim)
        kind = OpKind.ATTENTION
        return [
            build.operator("core", kind, Phase.FORWARD, context.wide, shape, moved_bytes, flop),
            build.operator("core.gradient", kind, Phase.BACKWARD, context.wide, shape, 2.5 * moved_bytes, 2.5 * flop),
        ]

    def _unfused(self, build: OperatorBuilder) -> list[Operator]:
        """Return attention whose scores pass through memory: two products of the whole square and a masked softmax.

        Packed sequences attend to their own tokens by the mask alone, so that whole rows are computed, and so are
        windows.

        The softmax output has 2abs^2 bytes, and its dropout as many again (Korthikanti et al. 2022, section 4.1). The
        fused softmax reads the scores and writes the probabilities (Megatron-LM fused_kernels), and so does dropout.
        """
        context, facts = build.context, build.context.facts
        degrees, length = context.degrees, context.row_tokens
        rows = context.mbs * (self.heads / degrees.up) * (length / degrees.cp)
        scores = rows * length
        operators = build.batched("core.scores", rows, self.head_dim, length)
        # the fused kernel wants four score matrices at a time; in PyTorch's own operators scores are scaled, cast,
        # masked and normalised in fp32 one after the other (Megatron-LM model/fused_softmax.py, is_kernel_available)
        is_fused = facts.fused_elementwise & ((context.mbs * (self.heads / degrees.up)) % 4 == 0)
        slow = np.where(is_fused, 0.0, 28 / context.element_bytes)
        operators += build.elementwise("core.softmax", scores, 2 + slow, 3 + slow, is_fused=True)
        if facts.attention_dropout:  # reads and writes the probabilities, and a mask of one byte
            operators += build.elementwise("core.dropout", scores, 2.5, 2.5, is_fused=True)
        return operators + build.batched("core.context", rows, length, self.value_head_dim)

    def _merge_of_ring(self, build: OperatorBuilder) -> list[Operator]:
        """Return the merging of the ring's partial results; it moves no bytes in rows whose cp is 1.

        Each of the cp - 1 further steps rescales its result and adds it to an accumulator in fp32; backward it adds its
        gradients of queries, keys and values (Transformer Engine, context_parallel.py). Under a causal mask that the
        ranks share evenly, half of these steps concern half of the queries, or half of the keys.
        """
        context = build.context
        degrees, element_bytes = context.degrees, context.element_bytes
        positions = context.mbs * context.row_tokens / degrees.cp / degrees.up * 0.75 * (degrees.cp - 1)
        results = positions * self.heads * self.value_head_dim
        gradients = positions * (self.heads * self.head_dim + 2 * self.kv_size)
        # forward the accumulator is read and written; backward the sum and its term are read, and the sum is written
        forward_bytes, backward_bytes = (element_bytes + 2 * 4) * results, 3 * element_bytes * gradients
        kind, precision = OpKind.ELEMENTWISE, context.precision
        return [
            build.operator("core.merge", kind, Phase.FORWARD, precision, (results,), forward_bytes),
            build.operator("core.merge.gradient", kind, Phase.BACKWARD, precision, (gradients,), backward_bytes),
        ]

    def kept_bytes(self, context: BlockContext) -> FloatArray:
        """Return the tensors that attention keeps between its inputs and its output [bytes], [u].

        Fused attention keeps one fp32 log-sum-exp per query and head. Otherwise the softmax is kept, and with dropout
        also its mask and its result: 5 a s^2 b in 16 bits (Korthikanti et al. 2022, section 4.1).
        """
        if context.facts.fused_attention:
            return 4 * context.tokens * self.heads
        width = context.element_bytes
        kept = 2 * width + 1 if context.facts.attention_dropout else width
        return kept * context.tokens * self.heads * context.sequence_length
