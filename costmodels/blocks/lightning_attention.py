"""Lightning attention: linear attention with a fixed decay per head, in blocks.

Sources: Qin et al. 2024, arXiv 2401.04658, section 3; MiniMax-01, arXiv 2501.08313, section 2.2, for the block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from costmodels.blocks.recurrent_mixer import RecurrentMixer
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class LightningAttention(RecurrentMixer):
    """Linear attention in blocks.

    Attributes:
        num_heads: Heads.
        head_dim: Size of one head.
        chunk: Tokens of a block.
    """

    kind: ClassVar[str] = "lightning_attention"

    num_heads: int
    head_dim: int
    chunk: int = 256

    @property
    def inner_width(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def input_width(self) -> int:
        """Width of queries, keys, values and the gate."""
        return 4 * self.inner_width

    @property
    def convolved_width(self) -> int:
        """Return that there is no convolution."""
        return 0

    @property
    def small_parameters(self) -> int:
        """Parameters of the norm of the result."""
        return self.inner_width

    @property
    def kept_width(self) -> float:
        """Elements of the states at the ends of blocks, shared by the tokens of a block."""
        return self.inner_width * self.head_dim / self.chunk

    @property
    def state_heads(self) -> int:
        """Heads, which tp deals whole."""
        return self.num_heads

    @property
    def products(self) -> Mapping[str, tuple[int, int, int]]:
        """Products inside blocks (scores, then values) and with the state, which is read and written."""
        return {
            "core.chunk": (self.num_heads, self.head_dim, self.chunk),
            "core.values": (self.num_heads, self.chunk, self.head_dim),
            "core.state": (self.num_heads, self.head_dim, 2 * self.head_dim),
        }

    @property
    def gate_parameters(self) -> tuple[int, int]:
        """Parameters of the norm of the result."""
        return self.inner_width, 0

    def mixing_flops(self, length: FloatArray | float) -> FloatArray | float:  # noqa: ARG002 # a state has no length
        """Return the FLOPs of one token: scores and values of a block, and the state."""
        return 2.0 * self.inner_width * (2 * self.chunk + 2 * self.head_dim)
