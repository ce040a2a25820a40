"""Ranking of a study's candidates: by the predictions, or by what its trials have taught once some have ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.arrays import FloatArray, IntArray
from tuner.answers.candidates import Candidates, ranking, throughput_of
from tuner.study_file.config import StudyConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranked:
    """Candidates of a study in the order of their step times.

    Attributes:
        order: Positions of the candidates, the shortest step first; those that do not fit or cannot run come last [n].
        step_time_s: Step time of each candidate: measured, the posterior mean, or predicted [s], [n].
        peak_bytes: Peak memory of each candidate, from the same source [bytes], [n].
        fits: Whether the candidate fits in memory and is expected to run [n].
        is_measured: Whether a trial of the candidate has completed [n].
        num_trials: Number of trials that taught; 0 where the candidates are ranked by the predictions.
    """

    order: IntArray
    step_time_s: FloatArray
    peak_bytes: FloatArray
    fits: NDArray[np.bool_]
    is_measured: NDArray[np.bool_]
    num_trials: int


def predicted_ranking(config: StudyConfig, candidates: Candidates) -> Ranked:
    """Return the ranking by the predictions, before any trial."""
    memory = candidates.space.memory
    return Ranked(
        order=ranking(config, candidates),
        step_time_s=candidates.estimate.step_time_s,
        peak_bytes=np.asarray(memory.peak_bytes, dtype=np.float64),
        fits=memory.fits(config.options.memory_headroom),
        is_measured=np.zeros(len(candidates.space.grid), dtype=np.bool_),
        num_trials=0,
    )


def row_of(config: StudyConfig, candidates: Candidates, ranked: Ranked, place: int) -> dict[str, Any]:
    """Return the candidate at a place of the ranking, from 0, as plain values."""
    # plain Python numbers, so that rows are JSON as they are
    position = int(ranked.order[place])
    step_time_s = float(ranked.step_time_s[position])
    source = config.backend.origin if ranked.is_measured[position] else "learned" if ranked.num_trials else "predicted"
    return {
        **candidates.space.grid.values(position),
        "step_time_s": step_time_s,
        "peak_memory_bytes": int(ranked.peak_bytes[position]),
        "fits": bool(ranked.fits[position]),
        "tokens_per_s_per_device": throughput_of(config, step_time_s),
        "source": source,
    }


def place_of_current(config: StudyConfig, candidates: Candidates, ranked: Ranked) -> int | None:
    """Return the place of the current configuration in the ranking, from 0; None without one."""
    if config.current is None:
        return None
    grid = candidates.space.grid
    position = grid.positions().get(tuple(config.current.values(grid.dimensions).values()))
    return None if position is None else int(np.flatnonzero(ranked.order == position)[0])
