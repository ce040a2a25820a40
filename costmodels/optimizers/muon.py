"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz products; Adam updates everything else.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon) and Liu et al. 2025 (arXiv 2502.16982). An iteration multiplies
X X^T, its square, and their sum with X, where X has no more rows than columns: 4 r^2 c + 2 r^3 FLOPs for r <= c.

Sources: NVIDIA-NeMo/Emerging-Optimizers orthogonalized_optimizers/muon_utils.py (newton_schulz_step), torch
optim/_muon.py, torchtitan 0.3.0 distributed/flex_shard/dist_muon.py; DeepSpeed 0.19.8 runtime/zero/muon/
original_muon.py, whose `gram` method iterates on the small square X X^T and multiplies with X twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.optimizers.contract import MATRICES, AbstractOptimizer, Part, Product, State
from costmodels.optimizers.elementwise import FIRST, MOMENTUM, SECOND
from hardware.arrays import FloatArray

RESTART = 2
"""Iteration before which DeepSpeed's `gram` method multiplies with X anew."""
FURTHER_BYTES = 44
"""Bytes per element beside gradient, weight and momentum, each once: the momentum's norm (4), its division by it (8),
its copy in 16 bits (6), the product back in 32 bits (6), scaled (8), added to the weight (4), which decays before (8);
counted operator by operator in Emerging-Optimizers' orthogonalized_optimizer.py and muon_utils.py, which nothing
fuses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Muon(AbstractOptimizer):
    """Muon with another optimizer for vectors and tables.

    Attributes:
        others: States of what is no matrix of a layer.
        beside: Further states of matrices.
    """

    others: tuple[State, ...] = (FIRST, SECOND)
    beside: tuple[State, ...] = ()

    @property
    def needs_matrices(self) -> bool:
        """Whether its update multiplies whole matrices."""
        return True

    def states(self, part: Part) -> tuple[State, ...]:
        """Return the momentum of matrices, and the others' states."""
        return (MOMENTUM, *self.beside) if part in MATRICES else self.others

    def further_bytes(self, part: Part) -> float:
        """Return what passes around the products move."""
        return FURTHER_BYTES if part in MATRICES else 0.0

    def products(self, rows: FloatArray, columns: FloatArray, *, steps: int, method: str) -> tuple[Product, ...]:
        """Return the products of one matrix; see the module."""
        short, long = np.minimum(rows, columns), np.maximum(rows, columns)
        if method == "standard":
            whole, small = np.full_like(short, steps), np.full_like(short, steps)
        else:
            # Each iteration squares R; all but the first of a part multiply Q once, and all but the last R twice. Two
            # parts, before and after the restart, begin with X X^T and end with Q X. Square matrices go the other way.
            parts = [length for length in (min(steps, RESTART), steps - RESTART) if length > 0]
            is_square = short == long
            whole = np.where(is_square, steps, len(parts))
            small = np.where(is_square, steps, sum(length + 3 * (length - 1) for length in parts))
        return (
            Product(short, long, short, whole),
            Product(short, short, short, small),
            Product(short, short, long, whole),
        )
