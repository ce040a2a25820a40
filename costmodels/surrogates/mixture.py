"""Bayesian model averaging: hypotheses share the draws in proportion to their probabilities."""

from __future__ import annotations

import numpy as np

from hardware.arrays import FloatArray, IntArray


def probabilities_of(log_weights: FloatArray) -> FloatArray:
    """Compute the probabilities [h] of hypotheses from the logarithms of prior times likelihood [h]."""
    # relative to the largest, so that none overflows
    weights = np.exp(log_weights - np.max(log_weights))
    return np.asarray(weights / weights.sum())


def allot_draws(probabilities: FloatArray, num_draws: int, rng: np.random.Generator) -> IntArray:
    """Return the number of draws of each hypothesis [h]: its expectation, rounded by systematic resampling."""
    # one uniform offset decides every rounding, so each count is within one of its expectation
    edges = np.cumsum(probabilities) * num_draws
    edges[-1] = num_draws
    cut = np.floor(edges - rng.random()).astype(np.int64) + 1
    cut[-1] = num_draws
    return np.diff(cut, prepend=0)
