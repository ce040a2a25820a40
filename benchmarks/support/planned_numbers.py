"""Run a planned JAX program and the plain one on the same numbers, and compare their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def difference(
    function: Callable[..., Any], planned: Callable[..., Any], arguments: Sequence[Any], seed: int = 0
) -> float:
    """Return the largest difference of an element of any output, over the largest element of that output.

    Args:
        function: The plain function.
        planned: The planned function, which should compute the same results.
        arguments: Trees of the shapes of the arguments.
        seed: Seed of the random arguments.
    """
    rng = np.random.default_rng(seed)
    values = jax.tree.map(lambda leaf: _draw_leaf(leaf, rng), arguments)
    # Outputs are trees of equal structure, compared leaf by leaf.
    pairs = zip(jax.tree.leaves(planned(*values)), jax.tree.leaves(jax.jit(function)(*values)), strict=True)
    return max(_error(*pair) for pair in pairs)


def _draw_leaf(leaf: Any, rng: np.random.Generator) -> Any:
    """Draw an argument away from zero.

    Adam's first step is the sign of a gradient, so that moments near zero would amplify rounding differences.
    """
    if np.issubdtype(leaf.dtype, np.integer):
        return rng.integers(0, 5, leaf.shape).astype(leaf.dtype)
    return rng.uniform(0.02, 0.2, leaf.shape).astype(leaf.dtype)


def _error(one: Any, other: Any) -> float:
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    assert np.isfinite(one).all(), "the programs compute numbers"
    assert np.isfinite(other).all(), "the programs compute numbers"
    return float(np.max(np.abs(one - other)) / max(np.max(np.abs(other)), 1e-30))
