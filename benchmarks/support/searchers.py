"""Contract of the samplers under test, and the samplers without further dependencies: Thompson sampling, prior, random.

A searcher is made for one problem and one seed. Then `ask` and `tell` are called in turns.
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
from tuner.search.acquisition import ACQUISITION_FUNCTIONS, DEFAULT
from tuner.search.observations import OBSERVATION, STATUS, Observations
from tuner.search.parameters import params_of
from tuner.search.sampler import ThompsonSampler


class AbstractSearcher(ABC):
    """Sampler that chooses candidates one by one; each `ask` is followed by one `tell` of the same candidate."""

    @abstractmethod
    def ask(self) -> int:
        """Return the position of an untried candidate; it is not called when all have been tried."""

    @abstractmethod
    def tell(self, position: int, outcome: Observation) -> None:
        """Learn the outcome of a candidate's trial."""

    @property
    def is_confident(self) -> bool | None:
        """Whether it would end the search now; None for searchers that never would."""
        return None


class Thompson(AbstractSearcher):
    """Meshtune's sampler in Optuna's ask-and-tell loop."""

    def __init__(self, sampler: ThompsonSampler) -> None:
        self._sampler = sampler
        self._study = optuna.create_study(sampler=self._sampler)
        self._left = dict.fromkeys(range(sampler.choices.num_candidates))

    def ask(self) -> int:
        """Return the candidate that the sampler proposes, or one that failures rule out when no other is left."""
        if self._left and self._left.keys() <= self.observations.closed:
            self._study.enqueue_trial(params_of(self._sampler.choices.values(next(iter(self._left)))))
        self._trial = self._study.ask(fixed_distributions=self._sampler.search_space)
        position = self._sampler.position_of(self._trial.params)
        assert position is not None, "the sampler names candidates only"
        self._left.pop(position, None)
        return position

    def tell(self, position: int, outcome: Observation) -> None:  # noqa: ARG002 # the study knows which was asked
        """Store the outcome in the study."""
        self._trial.set_user_attr(OBSERVATION, outcome.as_json())
        if outcome.step_time_s is not None:
            self._study.tell(self._trial, outcome.step_time_s)
            return
        self._trial.set_user_attr(STATUS, outcome.status)
        self._study.tell(self._trial, state=TrialState.FAIL)

    @property
    def is_confident(self) -> bool:
        """Whether the confidence reaches the default threshold, or all candidates have been tried."""
        return self._sampler.decide(self.observations).settled is not None

    @property
    def observations(self) -> Observations:
        """Observations of all trials so far."""
        return self._sampler.observations(self._study.get_trials(deepcopy=False))


def thompson(problem: Problem, seed: int, acquisition: str = DEFAULT) -> Thompson:
    """Make the sampler that a study of this problem would use with this acquisition function and defaults otherwise."""
    return Thompson(
        ThompsonSampler(problem.grid, problem.posterior, seed=seed, acquisition=ACQUISITION_FUNCTIONS[acquisition])
    )


class InOrder(AbstractSearcher):
    """Searcher that tries the candidates in a fixed order."""

    def __init__(self, order: Sequence[int]) -> None:
        self._left = iter(order)

    def ask(self) -> int:
        """Return the next candidate of the order."""
        return int(next(self._left))

    def tell(self, position: int, outcome: Observation) -> None:
        """Ignore the outcome."""


def prior(problem: Problem, seed: int) -> InOrder:  # noqa: ARG001 # a searcher's signature
    """Order the candidates by predicted step time; those that are predicted not to fit come last."""
    return InOrder(np.lexsort((problem.predicted_s, problem.memory_share > 1)).tolist())


def uniform(problem: Problem, seed: int) -> InOrder:
    """Order the candidates at random."""
    return InOrder(np.random.default_rng(seed).permutation(len(problem.grid)).tolist())


def run_trials(
    searcher: AbstractSearcher,
    outcomes: Sequence[Observation],
    step_time_s: FloatArray,
    max_trials: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Trials:
    """Run trials until the searcher has found the fastest candidate and would stop, or until `max_trials` are spent.

    Args:
        searcher: A fresh searcher for the problem of `outcomes`.
        outcomes: Observation of a trial of each candidate [n].
        step_time_s: Step times of the candidates [n], infinite for those that fail [s].
        max_trials: Maximum number of trials.
        clock: Clock that returns seconds.
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
        # A space smaller than the budget ends the run when all candidates are tried.
        is_last = number >= min(max_trials, len(outcomes))
        # Record the first stop; a searcher that can stop but never did counts as stopped by its last trial.
        if num_at_stop is None and (is_confident or (is_last and is_confident is not None)):
            num_at_stop = number
        is_found = step_time_s[order].min() <= step_time_s.min()
        if is_last or (is_found and (is_confident is None or num_at_stop is not None)):
            break
    return Trials(order=tuple(order), num_at_stop=num_at_stop, sampler_s=sampler_s)
