"""The contract of a sampler under test, and those that need no further library: Thompson sampling, prior, random.

A searcher is made for one problem and one seed, and is then asked and told in turns.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import optuna
from optuna.trial import TrialState

from benchmarks.support.problems import Problem
from benchmarks.support.trial_metrics import Trials
from hardware.arrays import FloatArray
from trials.backend import Observation
from tuner.search.acquisition import ACQUISITION_FUNCTIONS
from tuner.search.observations import OBSERVATION, STATUS, Observations
from tuner.search.sampler import ThompsonSampler


class AbstractSearcher(ABC):
    """Chooses candidates one by one. Each `ask` is followed by one `tell` of the candidate that it named."""

    @abstractmethod
    def ask(self) -> int:
        """The position of a candidate that has not been tried. There is one: nobody asks when all are tried."""

    @abstractmethod
    def tell(self, position: int, outcome: Observation) -> None:
        """Takes in what the trial of a candidate found."""

    @property
    def is_confident(self) -> bool | None:
        """Whether it would end the search now; None for those that never would."""
        return None


class Thompson(AbstractSearcher):
    """Meshtune's sampler in Optuna's loop of ask and tell."""

    def __init__(self, sampler: ThompsonSampler) -> None:
        self._sampler = sampler
        self._study = optuna.create_study(sampler=self._sampler)

    def ask(self) -> int:
        """As the contract says."""
        self._trial = self._study.ask(fixed_distributions=self._sampler.search_space)
        position = self._sampler.position_of(self._trial.params)
        assert position is not None, "the sampler names candidates only"
        return position

    def tell(self, position: int, outcome: Observation) -> None:  # noqa: ARG002 # the study knows which was asked
        """As the contract says."""
        self._trial.set_user_attr(OBSERVATION, outcome.as_json())
        if outcome.step_time_s is not None:
            self._study.tell(self._trial, outcome.step_time_s)
            return
        self._trial.set_user_attr(STATUS, outcome.status)
        self._study.tell(self._trial, state=TrialState.FAIL)

    @property
    def is_confident(self) -> bool:
        """Whether p_star exceeds the confidence that is asked for by default."""
        return self._sampler.decide(self.observations).settled is not None

    @property
    def observations(self) -> Observations:
        """What the trials so far told."""
        return self._sampler.observations(self._study.get_trials(deepcopy=False))


def thompson(problem: Problem, seed: int, acquisition: str = "draws") -> Thompson:
    """Return the sampler of a study of this problem with one acquisition function, else with its defaults."""
    return Thompson(
        ThompsonSampler(problem.grid, problem.posterior, seed=seed, acquisition=ACQUISITION_FUNCTIONS[acquisition])
    )


class InOrder(AbstractSearcher):
    """Tries the candidates in an order that is fixed beforehand."""

    def __init__(self, order: Sequence[int]) -> None:
        self._left = iter(order)

    def ask(self) -> int:
        """As the contract says."""
        return int(next(self._left))

    def tell(self, position: int, outcome: Observation) -> None:
        """Learns nothing."""


def prior(problem: Problem, seed: int) -> InOrder:  # noqa: ARG001 # a searcher's signature
    """The candidates by predicted step time; those that are predicted not to fit come last."""
    return InOrder(np.lexsort((problem.predicted_s, problem.memory_share > 1)).tolist())


def uniform(problem: Problem, seed: int) -> InOrder:
    """The candidates in random order."""
    return InOrder(np.random.default_rng(seed).permutation(len(problem.grid)).tolist())


def run_trials(
    searcher: AbstractSearcher,
    outcomes: Sequence[Observation],
    step_time_s: FloatArray,
    max_trials: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Trials:
    """Lets a searcher try candidates until it has found the fastest and would stop, or until `max_trials` are spent.

    Args:
        searcher: Fresh, for the problem that `outcomes` belongs to.
        outcomes: What a trial of each candidate finds [n].
        step_time_s: Their step times [n], infinite where they fail.
        max_trials: At most as many trials.
        clock: Seconds.
    """
    order: list[int] = []
    num_at_stop = None
    sampler_s = 0.0
    for number in count(1):
        start = clock()
        position = searcher.ask()
        sampler_s += clock() - start
        assert position not in order, "a searcher names no candidate twice"
        order.append(position)
        start = clock()
        searcher.tell(position, outcomes[position])
        sampler_s += clock() - start
        is_confident = searcher.is_confident
        is_last = number >= min(max_trials, len(outcomes))
        if num_at_stop is None and (is_confident or (is_last and is_confident is not None)):
            num_at_stop = number
        is_found = step_time_s[order].min() <= step_time_s.min()
        if is_last or (is_found and (is_confident is None or num_at_stop is not None)):
            break
    return Trials(order=tuple(order), num_at_stop=num_at_stop, sampler_s=sampler_s)
