"""Builder of the operators of a block, with the two passes of each.

Letters: u unique shape rows; T tokens of one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.blocks.context import BlockContext
from costmodels.blocks.operator import Family, Operator, OpKind, Phase
from hardware.arrays import FloatArray, IntArray

UNFUSED_PASSES = 1.7
"""Memory passes of eager kernels for one of a fused kernel: SwiGLU in two kernels moves 5 tensors instead of 3, rotary
embedding in eager PyTorch 4 to 7 instead of 2 (counted)."""

Sizes = FloatArray | IntArray | float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorBuilder:
    """Builder of the operators of one block.

    Attributes:
        context: Shapes, numerics and facts.
        block: Name of the block.
        family: Family of the block.
        modules: Modules by which selective recomputation can repeat all operators of the block.
        is_core: Whether the operators belong to the core of a mixer.
    """

    context: BlockContext
    block: str
    family: Family
    modules: tuple[str, ...] = ()
    is_core: bool = False

    def of_module(self, *modules: str) -> OperatorBuilder:
        """Return a builder of operators that belong to further modules."""
        return replace(self, modules=(*self.modules, *modules))

    def as_core(self) -> OperatorBuilder:
        """Return a builder of the operators between the projections of a mixer."""
        return replace(self, is_core=True)

    def matmul(
        self,
        role: str,
        m: FloatArray,
        k: Sizes,
        n: Sizes,
        *,
        groups: FloatArray | None = None,
        is_wide: bool = False,
        kept_share: FloatArray | float = 0.0,
    ) -> list[Operator]:
        """Return the product [m, k] @ [k, n] and the two of its backward pass; m is the sum over `groups` weights.

        `is_wide` says that the product does not support a narrow precision.
        """
        kind = OpKind.MATMUL if groups is None else OpKind.GROUPED_MATMUL
        context = self.context
        precision = context.wide if is_wide else context.precision
        is_narrow = context.narrow_bytes is not None and not is_wide
        operators = self._cast_operands(role, m * k, m * n) if is_narrow else []
        # each of the three products reads or writes the same three matrices
        weights = np.ones_like(m) if groups is None else groups
        moved_bytes = context.element_bytes * (m * k + weights * k * n + m * n)
        for name, phase, sizes in (
            (role, Phase.FORWARD, (m, k, n)),
            (f"{role}.data_gradient", Phase.BACKWARD, (m, n, k)),
            (f"{role}.weight_gradient", Phase.BACKWARD, (k, m, n)),
        ):
            shape = sizes if groups is None else (groups, *sizes)
            operators.append(
                self.operator(name, kind, phase, precision, shape, moved_bytes, 2.0 * m * k * n, kept_share=kept_share)
            )
        return operators

    def _cast_operands(self, role: str, inputs: FloatArray, outputs: FloatArray) -> list[Operator]:
        """Return the casts of a product's input and of its output's gradient to a narrow type.

        Each is read once and written straight and transposed (Transformer Engine, cast_transpose kernels). Where its
        scale follows from its own maximum, it is read for that before (RuntimeProfile.reads_for_scale).
        """
        context, reads = self.context, self.context.precision == "fp8" and self.context.facts.reads_for_scale
        kind, precision, width = OpKind.ELEMENTWISE, context.precision, context.element_bytes
        return [
            self.operator(f"{role}.{name}", kind, phase, precision, (elements,), passes * width * elements)
            for operand, elements, phase in (("input", inputs, Phase.FORWARD), ("gradient", outputs, Phase.BACKWARD))
            for name, passes in ((f"amax_{operand}", 1.0), (f"cast_{operand}", 2.0))[not reads :]
        ]

    def chunked(self, role: str, rows: FloatArray, k: Sizes, n: Sizes) -> list[Operator]:
        """Return a product [rows, k] @ [k, n] of a scan, whose right side is new for every chunk of rows, both passes.

        Kernels of linear attention leave what they make on the chip, so that only the left side is read (Yang et al.
        2023, arXiv 2312.06635, section 4). The backward pass has two products for each.
        """
        moved_bytes, flop = rows * k * self.context.element_bytes, 2.0 * rows * k * n
        kind, wide = OpKind.SCAN, self.context.wide
        return [
            self.operator(role, kind, Phase.FORWARD, wide, (rows, k, n), moved_bytes, flop),
            self.operator(f"{role}.gradient", kind, Phase.BACKWARD, wide, (rows, k, n), 2.0 * moved_bytes, 2.0 * flop),
        ]

    def batched(self, role: str, rows: FloatArray, k: Sizes, n: Sizes) -> list[Operator]:
        """Return a batched product [rows, k] @ [k, n] whose right side differs per head, and its two gradients."""
        # the right side is shared by the queries of a head, so that it has as many copies as there are sequences
        copies = rows * k * n / self.context.row_tokens
        moved_bytes = (rows * k + rows * n + copies) * self.context.element_bytes
        return [
            self.operator(name, OpKind.MATMUL, phase, self.context.wide, sizes, moved_bytes, 2.0 * rows * k * n)
            for name, phase, sizes in (
                (role, Phase.FORWARD, (rows, k, n)),
                (f"{role}.data_gradient", Phase.BACKWARD, (rows, n, k)),
                (f"{role}.right_gradient", Phase.BACKWARD, (rows, n, k)),
            )
        ]

    def norm(self, width: int, *, norms: float = 1.0, is_fused: bool = False) -> list[Operator]:
        """Return the block's norms over rows of `width` elements in both passes.

        Recomputation of the module `layernorm` repeats no norm that is fused with the product behind it (megatron-core
        transformer_layer.py: an IdentityOp in its place; Transformer Engine, LayerNormLinear).
        """
        rows = self.context.residual * norms
        build, element_bytes = self if is_fused else self.of_module("layernorm"), self.context.element_bytes
        shape, precision = (rows, width), self.context.precision
        forward, backward = (passes * element_bytes * rows * width for passes in (2.0, 3.0))
        return [
            build.operator("norm", OpKind.NORM, Phase.FORWARD, precision, shape, forward),
            build.operator("norm.gradient", OpKind.NORM, Phase.BACKWARD, precision, shape, backward),
        ]

    def add_residual(self, width: int) -> list[Operator]:
        """Return the addition of the block's output to its input."""
        # a residual is read twice and written once, in both directions
        return self.elementwise("residual", self.context.residual * width, 3, 3)

    def activation(self, role: str, elements: FloatArray, *, gated: bool) -> list[Operator]:
        """Return an activation of so many inner values, or of twice as many inputs if it is gated."""
        # one or two inputs and an output; backwards the output's gradient, the inputs, and a gradient of each
        facts = self.context.facts
        # kernels of their own, where other operators are fused
        apart = UNFUSED_PASSES if gated and facts.fused_elementwise and not facts.fused_activation else 1.0
        return self.elementwise(role, elements, apart * (2 + gated), apart * (3 + 2 * gated))

    def elementwise(
        self,
        role: str,
        elements: FloatArray,
        forward_passes: FloatArray | float,
        backward_passes: FloatArray | float,
        *,
        is_fused: bool = False,
    ) -> list[Operator]:
        """Return a memory-bound operator; a pass reads or writes every element, and again between unfused kernels."""
        repeated = 1.0 if is_fused or self.context.facts.fused_elementwise else UNFUSED_PASSES
        kind, precision, element_bytes = OpKind.ELEMENTWISE, self.context.precision, self.context.element_bytes
        return [
            self.operator(name, kind, phase, precision, (elements,), repeated * passes * element_bytes * elements)
            for name, phase, passes in (
                (role, Phase.FORWARD, forward_passes),
                (f"{role}.gradient", Phase.BACKWARD, backward_passes),
            )
        ]

    def operator(
        self,
        role: str,
        kind: OpKind,
        phase: Phase,
        precision: str,
        sizes: Sequence[Sizes],
        moved_bytes: FloatArray,
        flop: FloatArray | float = 0.0,
        *,
        kept_share: FloatArray | float = 0.0,
    ) -> Operator:
        """Return an operator of the block; a model's own sizes are scalars, equal in every row."""
        shape = np.empty((len(moved_bytes), len(sizes)))
        for column, size in enumerate(sizes):
            shape[:, column] = size
        return Operator(
            name=f"{self.block}.{role}",
            kind=kind,
            block=self.block,
            family=self.family,
            phase=phase,
            precision=precision,
            shape=shape,
            flop=flop * np.ones_like(moved_bytes),
            moved_bytes=moved_bytes,
            modules=self.modules,
            is_core=self.is_core,
            kept_share=kept_share,
        )
