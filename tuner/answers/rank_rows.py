"""Rows of a ranking: each candidate's figures with their errors, its speed-up, and what bounds its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from costmodels.step.error_models import memory_error_of
from costmodels.step.step_time import StepEstimate
from costmodels.surrogates.uncertainty import likely_range
from hardware.arrays import IntArray
from tuner.answers.basis import Basis
from tuner.answers.reference import Reference, reference_among
from tuner.forecast.bounds import NETWORK, shares_of
from tuner.forecast.prepared import Prepared
from tuner.forecast.ranked import Ranked, row_of
from tuner.search.step_draws import STEP_RANGE

FIRST = "first"
"""Name of the fastest candidate as the one that others are compared with."""


def rank_rows(prepared: Prepared, basis: Basis, ranked: Ranked, places: Sequence[int]) -> list[dict[str, Any]]:
    """Return the candidates at some places of a ranking, from 0, as plain values; docs/commands.md has their keys.

    Args:
        prepared: Study.
        basis: What the ranking rests on.
        ranked: Ranking.
        places: Places of the candidates.
    """
    if not places:
        return []
    problem, candidates = prepared.problem, prepared.candidates
    positions = ranked.order[np.array(places, dtype=np.int64)]
    grid, memory = candidates.space.grid.take(positions), candidates.space.memory.take(positions)
    breakdown = {part: seconds[positions] for part, seconds in candidates.estimate.breakdown_s.items()}
    estimate = StepEstimate(step_time_s=candidates.estimate.step_time_s[positions], breakdown_s=breakdown)
    shares = shares_of(problem, grid, estimate, memory)
    ranges, chances = _errors(prepared, basis, ranked, positions)
    compared_s = float(ranked.step_time_s[compared_with(prepared, ranked)[1]])
    rows = []
    for at, place in enumerate(places):
        row = row_of(prepared, ranked, place)
        rows.append(
            row
            | ranges[at]
            | {
                "speedup": compared_s / row["step_time_s"],
                "mfu": problem.subject.utilisation(row["step_time_s"]),
                "fit_probability": chances[at],
                "bound_by": next(iter(shares[at])),
                "shares": shares[at],
                "exposed": _most_exposed({part: float(breakdown[part][at]) for part in NETWORK}),
            }
        )
    return rows


def compared_with(prepared: Prepared, ranked: Ranked) -> tuple[str, int]:
    """Return the candidate that speed-ups are relative to, by its name and its position.

    It is the current configuration, or else the baseline, or else the first of the ranking.
    """
    reference = reference_among(prepared)
    position = None if reference is None else _position_of(prepared, reference)
    if reference is None or position is None:
        return FIRST, int(ranked.order[0])
    return reference.role, position


def _most_exposed(seconds: Mapping[str, float]) -> str | None:
    """Return the degree whose communication takes most of a step; None if none takes any."""
    part = max(seconds, key=seconds.__getitem__)
    return part if seconds[part] else None


def _position_of(prepared: Prepared, reference: Reference) -> int | None:
    grid = prepared.candidates.space.grid
    return grid.positions().get(tuple(reference.config.values(grid.dimensions).values()))


def _errors(
    prepared: Prepared, basis: Basis, ranked: Ranked, positions: IntArray
) -> tuple[list[dict[str, Any]], list[float | None]]:
    """Return the range of 95% of each step time by its key, and the probability of each to fit; None if not known.

    Once trials have taught, the chance of a step to be slower than its range is there too.
    """
    problem, space = prepared.problem, prepared.candidates.space
    if basis.taught is not None:
        assert ranked.fit_probability is not None, "the posterior judges every candidate"
        return basis.taught.step_ranges(positions), ranked.fit_probability[positions].tolist()
    memory = space.memory.take(positions)
    uncertainty = problem.subject.uncertainty(space.grid.take(positions), memory)
    if uncertainty is None:
        return [{STEP_RANGE: None}] * len(positions), [None] * len(positions)
    ranges: list[dict[str, Any]] = [
        {STEP_RANGE: list(likely_range(float(ranked.step_time_s[position]), float(error)))}
        for position, error in zip(positions, uncertainty.log_error_95, strict=True)
    ]
    chance = memory.probability_of_fit(problem.options.memory_headroom, memory_error_of(problem.setting.runtime))
    return ranges, [float(each) for each in chance]
