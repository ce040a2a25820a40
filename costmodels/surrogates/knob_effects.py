"""Effects of knobs on a logarithmic quantity of a layout, such as the step time, learned from trials.

    log y(x, k) = f(x) + sum_j a_j(x, k) s_j b_j(k_j)' W_j t_j(x) + e

A trial runs the layout x with the knobs k. f is the process of the layouts (`surrogate.py`). b_j(v) are basis functions
of a knob's values, zero for the value in use today, so that effects are relative to today. t_j(x) are columns of the
layout: the constant 1, whose weight is the main effect that all layouts share, and what the effect may be tied to, such
as the share of a step that communicates. a_j says whether the knob is set at all. All weights W_j are standard normal.

The scale s_j is one of a few such as SCALES, and the first of them is zero: a knob may do nothing at all (a spike and
slab prior, George and McCulloch 1993). The scales of all knobs are drawn by Gibbs sampling from their posterior, in
which the weights and f are integrated out; the weights follow given the scales. A knob that shows no effect in a few
trials thus has none in nearly all draws, and further trials leave it at today's value.

Letters: t trials, j knobs, v values of a knob, r basis functions, c columns of the layout, n layouts, M draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardware.arrays import FloatArray, IntArray

SCALES = (0.0, 0.02, 0.1)
"""Standard deviations of the log effect of a knob's value: none, that of most overlap flags and bucket sizes, and that
of schedules, precision and network variables (assumed; published gains of single flags are 1 to 20%)."""

CHANCES = (0.5, 0.3, 0.2)
"""Prior probabilities of SCALES (assumed)."""

KNOB_NOISE = 0.004
"""Standard deviation of what knobs do beyond the model: effects of one knob that depend on another (assumed)."""

BURN_IN = 16
"""Sweeps of the Gibbs sampler before the first draw."""

NEIGHBOURS = 0.4
"""Distance over which the effects of ordered values decorrelate, as a share of the range of the values."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnobDesign:
    """Prior of one knob's effect.

    Attributes:
        basis: Basis functions of the values, zero for today's [v, r].
        ties: Columns of the layouts that the effect is proportional to [n, c].
        active: Whether the knob is set for a layout, as far as the layout decides [n].
        known: Expected log effect of each value for each layout, zero for today's [n, v].
        scales: Standard deviations of the log effect of a value, the first of them zero; see SCALES.
        chances: Prior probabilities of the scales.
    """

    basis: FloatArray
    ties: FloatArray
    active: NDArray[np.bool_]
    known: FloatArray
    scales: tuple[float, ...] = SCALES
    chances: tuple[float, ...] = CHANCES

    def columns(self, layouts: IntArray, codes: IntArray, is_set: NDArray[np.bool_]) -> FloatArray:
        """Return the columns of the weights for some trials [t, r * c]; zero where the knob is not set.

        Args:
            layouts: Position of each trial's layout [t].
            codes: Position of each trial's value among the knob's values [t].
            is_set: Whether the knob is set in each trial [t].
        """
        outer = self.basis[codes][:, :, None] * self.ties[layouts][:, None, :]
        width = self.basis.shape[1] * self.ties.shape[1]
        return np.asarray(outer.reshape(len(layouts), width) * is_set[:, None])


def basis_of(num_values: int, today: int, positions: FloatArray | None) -> FloatArray:
    """Return the basis functions of a knob's values [v, r], zero for today's.

    Args:
        num_values: Number of values v.
        today: Position of today's value.
        positions: Places of ordered values from 0 to 1, whose neighbours have similar effects [v]; None where values
            have no order, whose effects are independent.
    """
    if positions is None:
        return np.delete(np.eye(num_values), today, axis=1)
    distance = np.abs(positions[:, None] - positions[None, :])
    # a squared exponential of unit variance, made relative to today's value
    covariance = np.exp(-0.5 * (distance / NEIGHBOURS) ** 2) + 1e-9 * np.eye(num_values)
    factor = np.linalg.cholesky(covariance)
    return np.asarray(factor - factor[today])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnobDraws:
    """Joint draws of the effects of all knobs.

    Attributes:
        designs: Prior of each knob [j].
        weights: Drawn weights of each knob, times their scale: [M, r, c] each.
        scales: Position of each knob's scale among those of its design [M, j]; 0 where it does nothing.
    """

    designs: tuple[KnobDesign, ...]
    weights: tuple[FloatArray, ...]
    scales: IntArray

    def of_values(self, knob: int, layouts: IntArray) -> FloatArray:
        """Return the drawn log effects of all values of one knob, where it is set [M, layouts, v].

        Args:
            knob: Position of the knob.
            layouts: Positions of layouts: the same for all draws [l], or others for each [M, l].
        """
        design = self.designs[knob]
        ties = np.broadcast_to(
            design.ties[layouts], (len(self.weights[knob]), *layouts.shape[-1:], design.ties.shape[1])
        )
        by_basis = np.einsum("mrc,mlc->mlr", self.weights[knob], ties, optimize=True)
        return np.asarray(by_basis @ design.basis.T + design.known[layouts])

    def of_pairs(self, layouts: IntArray, codes: IntArray, is_set: NDArray[np.bool_]) -> FloatArray:
        """Return the drawn log effects of the knobs of pairs of layout and knobs [M, p].

        Args:
            layouts: Position of each pair's layout [p].
            codes: Position of each knob's value [p, j].
            is_set: Whether each knob is set [p, j].
        """
        total = np.zeros((len(self.scales), len(layouts)))
        for knob, design in enumerate(self.designs):
            columns = design.columns(layouts, codes[:, knob], is_set[:, knob])
            total += self.weights[knob].reshape(len(total), columns.shape[1]) @ columns.T
            total += design.known[layouts, codes[:, knob]] * is_set[:, knob]
        return total


def draw_effects(
    designs: Sequence[KnobDesign],
    layouts: IntArray,
    codes: IntArray,
    is_set: NDArray[np.bool_],
    values: FloatArray,
    covariance: FloatArray,
    num_draws: int,
    rng: np.random.Generator,
) -> KnobDraws:
    """Draw the effects of all knobs from their posterior after the trials.

    Args:
        designs: Prior of each knob [j].
        layouts: Position of each trial's layout [t].
        codes: Position of each knob's value in each trial [t, j].
        is_set: Whether each knob is set in each trial [t, j].
        values: Log of the measured quantity over that predicted for the layout [t].
        covariance: Covariance of these without knobs: of the layouts' process, and of measurement errors [t, t].
        num_draws: Number of draws M.
        rng: Source of the draws.
    """
    columns = [design.columns(layouts, codes[:, knob], is_set[:, knob]) for knob, design in enumerate(designs)]
    known = np.zeros(len(values))
    for knob, design in enumerate(designs):
        known += design.known[layouts, codes[:, knob]] * is_set[:, knob]
    residual = values - known
    covariance = covariance + KNOB_NOISE**2 * np.eye(len(values))
    scales = _draw_scales(designs, columns, residual, covariance, num_draws, rng)
    weights = [np.zeros((num_draws, each.shape[1])) for each in columns]
    # draws with equal scales share one factor
    patterns, inverse = np.unique(scales, axis=0, return_inverse=True)
    root = _factor(covariance)
    for number, pattern in enumerate(patterns):
        rows = np.flatnonzero(inverse.ravel() == number)
        sizes = [design.scales[scale] for design, scale in zip(designs, pattern, strict=True)]
        scaled = np.concatenate([size * each for size, each in zip(sizes, columns, strict=True)], axis=1)
        prior = rng.standard_normal((len(rows), scaled.shape[1]))
        if len(values):
            # a prior draw and its exact update by the trials (Matheron's rule)
            noise = rng.standard_normal((len(rows), len(values))) @ root.T
            factor = _factor(covariance + scaled @ scaled.T)
            missing = residual - prior @ scaled.T - noise
            prior = prior + _solve(factor, missing.T).T @ scaled
        start = 0
        for knob, (size, each) in enumerate(zip(sizes, columns, strict=True)):
            weights[knob][rows] = size * prior[:, start : start + each.shape[1]]
            start += each.shape[1]
    shapes = [(num_draws, design.basis.shape[1], design.ties.shape[1]) for design in designs]
    return KnobDraws(
        designs=tuple(designs),
        weights=tuple(each.reshape(shape) for each, shape in zip(weights, shapes, strict=True)),
        scales=scales,
    )


def _draw_scales(
    designs: Sequence[KnobDesign],
    columns: Sequence[FloatArray],
    residual: FloatArray,
    covariance: FloatArray,
    num_draws: int,
    rng: np.random.Generator,
) -> IntArray:
    """Draw the scale of each knob, as positions in its scales [M, j], by Gibbs sampling.

    The likelihood of a combination of scales integrates the weights out; combinations are seldom new, so that each is
    computed once.
    """
    if not len(residual):
        return np.stack([rng.choice(len(each.scales), size=num_draws, p=each.chances) for each in designs], axis=1)
    # covariance of each knob at unit scale [j, t, t]; one that no trial has moved is zero
    grams = [each @ each.T for each in columns]
    is_moved = [bool(each.any()) for each in columns]
    known: dict[tuple[int, ...], float] = {}

    def log_likelihood(pattern: tuple[int, ...]) -> float:
        found = known.get(pattern)
        if found is None:
            total = covariance.copy()
            for design, scale, gram in zip(designs, pattern, grams, strict=True):
                if scale:
                    total += design.scales[scale] ** 2 * gram
            factor = _factor(total)
            whitened = _whiten(factor, residual)
            found = known[pattern] = float(-0.5 * whitened @ whitened - np.log(np.diag(factor)).sum())
        return found

    moved = [knob for knob, is_one in enumerate(is_moved) if is_one]
    log_chances = [np.log(design.chances).tolist() for design in designs]
    chances = rng.random((BURN_IN + num_draws, len(designs))).tolist()
    current = [0] * len(designs)
    drawn = np.empty((num_draws, len(designs)), dtype=np.int64)
    for sweep, row in enumerate(chances):
        for knob in moved:
            log_weights = []
            for scale, log_chance in enumerate(log_chances[knob]):
                current[knob] = scale
                log_weights.append(log_chance + log_likelihood(tuple(current)))
            current[knob] = _pick(log_weights, row[knob])
        if sweep >= BURN_IN:
            drawn[sweep - BURN_IN] = current
    # nothing is known of a knob that no trial has moved
    for knob, design in enumerate(designs):
        if not is_moved[knob]:
            drawn[:, knob] = rng.choice(len(design.scales), size=num_draws, p=design.chances)
    return drawn


def _pick(log_weights: Sequence[float], share: float) -> int:
    """Return the position at which the cumulated weights exceed a share of their sum."""
    largest = max(log_weights)
    weights = [math.exp(each - largest) for each in log_weights]
    left = share * sum(weights)
    for at, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return at
    return len(weights) - 1


def _factor(covariance: FloatArray) -> FloatArray:
    """Return the lower Cholesky factor of a covariance [t, t]."""
    from scipy.linalg import cholesky  # noqa: PLC0415 # every study file loads this module, and few this library

    return np.asarray(cholesky(covariance, lower=True)) if len(covariance) else covariance


def _solve(factor: FloatArray, right: FloatArray) -> FloatArray:
    """Return x [t, m] with factor factor^T x = right."""
    from scipy.linalg import cho_solve  # noqa: PLC0415 # as above

    return np.asarray(cho_solve((factor, True), right))


def _whiten(factor: FloatArray, residual: FloatArray) -> FloatArray:
    """Return x [t] with factor x = residual."""
    from scipy.linalg import solve_triangular  # noqa: PLC0415 # as above

    return np.asarray(solve_triangular(factor, residual, lower=True))
