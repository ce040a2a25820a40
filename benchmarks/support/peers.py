"""General-purpose optimizers on the candidates of a measured group, each with the settings that suit it best.

A peer proposes points of the whole box of `points.py`. A point that is no candidate, or was tried before, is mapped
without cost to the nearest candidate not yet tried, and the peer is told that candidate's result as if it had proposed
it.

Peers receive the logarithm of the step time, which suits a Gaussian process and preserves the order. They have no
notion of a failing trial: a failure is reported as twice as slow as the slowest trial timed so far, and only after one
has been timed.

Each peer has the settings that its documentation recommends. Where that leaves a choice, it was made on 13 groups of
the Ultra-Scale Playbook's sweep, by the trials to within 5% of the best in the median group. Whole numbers serve better
than categories (TPE 22.5 and 32.5, Optuna's GP 18 and 27). Reported failures serve better than ignored failures (TPE
22.5 and 39). CMA-ES does best with margin, and when its stored point is moved to the candidate (44.5; with margin alone
65, without margin 48). In five of the groups BoTorch's own kernel does better than its mixed kernel for categories (10
and 14).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, TPESampler
from optuna.trial import TrialState, create_trial

from benchmarks.support.points import FAILURE_SLOWDOWN, points_of
from benchmarks.support.problems import Problem
from benchmarks.support.searchers import AbstractSearcher
from trials.backend import Observation

CMA_POINT = "x_for_tell"
"""Key under which Optuna's CMA-ES with margin keeps the point of a trial, each dimension between 0 and 1."""

NEEDS: dict[str, tuple[str, ...]] = {"gp": ("torch",), "cmaes": ("cmaes",), "botorch": ("torch", "botorch")}
"""Modules that a peer needs beyond Meshtune's own; the extra `bench` installs them."""


class OptunaPeer(AbstractSearcher):
    """Optuna sampler with one integer parameter for each dimension, the level.

    Attributes:
        study: Study that holds each trial twice: failed at the proposed point, complete at the candidate that was
            tried.
    """

    def __init__(self, problem: Problem, seed: int, sampler: BaseSampler) -> None:
        self._points = points_of(problem.grid)
        self.study = optuna.create_study(sampler=sampler)
        self._rng = np.random.default_rng(seed)
        self._distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(values) - 1)
            for name, values in zip(self._points.names, self._points.values, strict=True)
        }
        self._tried: set[int] = set()
        self._slowest_s = 0.0
        self._untold: list[tuple[int, int, float | None]] = []

    def ask(self) -> int:
        """Return the untried candidate nearest to the point that the sampler proposes."""
        trial = self.study.ask(fixed_distributions=self._distributions)
        self._asked = trial.number
        return self._points.nearest(self._points.at(trial.params), self._tried, self._rng)

    def tell(self, position: int, outcome: Observation) -> None:
        """Report a result at the tried candidate; failures wait until a trial has been timed."""
        self._tried.add(position)
        self.study.tell(self._asked, state=TrialState.FAIL)
        self._untold.append((self._asked, position, outcome.step_time_s))
        self._slowest_s = max(self._slowest_s, outcome.step_time_s or 0.0)
        if not self._slowest_s:
            return
        # The proposal was told as failed; its result is added as a trial at the point that was really tried.
        for number, at, seconds in self._untold:
            self.study.add_trial(
                create_trial(
                    params=self._points.levels_of(at),
                    distributions=self._distributions,
                    value=math.log(seconds or FAILURE_SLOWDOWN * self._slowest_s),
                    system_attrs=self._attributes(number, at),
                )
            )
        self._untold.clear()

    def _attributes(self, number: int, position: int) -> dict[str, Any]:
        """Return the attributes that CMA-ES keeps with a trial, with its point moved to the candidate."""
        noted = self.study.trials[number].system_attrs
        if CMA_POINT not in noted:
            return noted
        highest = dict(zip(self._points.names, (len(values) - 1 for values in self._points.values), strict=True))
        levels = sorted(self._points.levels_of(position).items())  # Optuna's order
        return {**noted, CMA_POINT: [level / highest[name] for name, level in levels]}


def tpe(problem: Problem, seed: int) -> OptunaPeer:
    """Make Optuna's TPE, which models the dimensions together and starts with ten random points."""
    return OptunaPeer(problem, seed, TPESampler(seed=seed, multivariate=True))


def gp(problem: Problem, seed: int) -> OptunaPeer:
    """Make Optuna's Gaussian process with log expected improvement; it starts with ten random points."""
    _use_one_thread()
    return OptunaPeer(problem, seed, GPSampler(seed=seed))


def cmaes(problem: Problem, seed: int) -> OptunaPeer:
    """Make Optuna's CMA-ES with margin, which keeps it from settling on one level of a discrete dimension."""
    return OptunaPeer(problem, seed, CmaEsSampler(seed=seed, with_margin=True, warn_independent_sampling=False))


def botorch(problem: Problem, seed: int) -> AbstractSearcher:
    """Make BoTorch's Gaussian process with log expected improvement over the candidates themselves."""
    from benchmarks.support.botorch_peer import BoTorchPeer  # noqa: PLC0415 # torch and botorch are optional, and slow to load

    _use_one_thread()
    return BoTorchPeer(problem, seed)


def _use_one_thread() -> None:
    """Limit torch to one thread in this process, since there already is a process for each core."""
    import torch  # noqa: PLC0415 # optional, and slow to load

    torch.set_num_threads(1)


PEERS: dict[str, Callable[[Problem, int], AbstractSearcher]] = {
    "tpe": tpe,
    "gp": gp,
    "cmaes": cmaes,
    "botorch": botorch,
}


def missing(name: str) -> str | None:
    """Return why a peer cannot run here, or None if it can."""
    absent = [module for module in NEEDS.get(name, ()) if importlib.util.find_spec(module) is None]
    return f"needs {' and '.join(absent)}: pip install 'meshtune[bench]'" if absent else None
