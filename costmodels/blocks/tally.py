"""Tally of the tensors that a block keeps for its backward pass.

Sources: Korthikanti et al. 2022, section 4.1, for the tensors that each module keeps; megatron-core
transformer_config.py, recompute_modules, for those that selective recomputation drops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.blocks.context import BlockContext
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockMemory:
    """Memory of one block of a layer [bytes], each array [u].

    Attributes:
        kept: Tensors that the block keeps for its backward pass.
        dropped: Part of them that selective recomputation drops.
        gradient: Gradients that are alive at once in the block's backward pass.
    """

    kept: FloatArray
    dropped: FloatArray
    gradient: FloatArray


class Tally:
    """Sizes of the tensors that blocks of one hidden size keep [bytes], each array [u]."""

    def __init__(self, context: BlockContext, hidden_size: int) -> None:
        self.context, self.hidden_size = context, hidden_size
        self.width = context.element_bytes
        self.tokens, self.residual = context.tokens, context.residual
        self.hidden = self.width * self.residual * hidden_size
        """Hidden values of a rank's norms and residuals."""
        self.whole = self.width * self.tokens * hidden_size
        """Hidden values of all tokens of a rank."""
        # Products keep their inputs in the precision in which they multiply them (Transformer Engine,
        # module/linear.py).
        narrow = context.narrow_bytes
        self.input_share = (self.width if narrow is None else narrow) / self.width
        again, split = context.facts.gathers_inputs_again, context.is_split
        self.kept_input = self.input_share * (self.hidden if again else self.whole)
        """Input of a column-parallel product, as it is kept."""
        self.kept_shared = np.where(split & (not again), self.input_share * self.whole, 0.0)
        """Kept input of the shared experts, where the router's product does not keep it anyway."""
        self.scattered = np.where(split, self.hidden, 0.0)
        """Sum over the tp ranks that a row-parallel product ends with, as each rank gets its part."""
        self.gathered = np.where(split, 2 * self.whole, 0.0)
        """Input that a product gathers, and its gradient, while the gradient of its weight is computed. Also the
        gathered inputs of a layer's two column-parallel products."""
        self.working = self.gathered if again else self.gathered / 2
        """Part of `gathered` that is alive while the weight's gradient is computed, and not kept."""

    def drops(self, module: str) -> bool:
        """Return whether selective recomputation repeats the module."""
        return module in self.context.dropped_modules

    def mlp(self, rows: FloatArray, inner: FloatArray | float, *, gated: bool) -> tuple[FloatArray, FloatArray]:
        """Return the output of the first product(s), and the last one's input with the activation's tensors.

        A gated activation of several kernels keeps the activated half too. Megatron-LM's adds an offset to the other
        half, which makes that anew (megatron-core transformer/mlp.py, glu_linear_offset, since 0.15).
        """
        elements, facts = self.width * rows * inner, self.context.facts
        copies = 1 if not gated else 2 if not facts.fused_elementwise else 1 if facts.fused_activation else 3
        return (1 + gated) * elements, (copies - 1 + self.input_share) * elements

    def second_products(self, first: FloatArray, *, gated: bool) -> FloatArray:
        """Return the products of an MLP that remain if every second one of a layer is kept: w1 and w2, or up alone."""
        if not gated:
            return first
        return first / 2 + np.where(first > 0, self.whole, 0.0)
