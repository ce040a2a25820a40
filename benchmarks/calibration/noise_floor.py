"""Compute the scores of a perfect, noise-free model of step time on noisy measurements.

The measured times replace the true ones. An observation is a measured time with additional lognormal noise, and the
perfect model predicts the measured time. Measured times already contain noise, so configurations differ a little more
than in truth, and the floor of tau and regret is slightly optimistic.

Letters: d draws, n runs, c configurations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.support.fidelity_figures import MIN_CONFIGS_TO_RANK
from costmodels.calibration.fidelity import group_key
from costmodels.calibration.measured_runs import MeasuredRun
from hardware.arrays import FloatArray

NUM_DRAWS = 200
MAX_PAIRS = 4_000_000
"""Maximum number of pairs that are compared at once: 32 MB of float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseFloor:
    """Means over the draws of the figures of `fidelity_figures.judge`; None if no group can be ranked."""

    noise: float
    median_ape: float | None
    mean_ape: float | None
    p90_ape: float | None
    median_tau: float | None
    median_regret: float | None
    mean_regret: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def noise_floor(runs: Sequence[MeasuredRun], noise: float, rng: np.random.Generator) -> NoiseFloor:
    """Compute the floor of every figure on the timed runs by Monte Carlo.

    Args:
        runs: Measured runs of any number of groups.
        noise: Standard deviation of the logarithm of an observation.
        rng: Source of the noise.
    """
    timed = [run for run in runs if run.step_time_s is not None]
    if not timed:
        return NoiseFloor(
            noise=noise,
            median_ape=None,
            mean_ape=None,
            p90_ape=None,
            median_tau=None,
            median_regret=None,
            mean_regret=None,
        )
    # Lognormal noise, independent for each run and draw [d, n].
    measured = np.array([run.step_time_s for run in timed])
    observed = measured * np.exp(noise * rng.standard_normal((NUM_DRAWS, len(timed))))
    # Errors relative to the observation, as `fidelity_figures.judge` computes them.
    ape = np.abs(measured / observed - 1)
    # Ranking figures are computed per group and draw, and averaged over draws last, as a single measurement would
    # score.
    orders = [_order(measured[at], observed[:, at], slots) for at, slots in _groups(timed)]
    ranked = [order for order in orders if order is not None]
    tau, regret = (np.stack(figures) for figures in zip(*ranked, strict=True)) if ranked else (None, None)
    return NoiseFloor(
        noise=noise,
        median_ape=float(np.median(ape, axis=1).mean()),
        mean_ape=float(ape.mean()),
        p90_ape=float(np.quantile(ape, 0.9, axis=1).mean()),
        median_tau=None if tau is None else float(np.median(tau, axis=0).mean()),
        median_regret=None if regret is None else float(np.median(regret, axis=0).mean()),
        mean_regret=None if regret is None else float(regret.mean()),
    )


def _groups(runs: Sequence[MeasuredRun]) -> list[tuple[np.ndarray, list[list[int]]]]:
    """Return the positions of each group's runs, and the runs [n] that share each configuration [c]."""
    positions: dict[Any, list[int]] = defaultdict(list)
    for position, run in enumerate(runs):
        positions[group_key(run)].append(position)
    groups = []
    for at in positions.values():
        # Repeated runs of a configuration are one entry of the ranking, by their median.
        slots: dict[Any, list[int]] = defaultdict(list)
        for slot, position in enumerate(at):
            slots[runs[position].config].append(slot)
        groups.append((np.array(at), list(slots.values())))
    return groups


def _order(
    measured: FloatArray, observed: FloatArray, slots: Sequence[Sequence[int]]
) -> tuple[FloatArray, FloatArray] | None:
    """Compute tau-b and regret of every draw [d] in one group; None if it has too few configurations."""
    if len(slots) < MIN_CONFIGS_TO_RANK:
        return None
    believed = np.array([np.median(measured[list(own)]) for own in slots])
    seen = np.stack([np.median(observed[:, list(own)], axis=1) for own in slots], axis=1)
    # The model chooses by its noise-free times, but the choice is judged by noisy observations.
    regret = seen[:, np.argmin(believed)] / seen.min(axis=1) - 1
    return _tau(believed, seen), regret


def _tau(believed: FloatArray, seen: FloatArray) -> FloatArray:
    """Compute Kendall's tau-b [d] of one order [c] and the orders of the draws [d, c], which have no ties."""
    # tau-b = (concordant - discordant) / sqrt(pairs * pairs untied in `believed`), in blocks that limit the memory.
    first, second = np.triu_indices(len(believed), k=1)
    sign = np.sign(believed[first] - believed[second])
    size = max(1, MAX_PAIRS // len(first))
    agreement = [
        np.sign(part[:, first] - part[:, second]) @ sign
        for part in (seen[start : start + size] for start in range(0, len(seen), size))
    ]
    pairs = len(first) * max(float(np.abs(sign).sum()), 1.0)
    return np.asarray(np.concatenate(agreement) / np.sqrt(pairs), dtype=np.float64)
