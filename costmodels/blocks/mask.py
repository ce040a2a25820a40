"""Masks of attention: which keys a query sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """Mask of one attention.

    Attributes:
        causal: Whether a query sees no later keys.
        window: Number of keys that a query sees with its own; 0 for all (Mistral 7B, arXiv 2310.06825, section 2).
        chunk: Length of the chunks outside of which no query sees; 0 for none (Llama 4).
    """

    causal: bool = True
    window: int = 0
    chunk: int = 0

    @property
    def label(self) -> str:
        """Word for the mask in the name of a block; empty for attention to all earlier keys."""
        if self.window:
            return "window"
        if self.chunk:
            return "chunk"
        return "" if self.causal else "full"

    def share(self, length: FloatArray | float) -> FloatArray | float:
        """Return the share of all pairs of a query and a key of a sequence that the mask lets through [n].

        Counted for long sequences: a causal mask halves the pairs; under a window of w keys the first w queries see
        w/2 keys in the mean, and the others w.
        """
        whole = 0.5 if self.causal else 1.0
        if self.window:
            seen = np.minimum(self.window / np.asarray(length, dtype=np.float64), 1.0)
            return np.asarray(seen * (1.0 - seen / 2.0)) * (2.0 * whole)
        if self.chunk:
            return np.asarray(whole * np.minimum(self.chunk / np.asarray(length, dtype=np.float64), 1.0))
        return whole
