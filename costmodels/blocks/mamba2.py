"""State space of Mamba 2: a decay per head, and inputs and outputs of the state shared by groups of heads.

Sources: Dao and Gu 2024, arXiv 2405.21060, section 6, for the chunked algorithm; megatron-core ssm/mamba_mixer.py for
the projections and what tp cuts; Megatron-LM training.py, num_floating_point_operations, for the FLOPs of the scan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from costmodels.blocks.recurrent_mixer import RecurrentMixer
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2(RecurrentMixer):
    """State space mixer.

    Attributes:
        num_heads: Heads.
        head_dim: Size of one head.
        num_groups: Groups of heads that share inputs and outputs of the state.
        state_size: Size of the state of one channel.
        conv_size: Tokens that the convolution sees.
        conv_bias: Whether the convolution has a bias.
        proj_bias: Whether the first product has a bias.
        output_bias: Whether the last product has a bias.
        has_norm: Whether the result is normalised under its gate.
        chunk: Tokens of a chunk.
    """

    kind: ClassVar[str] = "mamba2"

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_size: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    output_bias: bool = False
    has_norm: bool = True
    chunk: int = 128

    @property
    def inner_width(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def convolved_width(self) -> int:
        """Width of all heads, and of inputs and outputs of the state."""
        return self.inner_width + 2 * self.num_groups * self.state_size

    @property
    def input_width(self) -> int:
        """Width of the gate, of what the convolution reads, and of one step size per head."""
        return self.inner_width + self.convolved_width + self.num_heads

    @property
    def small_parameters(self) -> int:
        """Parameters of the convolution, three numbers per head, the norm of the result, and biases."""
        biases = self.proj_bias * self.input_width + self.output_bias * self.hidden_size
        return self.convolution_parameters + 3 * self.num_heads + self.has_norm * self.inner_width + biases

    @property
    def kept_width(self) -> float:
        """Elements of the states at the ends of chunks, shared by the tokens of a chunk."""
        return self.inner_width * self.state_size / self.chunk

    @property
    def state_heads(self) -> int:
        """Groups, of which every tp rank has a whole number."""
        return self.num_groups

    @property
    def products(self) -> Mapping[str, tuple[int, int, int]]:
        """Products inside chunks (of outputs and inputs of the state, then with values) and with the state."""
        return {
            "core.chunk": (self.num_groups, self.state_size, self.chunk),
            "core.values": (self.num_heads, self.chunk, self.head_dim),
            # the state is written by values, and read for the result
            "core.state": (self.num_heads, self.state_size, 2 * self.head_dim),
        }

    @property
    def convolution_parameters(self) -> int:
        """Parameters of the convolution and its bias."""
        return self.convolved_width * (self.conv_size + self.conv_bias)

    @property
    def gate_parameters(self) -> tuple[int, int]:
        """Parameters of the norm of the result."""
        return self.has_norm * self.inner_width, 0

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether the first and the last product have biases."""
        return self.proj_bias, self.output_bias

    def mixing_flops(self, length: FloatArray | float) -> FloatArray | float:  # noqa: ARG002 # a state has no length
        """Return the FLOPs of the scan of one token: seven per channel and element of its state."""
        return 7.0 * self.inner_width * self.state_size

    def sizes(self) -> dict[str, int]:
        """Return the groups, of which every tp rank has a whole number, and the heads."""
        groups = self.num_groups
        return {"state_heads": groups, "scanned_heads": self.num_heads, "scanned_groups": groups}
