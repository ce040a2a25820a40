"""Context of a block: the shapes of a configuration, the numerics, and the facts of the runtime.

Letters: u unique shape rows; T tokens of one micro-batch on one rank, `mbs*s/(cp*up)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hardware.arrays import FloatArray, IntArray


class Degrees(Protocol):
    """Degrees of a grid of configurations, each [n]."""

    @property
    def tp(self) -> IntArray:
        """Degree of tensor parallelism."""

    @property
    def cp(self) -> IntArray:
        """Degree of ring attention."""

    @property
    def up(self) -> IntArray:
        """Degree of Ulysses attention."""

    @property
    def ep(self) -> IntArray:
        """Degree of expert parallelism."""

    @property
    def expert_tensor(self) -> IntArray:
        """Degree of tensor parallelism of the experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeFacts:
    """Facts of a runtime that change what a block runs, keeps or sends; fields of `RuntimeProfile`."""

    vocabulary_multiple: int
    pads_whole_vocabulary: bool
    selective_products: bool
    gathers_inputs_again: bool
    fused_attention: bool
    attention_dropout: bool
    fused_elementwise: bool
    fused_activation: bool
    fused_cross_entropy: bool
    reads_for_scale: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockContext:
    """Shapes, numerics and facts under which blocks are priced.

    Attributes:
        degrees: Degrees of parallelism [u].
        mbs: Rows of a micro-batch [u].
        tokens: Tokens T of one micro-batch on one rank [u].
        residual: Tokens in a rank's norms and residuals: T, or T/tp with sequence parallelism [u].
        row_tokens: Mean tokens of a row of a micro-batch, padding included [u].
        length: Length of sequences for which the mixers of a micro-batch are priced [u].
        expert_ranks: Ranks that gather their tokens for the experts that they share [u].
        filled_share: Share of a row's tokens that sequences fill, if several are packed into one.
        sequence_length: Tokens of the longest sequence.
        element_bytes: Size of one weight or activation element [bytes].
        precision: Type of the matrix products.
        wide: Type of the operators that do not support a narrow precision: attention, the head, the router.
        narrow_bytes: Size of an element in a narrow precision [bytes]; None if the precision is not narrow.
        dropped_modules: Modules that selective recomputation repeats.
        facts: Facts of the runtime.
    """

    degrees: Degrees
    mbs: IntArray
    tokens: FloatArray
    residual: FloatArray
    row_tokens: FloatArray | int
    length: FloatArray | float
    expert_ranks: IntArray
    filled_share: float
    sequence_length: int
    element_bytes: int
    precision: str
    wide: str
    narrow_bytes: float | None
    dropped_modules: tuple[str, ...]
    facts: RuntimeFacts

    @property
    def is_split(self) -> np.ndarray:
        """Whether norms and residuals work on a part of a rank's tokens [u]."""
        return np.asarray(self.residual < self.tokens)

    @property
    def sequences(self) -> FloatArray:
        """Number of sequences of `length` tokens that make up a micro-batch [u]."""
        return np.asarray(self.mbs * (self.row_tokens * self.filled_share / self.length), dtype=np.float64)
