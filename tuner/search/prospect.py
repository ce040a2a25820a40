"""Prospect of a candidate: what a sampler's draws say of it before its trial, and what they leave open."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.job.parallel_config import DEGREES
from tuner.search.choices import AbstractChoices
from tuner.search.observations import Observations
from tuner.search.population import Population


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """Prospect of a candidate.

    Attributes:
        is_repeat: Whether it was measured before, and the fastest are too close to tell apart.
        best_probability: Share of the draws that name it the best.
        run_probability: Share of the draws in which it can run.
        expected_s: Median of its step times in the draws in which it runs [s]; None where draws are of other values.
        first_with: Degrees of it whose values no earlier trial had.
        num_open: Number of candidates without a trial that some draw names the best, it included.
    """

    is_repeat: bool
    best_probability: float
    run_probability: float
    expected_s: float | None
    first_with: tuple[str, ...]
    num_open: int


def prospect_of(
    position: int, choices: AbstractChoices, observations: Observations, population: Population, *, is_timed: bool
) -> Prospect:
    """Return the prospect of a candidate.

    Args:
        position: Position of the candidate.
        choices: Candidates of the search.
        observations: Observations that the draws know.
        population: Draws after these.
        is_timed: Whether the draws are of step times.
    """
    drawn = population.log_step_s[:, position]
    runs = np.isfinite(drawn)
    tried = observations.explored | observations.impossible
    named = {int(each) for each in np.unique(population.fastest)}
    return Prospect(
        is_repeat=position in observations.explored,
        best_probability=float(np.mean(population.fastest == position)) if len(population.fastest) else 0.0,
        run_probability=float(runs.mean()),
        expected_s=float(np.exp(np.median(drawn[runs]))) if is_timed and runs.any() else None,
        first_with=_first_with(position, choices, observations),
        num_open=len(named - tried),
    )


def _first_with(position: int, choices: AbstractChoices, observations: Observations) -> tuple[str, ...]:
    """Return the degrees in which a candidate differs from all that was tried or is pending; none before any trial."""
    others = np.array([choices.layout_of(at) for at in observations.num_trials if at != position], dtype=np.int64)
    if not len(others):
        return ()
    own = choices.layout_of(position)
    columns = {name: getattr(choices.layouts, name) for name in DEGREES}
    return tuple(name for name, column in columns.items() if not (column[others] == column[own]).any())
