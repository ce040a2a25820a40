"""Base of all mixers with a state: projections cut by heads, a convolution, chunks, and heads dealt over cp and up.

A state runs along the whole sequence, so cp and up do not cut the sequence of such a mixer: ranks exchange all to all,
once before the convolution and once after the scan, and each has whole sequences of a part of the heads (megatron-core
ssm/mamba_context_parallel.py).

Recomputation by named modules leaves these mixers alone: Megatron-LM has none of them, whose layers it repeats whole or
not at all (megatron-core 0.19.2 ssm/mamba_layer.py, gated_delta_net/common.py). Of Nemotron 3 Nano, with 52 layers of
44 MB each, recomputed norms free those of its 23 layers with experts alone, 0.945 GiB (Megatron-Bridge
skills/nemo-mbridge-perf-activation-recompute/SKILL.md).

Letters: u unique shape rows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
from costmodels.blocks.graph import HIDDEN, ROWS, BlockGraph, enter, leave
from costmodels.blocks.matrix import Matrix
from costmodels.blocks.operator import Family, Operator
from costmodels.blocks.tally import BlockMemory, Tally
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentMixer(AbstractBlock):
    """Mixer whose state of constant size runs along the sequence.

    Attributes:
        hidden_size: Width of a token.
        norms: Norms over the hidden size that belong to the block.
        norm_size: Parameters of one such norm.
    """

    family: ClassVar[Family] = Family.MIXER

    hidden_size: int
    norms: float = 1.0
    norm_size: int

    @property
    @abstractmethod
    def input_width(self) -> int:
        """Width of the first product."""

    @property
    @abstractmethod
    def convolved_width(self) -> int:
        """Width of what the convolution reads and writes; 0 without a convolution."""

    @property
    @abstractmethod
    def inner_width(self) -> int:
        """Width of the scan's result, which the last product reads."""

    @property
    @abstractmethod
    def small_parameters(self) -> int:
        """Parameters beside the two products and the norms over the hidden size: convolution, decays, inner norms."""

    @property
    @abstractmethod
    def kept_width(self) -> float:
        """Elements of one token that the scan keeps beside its inputs and its result, all heads."""

    @property
    @abstractmethod
    def state_heads(self) -> int:
        """Parts into which the mixer can be cut, each with a state of its own: heads, their groups, or channels."""

    @property
    def products(self) -> Mapping[str, tuple[int, int, int]]:
        """Products of the scan by their roles: heads, and k and n of the product [heads of a token, k] @ [k, n]."""
        return {}

    @property
    def convolution_parameters(self) -> int:
        """Parameters of the convolution."""
        return 0

    @property
    def gate_parameters(self) -> tuple[int, int]:
        """Parameters of the norm of the scan's result: of all heads together, and those that heads share."""
        return 0, 0

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether the first and the last product have biases."""
        return False, False

    def scan(self, build: OperatorBuilder, tokens: FloatArray) -> list[Operator]:
        """Return the operators of the scan over so many tokens, whose heads tp divides."""
        tp = build.context.degrees.tp
        return [
            operator
            for role, (heads, k, n) in self.products.items()
            for operator in build.chunked(role, tokens * (heads / tp), k, n)
        ]

    @property
    def _cut_parameters(self) -> int:
        return self.hidden_size * (self.input_width + self.inner_width) + self.small_parameters

    @property
    def parameters(self) -> int:
        """Parameters of the products, the convolution, the decays and the norms."""
        return self._cut_parameters + round(self.norms * self.norm_size)

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]: tp divides heads, norms are copied."""
        return HeldParameters(dense=self._cut_parameters / degrees.tp.astype(np.float64) + self.norms * self.norm_size)

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the norm, the products, the convolution, the scan with its gate, and the residual."""
        tokens, tp, h = build.context.tokens, build.context.degrees.tp, self.hidden_size
        return [
            *build.norm(h, norms=self.norms, is_fused=True),
            *build.matmul("in_proj", tokens, h, self.input_width / tp),
            *self.core(build),
            *build.activation("gate", tokens * (self.inner_width / tp), gated=True),
            *build.matmul("out_proj", tokens, self.inner_width / tp, h),
            *build.add_residual(h),
        ]

    def core(self, build: OperatorBuilder) -> list[Operator]:
        """Return the convolution and the scan."""
        build = build.as_core()
        tokens, tp = build.context.tokens, build.context.degrees.tp
        convolved = self.convolved_width / tp
        convolution = build.elementwise("core.convolution", tokens * convolved, 2, 3, is_fused=True)
        return [*(convolution if self.convolved_width else ()), *self.scan(build, tokens)]

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally the inputs of norm and products, the convolution's input and output, and what the scan keeps."""
        elements = tally.width * tally.tokens / tally.context.degrees.tp
        core = elements * (self.kept_width + self.convolved_width)
        # the scan's result stands before and after its gate
        kept = tally.hidden + tally.kept_input + elements * (self.input_width + 2 * self.inner_width) + core
        dropped = np.zeros_like(kept)
        if tally.context.facts.selective_products:
            products = tally.hidden + elements * self.input_width + tally.scattered
            dropped = np.maximum(kept - products, 0.0)
        return BlockMemory(kept=kept, dropped=dropped, gradient=np.zeros_like(kept))

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:  # noqa: ARG002
        """Return the matrices of the two products."""
        tp, h = degrees.tp.astype(np.float64), self.hidden_size
        return [
            Matrix(rows=self.input_width, columns=h, cut="rows", ways=tp),
            Matrix(rows=h, columns=self.inner_width, cut="columns", ways=tp),
        ]

    def sizes(self) -> dict[str, int]:
        """Return the parts of the state, of which every tp rank has a whole number."""
        return {"state_heads": self.state_heads}

    # Graph of a training step

    @property
    def mixed_width(self) -> int:
        """Width of the first product's part that the convolution reads, or the scan where there is no convolution."""
        return self.convolved_width or self.input_width - self.inner_width

    @property
    def scan_parameters(self) -> int:
        """Parameters of the scan: decays, skips, biases of step sizes."""
        of_input, of_output = self.biases
        biases = of_input * self.input_width + of_output * self.hidden_size
        return self.small_parameters - self.convolution_parameters - sum(self.gate_parameters) - biases

    def add_to(self, graph: BlockGraph, x: int) -> int:
        """Add the norm, the products, what stands between them, and the residual.

        The sequence stays whole between the products, since the state runs along it; heads can be cut there.
        """
        heads, (of_heads, shared) = self.state_heads, self.gate_parameters
        widths = {
            "mixed": self.mixed_width,
            "steps": self.input_width - self.mixed_width - self.inner_width,
            "gate": self.inner_width,
            "conv": self.convolution_parameters,
            "scan": self.scan_parameters,
            "gate_norm": of_heads,
        }
        assert not any(width % heads for width in widths.values()), f"{widths} are of all {heads} heads"
        graph = graph.sized(
            state_heads=heads,
            shared_norm=shared or 1,
            kept=max(math.ceil(self.kept_width * graph.sequence_length / heads), 1),
            **{f"{name}_width": max(width // heads, 1) for name, width in widths.items()},
        )
        of_input, of_output = self.biases
        parts = [name for name in ("mixed", "steps", "gate") if widths[name]]
        weights = {name: (f"hidden state_heads {name}_width", f"{ROWS} state_heads {name}_width") for name in parts}
        made = dict(zip(parts, graph.linear("in_proj", (enter(self, graph, x), HIDDEN), weights), strict=True))
        for name in parts if of_input else ():
            made[name] = graph.bias(f"in_proj.{name}_bias", made[name], f"state_heads {name}_width")
        y = self.add_core(graph, made["mixed"], made.get("steps"))
        y = self._add_gate(graph, y, made["gate"])
        (y,) = graph.linear(
            "out_proj", (y, f"{ROWS} state_heads gate_width"), {"": ("state_heads gate_width hidden", HIDDEN)}
        )
        return leave(self, graph, x, graph.bias("out_bias", y, "hidden") if of_output else y)

    def add_core(self, graph: BlockGraph, mixed: int, steps: int | None) -> int:
        """Add the convolution and the scan, and return the scan's result."""
        operands = {"mixed": (self.add_convolution(graph, mixed), f"{ROWS} state_heads mixed_width")}
        if steps is not None:
            operands["steps"] = (steps, f"{ROWS} state_heads steps_width")
        return self.add_scan(graph, operands)

    def add_convolution(self, graph: BlockGraph, mixed: int) -> int:
        """Add the convolution of what it reads along the sequence, if there is one."""
        if not self.convolution_parameters:
            return mixed
        pattern, weight = f"{ROWS} state_heads mixed_width", "state_heads conv_width"
        (made,) = graph.kernel(
            "core.convolution",
            "convolution",
            {"mixed": (mixed, pattern), "weight": (graph.parameter("core.convolution.weight", weight), weight)},
            {"": pattern},
            whole=("sequence", "mixed_width", "conv_width"),
        )
        return made

    def add_scan(self, graph: BlockGraph, operands: Mapping[str, tuple[int, str]]) -> int:
        """Add the scan of these operands along the sequence, with its own parameters; it keeps its states."""
        flop = 2.0 * graph.batch * graph.sequence_length * sum(heads * k * n for heads, k, n in self.products.values())
        operands = dict(operands)
        if self.scan_parameters:
            weight = "state_heads scan_width"
            operands["weight"] = graph.parameter("core.scan.weight", weight), weight
        inside = {name for _, pattern in operands.values() for name in pattern.split() if name.endswith("_width")}
        made, _ = graph.kernel(
            "core.scan",
            f"{self.kind}_scan",
            operands,
            {"": f"{ROWS} state_heads gate_width", "states": "batch state_heads kept"},
            whole=("sequence", "gate_width", "kept", *sorted(inside)),
            flop=flop,
            reads_results=True,
        )
        return made

    def _add_gate(self, graph: BlockGraph, y: int, gate: int) -> int:
        """Add the gate of the scan's result, and its norm."""
        pattern, (of_heads, shared) = f"{ROWS} state_heads gate_width", self.gate_parameters
        operands = {"data": (y, pattern), "gate": (gate, pattern)}
        for is_there, label, weight in (
            (of_heads, "weight", "state_heads gate_norm_width"),
            (shared, "shared_weight", "shared_norm"),
        ):
            if is_there:
                operands[label] = graph.parameter(f"core.gate.{label}", weight), weight
        inside = {name for _, pattern in operands.values() for name in pattern.split()} - {*ROWS.split(), "state_heads"}
        (made,) = graph.kernel(
            "core.gate", "gated_norm" if of_heads or shared else "gate", operands, {"": pattern}, whole=sorted(inside)
        )
        return made

    def exchanges(self, context: BlockContext) -> Exchanges:
        """Return what the exchange of heads over cp or up sends: the first product's output, and the scan's result."""
        dealt = context.tokens * ((self.input_width + self.inner_width) / context.degrees.tp)
        return Exchanges(tensor=True, heads=dealt, dealt=dealt)
