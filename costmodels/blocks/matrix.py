"""Matrices of a block as one rank keeps them: whose updates multiply them, and of which Adafactor keeps lines.

Letters: w rows of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hardware.arrays import FloatArray

Cut = Literal["rows", "columns", "none"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Matrix:
    """Matrix of a block.

    Attributes:
        part: Part of the model that it belongs to: a routed expert, or any other matrix.
        rows: Rows of the whole matrix.
        columns: Columns of the whole matrix.
        cut: What tensor parallelism cuts.
        ways: Number of ranks that it is cut over [w].
        each: Number of such matrices that one rank keeps of a block [w].
    """

    part: Literal["matrix", "expert"] = "matrix"
    rows: int
    columns: int
    cut: Cut
    ways: FloatArray
    each: FloatArray | float = 1.0

    @property
    def local(self) -> tuple[FloatArray, FloatArray]:
        """Rows and columns of a rank's part [w]."""
        rows, columns = np.full_like(self.ways, self.rows), np.full_like(self.ways, self.columns)
        return (
            rows / self.ways if self.cut == "rows" else rows,
            columns / self.ways if self.cut == "columns" else columns,
        )


def mlp_matrices(
    hidden_size: int,
    inner: int,
    ways: FloatArray,
    *,
    gated: bool,
    joins_gate: bool,
    each: FloatArray | float = 1.0,
    part: Literal["matrix", "expert"] = "matrix",
) -> list[Matrix]:
    """Return the matrices of an MLP: up, perhaps joined with its gate, and down."""
    firsts = 2 if gated else 1
    joined = firsts if joins_gate else 1
    number = each * (firsts // joined)
    return [
        Matrix(part=part, rows=joined * inner, columns=hidden_size, cut="rows", ways=ways, each=number),
        Matrix(part=part, rows=hidden_size, columns=inner, cut="columns", ways=ways, each=each),
    ]
