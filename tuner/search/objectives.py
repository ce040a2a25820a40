"""What a study minimizes: step time, cost or energy of its tokens, or two values of which it wants the Pareto front.

The posterior draws step times. Cost and energy of a candidate are its step time times a rate that is known beforehand,
so that a draw of step times is a draw of them too. A peak of memory is the measured one or, before, the predicted one.

Of two values no single candidate is the best. Each draw is then given a direction of its own, a random preference
between the two, and names the candidate that is best in it: together the draws name the front, and p_star is the share
of them whose candidate has been tried. A direction w measures candidate i by max_k w_k (y_ik - z_k), the weighted
Chebyshev distance of its logarithms y from the best value z of each kind. Every point of a front, convex or not, is
nearest in some direction (Miettinen 1999, section 3.4.3; random directions as in ParEGO, Knowles 2006).

Letters: n candidates, M draws, k values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardware.arrays import FloatArray, IntArray
from trials.backend import Observation

STEP_TIME, COST, ENERGY, MEMORY = "step_time", "cost_per_token", "energy_per_token", "memory"
"""Names of the values that a study may minimize."""

GIB = 2**30
LEAST_RANGE = 1e-3
"""Least range of a logarithm over the front of a draw, where the best of both kinds is one candidate."""
TOWARDS_FRONT = 1e-3
"""Weight of the sum of distances: of equal maxima it prefers a candidate that no other dominates (Miettinen 1999)."""


def label_of(name: str, currency: str = "") -> str:
    """Return the name of a value with its unit, as people and Optuna's dashboard read it."""
    labels = {
        STEP_TIME: "step time [s]",
        COST: f"cost of a million tokens [{currency}]",
        ENERGY: "energy of a token [J]",
        MEMORY: "peak memory [GiB]",
    }
    return labels[name]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MinimizedValue:
    """One of the values that a study minimizes.

    Attributes:
        name: Name of the value.
        label: Name with its unit, as Optuna shows it.
        log_rate: Logarithm of the value per second of step time or, for memory, of the predicted value itself [n].
    """

    name: str
    label: str
    log_rate: FloatArray

    @property
    def follows_time(self) -> bool:
        """Whether the value is proportional to the step time of its candidate."""
        return self.name != MEMORY

    def logs(
        self, log_step_s: FloatArray, peaks_bytes: Mapping[int, int], layouts: IntArray | None = None
    ) -> FloatArray:
        """Return the logarithms of the value for draws of the log step time [M, n].

        Args:
            log_step_s: Joint draws of the log step time [M, n].
            peaks_bytes: Measured peaks of memory by candidate [bytes].
            layouts: Layout of each candidate [n]; None where each is a layout of its own.
        """
        known = self.log_rate.copy() if layouts is None else self.log_rate[layouts]
        if self.follows_time:
            return log_step_s + known
        known[list(peaks_bytes)] = np.log([peak / GIB for peak in peaks_bytes.values()])
        return np.broadcast_to(known, log_step_s.shape)

    def measured(self, layout: int, observation: Observation) -> float:
        """Return the value of a completed trial of a layout."""
        assert observation.step_time_s is not None, "the trial completed"
        if self.follows_time:
            return float(observation.step_time_s * np.exp(self.log_rate[layout]))
        peak = observation.peak_memory_bytes
        return float(np.exp(self.log_rate[layout])) if peak is None else peak / GIB


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Objective:
    """One value, or two, that a study minimizes."""

    values: tuple[MinimizedValue, ...]

    def __post_init__(self) -> None:
        assert 1 <= len(self.values) <= 2, "a study minimizes one value, or two"
        assert any(value.follows_time for value in self.values), "a trial's values tell its step time"

    @property
    def labels(self) -> list[str]:
        """Names of the values with their units."""
        return [value.label for value in self.values]

    def step_time_s(self, layout: int, values: Sequence[float]) -> float:
        """Return the step time of a layout with such values [s]."""
        own, value = next(pair for pair in zip(self.values, values, strict=True) if pair[0].follows_time)
        return float(value / np.exp(own.log_rate[layout]))

    def measured(self, layout: int, observation: Observation) -> list[float]:
        """Return the values of a completed trial of a layout."""
        return [value.measured(layout, observation) for value in self.values]

    def scalarized(
        self,
        log_step_s: NDArray[np.float32],
        peaks_bytes: Mapping[int, int],
        rng: np.random.Generator,
        *,
        layouts: IntArray | None = None,
    ) -> NDArray[np.float32]:
        """Return one number for each candidate of each draw, of which the smallest is the best [M, n].

        Differences are those of logarithms: of the value, or of the one that weighs most in the draw's direction.

        Args:
            log_step_s: Joint draws of the log step time [M, n], infinite where a candidate cannot run.
            peaks_bytes: Measured peaks of memory by candidate [bytes].
            rng: Source of the directions; consumed if there are two values.
            layouts: Layout of each candidate [n]; None where each is a layout of its own.
        """
        logs = [value.logs(log_step_s.astype(np.float64), peaks_bytes, layouts) for value in self.values]
        if len(logs) == 1:
            return np.asarray(logs[0], dtype=np.float32)
        return _in_random_directions(np.stack(logs, axis=2), np.isfinite(log_step_s), rng).astype(np.float32)


def _in_random_directions(logs: FloatArray, runs: NDArray[np.bool_], rng: np.random.Generator) -> FloatArray:
    """Return the Chebyshev distance of every candidate from the best values, in a direction of each draw [M, n].

    Args:
        logs: Logarithms of both values [M, n, 2].
        runs: Whether a candidate can run [M, n].
        rng: Source of the directions; consumed.
    """
    logs = np.where(runs[:, :, None], logs, np.inf)
    first = rng.uniform(size=len(logs))
    found = np.full(logs.shape[:2], np.inf)
    some = runs.any(axis=1)
    if not some.any():
        return found
    logs, draws = logs[some], np.arange(int(some.sum()))
    best = logs.min(axis=1)  # [M, 2]
    # over the front each value ranges from its best to that of the candidate which is best in the other
    other = np.stack([logs[draws, logs[:, :, 1 - at].argmin(axis=1), at] for at in range(2)], axis=1)
    weight = np.stack([first[some], 1 - first[some]], axis=1) / np.maximum(other - best, LEAST_RANGE)
    weight /= weight.max(axis=1, keepdims=True)
    behind = weight[:, None] * (logs - best[:, None])
    found[some] = behind.max(axis=2) + TOWARDS_FRONT * behind.sum(axis=2)
    return found
