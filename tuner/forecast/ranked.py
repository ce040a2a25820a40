"""Ranking of a study's candidates: by the predictions, or by what its trials have taught once some have ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.simulator.leaders import LEADERS, is_worth_simulating, simulated_times_s
from hardware.arrays import FloatArray, IntArray
from tuner.forecast.candidates import Candidates, ranking
from tuner.forecast.objective import rate_of
from tuner.forecast.prepared import Prepared
from tuner.search.objectives import COST, ENERGY
from tuner.subject.ability import Ability
from tuner.subject.problem import Problem

OnProgress = Callable[[str], None]


def ignore_progress(_: str) -> None:
    """Do nothing, for callers who do not follow the progress."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranked:
    """Candidates of a study in the order of their step times.

    Attributes:
        order: Positions of the candidates, the shortest step first; those that do not fit or cannot run come last [n].
        step_time_s: Step time of each candidate: measured, the posterior mean, or predicted [s], [n].
        peak_bytes: Peak memory of each candidate, from the same source [bytes], [n].
        fits: Whether the candidate fits in memory and is expected to run [n].
        is_measured: Whether a trial of the candidate has completed [n].
        is_simulated: Whether the step time is that of the event simulator [n].
        num_trials: Number of trials that taught; 0 where the candidates are ranked by the predictions.
        fit_probability: Probability that the candidate fits, as trials taught [n]; None before any.
        value: Value that the study minimizes in place of the step time, by which the order is [n]; None for step times.
    """

    order: IntArray
    step_time_s: FloatArray
    peak_bytes: FloatArray
    fits: NDArray[np.bool_]
    is_measured: NDArray[np.bool_]
    is_simulated: NDArray[np.bool_]
    num_trials: int
    fit_probability: FloatArray | None = None
    value: FloatArray | None = None


def predicted_ranking(prepared: Prepared, *, on_progress: OnProgress = ignore_progress) -> Ranked:
    """Return the ranking by the predictions, before any trial.

    Where hosts or links are unlike, or devices share adapters, the leaders by the closed form are simulated: they keep
    their places before all others, in the order of their simulated steps.

    Args:
        prepared: Study.
        on_progress: Function that is told what takes seconds.
    """
    problem, candidates = prepared.problem, prepared.candidates
    memory, order = candidates.space.memory, ranking(problem, candidates)
    step_time_s, is_simulated = candidates.estimate.step_time_s.copy(), np.zeros(len(order), dtype=np.bool_)
    if problem.subject.has(Ability.LAYERS) and is_worth_simulating(problem.cluster):
        leaders = order[:LEADERS][memory.fits(problem.options.memory_headroom)[order[:LEADERS]]]
        if len(leaders):
            on_progress(f"simulating the {len(leaders)} fastest predictions, because stages or links are unlike")
        step_time_s[leaders] = simulated_times_s(problem.setting, candidates.space.grid, leaders, memory=memory)
        is_simulated[leaders] = True
        order[: len(leaders)] = leaders[np.argsort(step_time_s[leaders], kind="stable")]
    ranked = Ranked(
        order=order,
        step_time_s=step_time_s,
        peak_bytes=np.asarray(memory.peak_bytes, dtype=np.float64),
        fits=memory.fits(problem.options.memory_headroom),
        is_measured=np.zeros(len(order), dtype=np.bool_),
        is_simulated=is_simulated,
        num_trials=0,
    )
    return by_objective(prepared, ranked)


def by_objective(prepared: Prepared, ranked: Ranked) -> Ranked:
    """Return a ranking in the order of the study's one value; of two values the step time orders."""
    objective, candidates = prepared.problem.objective, prepared.candidates
    if objective not in ((COST,), (ENERGY,)):
        return ranked
    value = ranked.step_time_s * rate_of(objective[0], prepared, candidates.space.grid, candidates.estimate)
    # equal values stay in the order of the step times
    place = np.argsort(ranked.order)
    return replace(ranked, order=np.lexsort((place, value, ~ranked.fits)), value=value)


def without(ranked: Ranked, positions: IntArray) -> Ranked:
    """Return a ranking in which the candidates at some positions do not run, and come last."""
    fits = ranked.fits.copy()
    fits[positions] = False
    out = np.isin(ranked.order, positions)
    return replace(ranked, fits=fits, order=np.concatenate([ranked.order[~out], ranked.order[out]]))


def row_of(prepared: Prepared, ranked: Ranked, place: int) -> dict[str, Any]:
    """Return the candidate at a place of the ranking, from 0, as plain values, with that of the study's objective."""
    # plain Python numbers, so that rows are JSON as they are
    position = int(ranked.order[place])
    step_time_s = float(ranked.step_time_s[position])
    unmeasured = "learned" if ranked.num_trials else "simulated" if ranked.is_simulated[position] else "predicted"
    source = prepared.request.trials.backend.origin if ranked.is_measured[position] else unmeasured
    return {
        **prepared.candidates.space.grid.values(position),
        "step_time_s": step_time_s,
        "peak_memory_bytes": int(ranked.peak_bytes[position]),
        "fits": bool(ranked.fits[position]),
        "tokens_per_s_per_device": prepared.problem.subject.throughput(step_time_s),
        "source": source,
        **({} if ranked.value is None else {prepared.problem.objective[0]: float(ranked.value[position])}),
    }


def place_of_current(problem: Problem, candidates: Candidates, ranked: Ranked) -> int | None:
    """Return the place of the current configuration in the ranking, from 0; None without one."""
    if problem.current is None:
        return None
    grid = candidates.space.grid
    position = grid.positions().get(tuple(problem.current.values(grid.dimensions).values()))
    return None if position is None else int(np.flatnonzero(ranked.order == position)[0])
