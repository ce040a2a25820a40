"""State space of Mamba: a decay for every channel and element of its state, scanned token by token.

Sources: Gu and Dao 2023, arXiv 2312.00752, section 3; Jamba's model code in transformers for its norms.
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
class Mamba1(RecurrentMixer):
    """Selective state space mixer.

    Attributes:
        inner_size: Channels.
        state_size: Size of the state of one channel.
        step_rank: Rank of the projection to step sizes.
        conv_size: Tokens that the convolution sees.
        conv_bias: Whether the convolution has a bias.
        proj_bias: Whether the products have biases.
        has_norms: Whether step sizes, inputs and outputs of the state are normalised (Jamba).
    """

    kind: ClassVar[str] = "mamba1"

    inner_size: int
    state_size: int
    step_rank: int
    conv_size: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    has_norms: bool = False

    @property
    def inner_width(self) -> int:
        """Width of all channels."""
        return self.inner_size

    @property
    def convolved_width(self) -> int:
        """Width of all channels."""
        return self.inner_size

    @property
    def input_width(self) -> int:
        """Width of the channels and their gate."""
        return 2 * self.inner_size

    @property
    def small_parameters(self) -> int:
        """Parameters of convolution, projections of the scan's inputs, decays, skips, norms and biases."""
        i, s, r = self.inner_size, self.state_size, self.step_rank
        scan = i * (r + 2 * s) + r * i + i + i * s + i
        biases = self.proj_bias * (2 * i + self.hidden_size)
        return i * (self.conv_size + self.conv_bias) + scan + self.has_norms * (r + 2 * s) + biases

    @property
    def kept_width(self) -> float:
        """Elements of the scan's inputs: step sizes, and inputs and outputs of the state."""
        return self.inner_size + self.step_rank + 2 * self.state_size

    def scan(self, build: OperatorBuilder, tokens: FloatArray) -> list[Operator]:
        """Return the projections of the scan's inputs and the scan, whose states stay on the chip."""
        channels, inputs = self.inner_size / build.context.degrees.tp, self.step_rank + 2 * self.state_size
        return [
            *build.matmul("core.x_proj", tokens, channels, inputs),
            *build.matmul("core.dt_proj", tokens, self.step_rank, channels),
            # read: values, gates, step sizes; written: results
            *build.elementwise("core.scan", tokens * channels, 4, 8, is_fused=True),
        ]

    def mixing_flops(self, length: FloatArray | float) -> FloatArray | float:  # noqa: ARG002 # a state has no length
        """Return the FLOPs of the scan of one token: nine per channel and element of its state."""
        return 9.0 * self.inner_size * self.state_size

    @property
    def state_heads(self) -> int:
        """Channels, which tp divides."""
        return self.inner_size

    @property
    def convolution_parameters(self) -> int:
        """Parameters of the convolution and its bias."""
        return self.inner_size * (self.conv_size + self.conv_bias)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether the products have biases."""
        return self.proj_bias, self.proj_bias

    @property
    def scan_parameters(self) -> int:
        """Parameters of the scan itself: decays of every element of the state, skips, and biases of step sizes."""
        return self.inner_size * (self.state_size + 2)

    def add_core(self, graph: BlockGraph, mixed: int, steps: int | None) -> int:
        """Add the convolution, the projections of the scan's inputs, and the scan.

        Step sizes, inputs and outputs of the state come from all channels, so that ranks that share these add up sums.
        """
        assert steps is None, "step sizes are projected from the channels"
        graph = graph.sized(step_rank=self.step_rank, state_width=2 * self.state_size)
        channels = f"{ROWS} state_heads mixed_width"
        mixed = self.add_convolution(graph, mixed)
        weights = {
            label: (f"state_heads mixed_width {width}", f"{ROWS} {width}")
            for label, width in (("steps", "step_rank"), ("states", "state_width"))
        }
        made = dict(zip(weights, graph.linear("core.x_proj", (mixed, channels), weights), strict=True))
        if self.has_norms:
            made["steps"] = graph.norm("core.steps_norm", made["steps"], over="step_rank")
            made["states"] = graph.norm("core.states_norm", made["states"], over="state_width")
        weight = ("step_rank state_heads", f"{ROWS} state_heads")
        (sizes,) = graph.linear("core.dt_proj", (made["steps"], f"{ROWS} step_rank"), {"": weight})
        operands = {
            "mixed": (mixed, channels),
            "steps": (sizes, f"{ROWS} state_heads"),
            "states": (made["states"], f"{ROWS} state_width"),
        }
        return self.add_scan(graph, operands)
