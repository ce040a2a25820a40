"""Hypotheses that share the draws: each gets as many as it is probable."""

from __future__ import annotations

import numpy as np

from hardware.arrays import FloatArray, IntArray


def probabilities_of(log_weights: FloatArray) -> FloatArray:
    """Probabilities [h] of hypotheses from the logarithms of prior times likelihood [h]."""
    weights = np.exp(log_weights - np.max(log_weights))
    return np.asarray(weights / weights.sum())


def allotted(probabilities: FloatArray, num_draws: int, rng: np.random.Generator) -> IntArray:
    """How many of the draws each hypothesis gets [h]: its expectation, rounded at random (systematic resampling)."""
    edges = np.cumsum(probabilities) * num_draws
    edges[-1] = num_draws
    cut = np.floor(edges - rng.random()).astype(np.int64) + 1
    cut[-1] = num_draws
    return np.diff(cut, prepend=0)
