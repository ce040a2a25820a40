"""What crashes tell of the others: joint draws of which kinds of configuration this runtime cannot run.

A kind is one value of one dimension ("vpp=2"), or any use of a degree ("cp above 1"). A kind may be broken, and what
ran shows that its kinds are not. A trial that crashed has a broken kind, or its memory ran out without saying so, or it
had bad luck of its own: a noisy-or (Pearl 1988). At most two kinds are taken to be broken at once, so that all
hypotheses are counted and nothing is left to sampling.

Letters: n candidates, k kinds, h hypotheses, c crashes, M draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import DEGREES, DIMENSIONS, ConfigGrid
from costmodels.surrogates.mixture import allotted, probabilities_of
from hardware.arrays import FloatArray, IntArray

BROKEN = 0.02
"""Probability of a kind to be broken before any trial; assumed, as are the next two."""

OWN_CRASH = 0.08
"""Probability that a configuration crashes with no kind of it broken."""

RUNS_THOUGH_BROKEN = 0.02
"""Probability that a configuration of a broken kind runs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kinds:
    """The kinds among some candidates.

    Attributes:
        names: What each is [k].
        holds: Whether a candidate is of a kind [n, k].
    """

    names: tuple[str, ...]
    holds: NDArray[np.bool_]


def kinds_of(grid: ConfigGrid) -> Kinds:
    """Every kind that sets some candidates apart from others."""
    columns: dict[str, NDArray[np.bool_]] = {}
    for name in grid.dimensions:
        values = np.asarray(getattr(grid, name))
        for value in np.unique(values):
            shown = DIMENSIONS[name].value_of(value) if name in DIMENSIONS else value
            columns[f"{name}={shown}"] = values == value
        if name in DEGREES:
            columns[f"{name} above 1"] = values > 1
    distinct: dict[bytes, str] = {}
    for name, column in columns.items():
        if column.any() and not column.all():
            distinct.setdefault(column.tobytes(), name)
    names = tuple(distinct.values())
    holds = np.stack([columns[name] for name in names], axis=1) if names else np.zeros((len(grid), 0), dtype=np.bool_)
    return Kinds(names=names, holds=holds)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CrashSurrogate:
    """Which kinds may be broken.

    Attributes:
        kinds: All kinds.
        broken: The kinds of each hypothesis; -1 for none [h, 2].
        probabilities: Theirs [h].
    """

    kinds: Kinds
    broken: IntArray
    probabilities: FloatArray

    def draw(self, num_draws: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Whether each candidate crashes, in joint draws [M, n]."""
        counts = allotted(self.probabilities, num_draws, rng)
        drawn = self.broken[np.repeat(np.arange(len(counts)), counts)][rng.permutation(num_draws)]
        # a column of no kind at the end, where -1 points
        holds = np.concatenate([self.kinds.holds, np.zeros((len(self.kinds.holds), 1), dtype=np.bool_)], axis=1)
        return np.asarray((holds[:, drawn[:, 0]] | holds[:, drawn[:, 1]]).T)

    def broken_probability(self) -> Mapping[str, float]:
        """Probability of each kind to be broken, the largest first."""
        total = np.zeros(len(self.kinds.names))
        for column in self.broken.T:
            np.add.at(total, column[column >= 0], self.probabilities[column >= 0])
        return {self.kinds.names[at]: float(total[at]) for at in np.argsort(-total, kind="stable")}


def crash_surrogate(kinds: Kinds, ran: IntArray, crashed: IntArray, misfit_probability: FloatArray) -> CrashSurrogate:
    """What is believed after the trials.

    Args:
        kinds: The kinds of the candidates.
        ran: Candidates that ran.
        crashed: Candidates that crashed [c].
        misfit_probability: Probability that each of these ran out of memory instead [c].
    """
    suspects = np.flatnonzero(kinds.holds[crashed].any(axis=0))
    first, second = np.triu_indices(len(suspects), k=1)
    none = np.full((1, 2), -1, dtype=np.int64)
    single = np.stack([suspects, np.full(len(suspects), -1)], axis=1)
    broken = np.concatenate([none, single, np.stack([suspects[first], suspects[second]], axis=1)])
    log_prior = np.log(BROKEN / (1 - BROKEN)) * (broken >= 0).sum(axis=1)
    of_ran = _is_of(kinds.holds[ran], broken)
    of_crashed = _is_of(kinds.holds[crashed], broken)
    otherwise = 1 - (1 - OWN_CRASH) * (1 - misfit_probability)
    log_likelihood = of_ran.sum(axis=1) * np.log(RUNS_THOUGH_BROKEN) + np.where(
        of_crashed, np.log1p(-RUNS_THOUGH_BROKEN), np.log(otherwise)
    ).sum(axis=1)
    return CrashSurrogate(kinds=kinds, broken=broken, probabilities=probabilities_of(log_prior + log_likelihood))


def _is_of(holds: NDArray[np.bool_], broken: IntArray) -> NDArray[np.bool_]:
    """Whether each of some candidates [m, k] is of a broken kind, by hypothesis [h, m]."""
    padded = np.concatenate([holds, np.zeros((len(holds), 1), dtype=np.bool_)], axis=1)
    return np.asarray((padded[:, broken[:, 0]] | padded[:, broken[:, 1]]).T)
