"""Adafactor: a second moment factored into the means of a matrix's rows and columns (Shazeer and Stern 2018).

It has no first moment. What is no matrix keeps a whole second moment (torch optim/_adafactor.py, _init_group), which is
what a flat shard of many weights is too.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.optimizers.contract import AbstractOptimizer, Part, State

FACTORS = State(name="second_moment", width=4.0, is_factored=True)
WHOLE = State(name="second_moment", width="second")
FURTHER_BYTES = 52
"""Bytes per element of a matrix beside gradient and weight, each once: norms of the weight (4), of rows (4) and of
columns (4), of which the gradient's own pass is one; the product of the factors written (4) and divided (8), clamped (8)
and taken to the power -1/2 (8), multiplied by the gradient (8 beside the gradient), and its norm and addition (8); counted
operator by operator in torch optim/_adafactor.py, _single_tensor_adafactor, which nothing fuses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adafactor(AbstractOptimizer):
    """Adafactor of torch and transformers, without a first moment."""

    def states(self, part: Part) -> tuple[State, ...]:
        """Return the factors of a matrix, and the whole second moment of a vector."""
        return (WHOLE,) if part == "vector" else (FACTORS,)

    def further_bytes(self, part: Part) -> float:  # noqa: ARG002 # vectors are too small to matter
        """Return what its unfused operators move."""
        return FURTHER_BYTES
