"""Short convolution between two gates.

Source: LFM2's model code in transformers (Lfm2ShortConv).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.graph import ROWS, BlockGraph
from costmodels.blocks.operator import Operator
from costmodels.blocks.recurrent_mixer import RecurrentMixer
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvolution(RecurrentMixer):
    """Gated convolution over a few tokens.

    Attributes:
        conv_size: Tokens that the convolution sees.
        bias: Whether products and convolution have biases.
    """

    kind: ClassVar[str] = "short_convolution"

    conv_size: int
    bias: bool = False

    @property
    def inner_width(self) -> int:
        """Width of the channels: that of a token."""
        return self.hidden_size

    @property
    def input_width(self) -> int:
        """Width of the channels and of two gates."""
        return 3 * self.hidden_size

    @property
    def convolved_width(self) -> int:
        """Width of the channels."""
        return self.hidden_size

    @property
    def small_parameters(self) -> int:
        """Parameters of the convolution and the biases."""
        return self.hidden_size * self.conv_size + self.bias * 5 * self.hidden_size

    @property
    def kept_width(self) -> float:
        """Return that the convolution keeps no more than its input and its result."""
        return 0.0

    def scan(self, build: OperatorBuilder, tokens: FloatArray) -> list[Operator]:
        """Return the gate before the convolution."""
        elements = tokens * (self.hidden_size / build.context.degrees.tp)
        return build.elementwise("core.input_gate", elements, 3, 5)

    @property
    def state_heads(self) -> int:
        """Channels, which tp divides."""
        return self.hidden_size

    @property
    def convolution_parameters(self) -> int:
        """Parameters of the convolution and its bias."""
        return self.hidden_size * (self.conv_size + self.bias)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether the products have biases."""
        return self.bias, self.bias

    def add_core(self, graph: BlockGraph, mixed: int, steps: int | None) -> int:
        """Add the gate before the convolution, and the convolution."""
        assert steps is not None, "the first product makes two gates"
        pattern = f"{ROWS} state_heads {{}}_width".format
        (made,) = graph.kernel(
            "core.input_gate",
            "gate",
            {"data": (mixed, pattern("mixed")), "gate": (steps, pattern("steps"))},
            {"": pattern("mixed")},
            whole=("mixed_width", "steps_width"),
        )
        return self.add_convolution(graph, made)
