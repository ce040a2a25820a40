"""Gated delta net: linear attention with a delta rule and a decay per head.

Sources: Yang et al. 2024, arXiv 2412.06464, section 3, for the chunked algorithm; Qwen3-Next's model code in
transformers for the projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from costmodels.blocks.recurrent_mixer import RecurrentMixer
from hardware.arrays import FloatArray

CHUNK = 64
"""Tokens of a chunk (flash-linear-attention ops/gated_delta_rule/chunk.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaNet(RecurrentMixer):
    """Gated delta net.

    Attributes:
        num_key_heads: Heads of queries and keys.
        num_value_heads: Heads of values, a multiple of the key heads.
        key_head_dim: Size of one query and key head.
        value_head_dim: Size of one value head.
        conv_size: Tokens that the convolution sees.
    """

    kind: ClassVar[str] = "gated_delta_net"

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_size: int

    @property
    def _keys(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def inner_width(self) -> int:
        """Width of the values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def input_width(self) -> int:
        """Width of queries, keys, values and their gate, and of two numbers per head: decay and learning rate."""
        return 2 * self._keys + 2 * self.inner_width + 2 * self.num_value_heads

    @property
    def convolved_width(self) -> int:
        """Width of queries, keys and values."""
        return 2 * self._keys + self.inner_width

    @property
    def small_parameters(self) -> int:
        """Parameters of the convolution, two numbers per head, and the norm of a value head."""
        return self.convolution_parameters + 2 * self.num_value_heads + self.value_head_dim

    @property
    def kept_width(self) -> float:
        """Elements of the triangular matrix of every chunk, one row of a chunk per token and head."""
        return self.num_value_heads * CHUNK

    @property
    def state_heads(self) -> int:
        """Key heads, which tp deals whole with the value heads that share them."""
        return self.num_key_heads

    @property
    def products(self) -> Mapping[str, tuple[int, int, int]]:
        """Products inside chunks (K K', Q K', and T K), with values (T V and the result), and with the state."""
        heads, keys, values = self.num_value_heads, self.key_head_dim, self.value_head_dim
        return {
            "core.chunk": (heads, keys, 3 * CHUNK),
            "core.values": (heads, CHUNK, 2 * values),
            # the state is read for the new values and for the result, and it is written
            "core.state": (heads, keys, 3 * values),
        }

    @property
    def convolution_parameters(self) -> int:
        """Parameters of the convolution, which has no bias."""
        return self.convolved_width * self.conv_size

    @property
    def gate_parameters(self) -> tuple[int, int]:
        """Parameters of the norm of a value head, which all heads share."""
        return 0, self.value_head_dim

    def mixing_flops(self, length: FloatArray | float) -> FloatArray | float:  # noqa: ARG002 # a state has no length
        """Return the FLOPs of the scan of one token."""
        keys, values = self.key_head_dim, self.value_head_dim
        return 2.0 * self.num_value_heads * (3 * CHUNK * keys + 2 * CHUNK * values + 3 * keys * values)

    def sizes(self) -> dict[str, int]:
        """Return the key heads, which tp deals whole."""
        return {"state_heads": self.num_key_heads, "scanned_heads": self.num_key_heads}
