"""Bayesian model of crashes: joint draws of the kinds of configuration that this runtime cannot run.

A kind is one value of one dimension ("vpp=2"), or any use of a degree ("cp above 1"). A kind may be broken; a trial
that ran is evidence that its kinds are not. A crash has one of three causes: a broken kind, lack of memory that was not
reported, or a fault of its own. The causes form a noisy-or (Pearl 1988). At most two kinds are assumed to be broken at
once, so all hypotheses are enumerated and none needs to be sampled.

Letters: n candidates, k kinds, h hypotheses, c crashes, M draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import DEGREES, DIMENSIONS, ConfigGrid
from costmodels.surrogates.mixture import allot_draws, probabilities_of
from hardware.arrays import FloatArray, IntArray

BROKEN = 0.02
"""Prior probability that a kind is broken (assumed)."""

OWN_CRASH = 0.08
"""Probability that a configuration crashes although none of its kinds is broken (assumed)."""

RUNS_THOUGH_BROKEN = 0.02
"""Probability that a configuration of a broken kind runs (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kinds:
    """Kinds that occur among candidates.

    Attributes:
        names: Name of each kind, such as "vpp=2" [k].
        holds: Whether a candidate is of a kind [n, k].
    """

    names: tuple[str, ...]
    holds: NDArray[np.bool_]


def kinds_of(grid: ConfigGrid) -> Kinds:
    """Return every kind that some candidates are of and others are not."""
    columns: dict[str, NDArray[np.bool_]] = {}
    for name in grid.dimensions:
        values = np.asarray(getattr(grid, name))
        for value in np.unique(values):
            shown = DIMENSIONS[name].value_of(value) if name in DIMENSIONS else value
            columns[f"{name}={shown}"] = values == value
        if name in DEGREES:
            columns[f"{name} above 1"] = values > 1
    # kinds with the same candidates cannot be told apart by any trial, so the first name stands for all
    distinct: dict[bytes, str] = {}
    for name, column in columns.items():
        if column.any() and not column.all():
            distinct.setdefault(column.tobytes(), name)
    names = tuple(distinct.values())
    holds = np.stack([columns[name] for name in names], axis=1) if names else np.zeros((len(grid), 0), dtype=np.bool_)
    return Kinds(names=names, holds=holds)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CrashSurrogate:
    """Posterior over the kinds that may be broken.

    Attributes:
        kinds: Kinds of the candidates.
        broken: Positions of the kinds that each hypothesis holds to be broken; -1 for none [h, 2].
        probabilities: Posterior probability of each hypothesis [h].
    """

    kinds: Kinds
    broken: IntArray
    probabilities: FloatArray

    def draw(self, num_draws: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Draw jointly whether each candidate crashes because of a broken kind [M, n]."""
        return _find_broken(self.kinds.holds, self.draw_broken(num_draws, rng))

    def draw_broken(self, num_draws: int, rng: np.random.Generator) -> IntArray:
        """Draw the kinds that are broken, as their positions; -1 for none [M, 2]."""
        counts = allot_draws(self.probabilities, num_draws, rng)
        return np.asarray(self.broken[np.repeat(np.arange(len(counts)), counts)][rng.permutation(num_draws)])

    def broken_probability(self) -> Mapping[str, float]:
        """Return the probability of each kind to be broken, the largest first."""
        # marginal over hypotheses; a kind occurs at most once in each
        total = np.zeros(len(self.kinds.names))
        for column in self.broken.T:
            np.add.at(total, column[column >= 0], self.probabilities[column >= 0])
        return {self.kinds.names[at]: float(total[at]) for at in np.argsort(-total, kind="stable")}


def crash_surrogate(kinds: Kinds, ran: IntArray, crashed: IntArray, misfit_probability: FloatArray) -> CrashSurrogate:
    """Compute the posterior over broken kinds after the trials.

    Args:
        kinds: Kinds of the candidates.
        ran: Positions of candidates that ran.
        crashed: Positions of candidates that crashed [c].
        misfit_probability: Probability that each crash was lack of memory instead [c].
    """
    # hypotheses: no kind, one kind, or two kinds of those that crashed; other kinds keep their prior
    suspects = np.flatnonzero(kinds.holds[crashed].any(axis=0))
    first, second = np.triu_indices(len(suspects), k=1)
    none = np.full((1, 2), -1, dtype=np.int64)
    single = np.stack([suspects, np.full(len(suspects), -1)], axis=1)
    broken = np.concatenate([none, single, np.stack([suspects[first], suspects[second]], axis=1)])
    log_prior = np.log(BROKEN / (1 - BROKEN)) * (broken >= 0).sum(axis=1)
    # noisy-or: a configuration without a broken kind crashes only for lack of memory or by a fault of its own
    of_ran = _find_broken(kinds.holds[ran], broken)
    of_crashed = _find_broken(kinds.holds[crashed], broken)
    otherwise = 1 - (1 - OWN_CRASH) * (1 - misfit_probability)
    log_likelihood = of_ran.sum(axis=1) * np.log(RUNS_THOUGH_BROKEN) + np.where(
        of_crashed, np.log1p(-RUNS_THOUGH_BROKEN), np.log(otherwise)
    ).sum(axis=1)
    return CrashSurrogate(kinds=kinds, broken=broken, probabilities=probabilities_of(log_prior + log_likelihood))


def _find_broken(holds: NDArray[np.bool_], broken: IntArray) -> NDArray[np.bool_]:
    """Return whether each of m candidates, with kinds [m, k], is of a broken kind under each hypothesis [h, m]."""
    # the position -1 means no kind: it selects the extra last column, which no candidate has
    padded = np.concatenate([holds, np.zeros((len(holds), 1), dtype=np.bool_)], axis=1)
    return np.asarray((padded[:, broken[:, 0]] | padded[:, broken[:, 1]]).T)
