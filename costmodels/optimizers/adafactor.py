"""Adafactor: a second moment factored into the means of a matrix's rows and columns (Shazeer and Stern 2018).

It has no first moment. What is no matrix keeps a whole second moment (torch optim/_adafactor.py, _init_group), which is
what a flat shard of many weights is too.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.optimizers.contract import AbstractOptimizer, Part, State

FACTORS = State(name="second_moment", width=4.0, is_factored=True)
WHOLE = State(name="second_moment", width="second")
FURTHER_BYTES = 56
"""Bytes per element beside gradient, weight and factors, each once: norms of the weight (4), of the gradient's rows (4)
and columns (4), the product of the factors (4), divided (8), bounded (8), to the power -1/2 (8), times the gradient
(8), its norm (4), and its addition (4). torch's optim/_adafactor.py runs them one by one; a test counts them there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adafactor(AbstractOptimizer):
    """Adafactor of torch and transformers, without a first moment."""

    def states(self, part: Part) -> tuple[State, ...]:
        """Return the factors of a matrix, and the whole second moment of a vector."""
        return (WHOLE,) if part == "vector" else (FACTORS,)

    def further_bytes(self, part: Part) -> float:  # noqa: ARG002 # vectors are too small to matter
        """Return what its unfused operators move."""
        return FURTHER_BYTES
