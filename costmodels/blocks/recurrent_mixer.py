"""What all mixers with a state share: projections cut by heads, a convolution, chunks, and heads dealt over cp and up.

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

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
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

    @abstractmethod
    def scan(self, build: OperatorBuilder, tokens: FloatArray) -> list[Operator]:
        """Return the operators of the scan over so many tokens, whose heads tp divides."""

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
        norms = [replace(operator, modules=build.modules) for operator in build.norm(h, norms=self.norms)]
        return [
            *norms,
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

    def exchanges(self, context: BlockContext) -> Exchanges:
        """Return what the exchange of heads over cp or up sends: the first product's output, and the scan's result."""
        dealt = context.tokens * ((self.input_width + self.inner_width) / context.degrees.tp)
        return Exchanges(tensor=True, heads=dealt, dealt=dealt)
