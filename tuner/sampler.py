"""ThompsonSampler: chooses the next candidate of an Optuna study (FlexParallel 3.2 and 3.3).

The sampler holds the candidates and their predicted step times. Whatever the study has measured corrects them through
the step-level surrogate; M joint draws of all step times each name their fastest candidate, and the next trial is
chosen uniformly over the draws whose candidate is unexplored. p_star, the share of draws whose candidate has been tried
(equation 6), says when to stop.

It works in the ask/tell loop of tuner/study.py and in anybody's own loop:

    candidates = ConfigGrid.from_configs([ParallelConfig(pp=1, tp=8, dp=4), ParallelConfig(pp=4, tp=2, dp=4), ...])
    sampler = ThompsonSampler(candidates, predicted_s, features, stop_when_confident=True)
    study = optuna.create_study(sampler=sampler)
    study.optimize(lambda trial: measure(sampler.suggest(trial)), n_trials=40)

Ask from one thread: a trial is known to others only once its parameters are stored. A trial that fails removes its
candidate, unless its attribute `status` says "incident" (nothing is held against the candidate) or "timeout".

The state is the study alone: nothing is remembered between calls but what can be computed again, and the random stream
of a decision depends on the seed and the number of the decision, so that a resumed study goes on as an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState
from scipy.special import log_ndtr

from costmodels.operators import FloatArray
from costmodels.parallel import DEGREES, RECOMPUTE_MODES, ConfigGrid, IntArray, ParallelConfig, Value
from costmodels.surrogate import SurrogatePrior, fit_step_surrogate
from trials.backend import Status

STATUS = "status"
"""Trial attribute: the Status of the observation, where a trial did not simply complete."""

P_STAR = "p_star"
"""Study attribute: p_star after the last finished trial; `p_star:N` holds it after trial N."""


MEMORY_ERROR_SHARED = 0.3
"""Share of the variance of log(needed / predicted memory) that all candidates of a study have in common: seen on the
Ultra-Scale Playbook's llama-1B and llama-3B rows."""


WORLDS_OF_MEMORY = 1000
"""Shared errors among which those that explain the trials are drawn."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class History:
    """What a study knows of the candidates.

    Attributes:
        measured: Positions of the candidates that ran, in the order of their trials [t]; repeats allowed.
        step_time_s: Their step times [t].
        explored: Candidates that need no further trial: measured or timed out.
        impossible: Candidates that cannot run: out of memory, or crashed.
        misfits: Those of them that ran out of memory.
        pending: Candidates of trials that have not finished.
        num_decisions: Candidates chosen so far, finished or not.
    """

    measured: IntArray
    step_time_s: FloatArray
    explored: frozenset[int]
    impossible: frozenset[int]
    misfits: frozenset[int]
    pending: frozenset[int]
    num_decisions: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Population:
    """The empirical population S of one moment.

    Attributes:
        fastest: The fastest candidate of each draw [M].
        p_star: Share of draws whose fastest candidate is explored (FlexParallel equation 6).
        drawn_s: The drawn step times [M, n]; impossible candidates are infinite.
    """

    fastest: IntArray
    p_star: float
    drawn_s: NDArray[np.float32]


class ThompsonSampler(BaseSampler):
    """Grey-box Thompson sampling over a finite set of parallelism configurations.

    Args:
        candidates: The configurations [n].
        predicted_s: Their predicted step times [n], in seconds.
        features: What the surrogate sees of them [n, d]; see costmodels/features.py.
        memory_share: Memory that is predicted to be needed over the devices' capacity [n]; draws leave out candidates
            that may not fit.
        memory_error: Standard deviation of log(needed / predicted memory).
        draws: M, joint draws per decision.
        confidence: eta; `is_confident` holds once p_star exceeds it.
        seed: Fixes every decision.
        first: The configuration that the first trial runs, usually the one in use today.
        stop_when_confident: End `study.optimize` at confidence or when every candidate has been tried.
        prior: What the surrogate believes before any trial.
    """

    def __init__(
        self,
        candidates: ConfigGrid,
        predicted_s: FloatArray,
        features: FloatArray,
        *,
        memory_share: FloatArray | None = None,
        memory_error: float = 0.15,
        draws: int = 100,
        confidence: float = 0.95,
        seed: int = 0,
        first: ParallelConfig | None = None,
        stop_when_confident: bool = False,
        prior: SurrogatePrior | None = None,
    ) -> None:
        if not len(candidates):
            raise ValueError("`candidates` must hold at least one configuration, but got none.")
        if len(predicted_s) != len(candidates) or len(features) != len(candidates):
            raise ValueError(
                f"`predicted_s` and `features` must have one row per candidate, but got {len(predicted_s)} and "
                f"{len(features)} for {len(candidates)}."
            )
        self._candidates = candidates
        self._log_predicted = np.log(predicted_s)
        self._features = np.asarray(features, dtype=np.float64)
        self._memory_share = memory_share
        self._memory_error = memory_error
        self._draws = draws
        self._confidence = confidence
        self._seed = seed
        self._stop_when_confident = stop_when_confident
        self._prior = prior
        self._positions = candidates.positions()
        self._first = None
        if first is not None:
            self._first = self._positions[tuple(first.values(candidates.dimensions).values())]
        self._independent = RandomSampler(seed=seed)
        self._cached: tuple[tuple[bytes, ...], Population] | None = None

    @property
    def candidates(self) -> ConfigGrid:
        """The configurations that the sampler chooses from."""
        return self._candidates

    @property
    def search_space(self) -> dict[str, BaseDistribution]:
        """The Optuna distributions of a trial's parameters: one per dimension that identifies a candidate."""
        return {name: self._distribution(name) for name in self._candidates.dimensions}

    def _distribution(self, name: str) -> BaseDistribution:
        if name == "recompute":
            return CategoricalDistribution(RECOMPUTE_MODES)
        if name == "sequence_parallel":
            return CategoricalDistribution((False, True))
        values = getattr(self._candidates, name)
        low, high = int(values.min()), int(values.max())
        # the same form whatever the range, or a study whose space was narrowed could not be resumed
        return IntDistribution(low, high, log=name in DEGREES)

    def suggest(self, trial: Trial) -> ParallelConfig:
        """The configuration of `trial`; its parameters are the candidate's dimensions under their own names."""
        suggested: dict[str, Value] = {}
        for name, distribution in self.search_space.items():
            if isinstance(distribution, IntDistribution):
                suggested[name] = trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)
            elif isinstance(distribution, CategoricalDistribution):
                suggested[name] = trial.suggest_categorical(name, distribution.choices)  # type: ignore[assignment] # the choices are text or bool
        return self.config_of(suggested)

    def config_of(self, params: dict[str, Any]) -> ParallelConfig:
        """The candidate that a trial's parameters name.

        Raises:
            ValueError: they name no candidate.
        """
        position = self.position_of(params)
        if position is None:
            raise ValueError(f"`params` must name a candidate, but got {params}.")
        return self._candidates.config(position)

    def position_of(self, params: dict[str, Any]) -> int | None:
        """Where the candidate that a trial's parameters name stands, or None."""
        try:
            return self._positions.get(tuple(params[name] for name in self._candidates.dimensions))
        except KeyError:
            return None

    # What Optuna calls

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002 # Optuna's signature
        """All dimensions are chosen together."""
        return self.search_space

    def sample_relative(
        self,
        study: Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],  # noqa: ARG002 # Optuna's signature
    ) -> dict[str, Any]:
        """The next candidate's dimensions."""
        if study.directions != [StudyDirection.MINIMIZE]:
            raise ValueError(f"`study` must minimize one value, the step time, but got {study.directions}.")
        others = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        return dict(self._candidates.values(self.choose(self.history(others))))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Parameters that are no dimension of a configuration are drawn at random."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """Decisions depend on the seed and their number alone; only foreign parameters are reseeded."""
        self._independent.reseed_rng()

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Stores p_star on the study, and ends `study.optimize` if asked to."""
        others = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        history = self.history(others, finishing=(trial, state, values))
        p_star = self.population(history).p_star
        study.set_user_attr(P_STAR, p_star)
        study.set_user_attr(f"{P_STAR}:{trial.number}", p_star)
        if self._stop_when_confident and (self.is_confident(history) or self.is_exhausted(history)):
            study.stop()

    # What it decides

    def history(
        self,
        trials: Sequence[FrozenTrial],
        *,
        finishing: tuple[FrozenTrial, TrialState, Sequence[float] | None] | None = None,
    ) -> History:
        """What `trials` tell of the candidates; `finishing` is one whose end the storage does not hold yet."""
        measured: list[int] = []
        step_time_s: list[float] = []
        explored: set[int] = set()
        impossible: set[int] = set()
        misfits: set[int] = set()
        pending: set[int] = set()
        num_decisions = 0
        entries = [(t, t.state, t.values) for t in trials] + ([finishing] if finishing else [])
        for trial, state, values in sorted(entries, key=lambda entry: entry[0].number):
            position = self.position_of(trial.params)
            if position is None:
                continue
            num_decisions += 1
            if state == TrialState.COMPLETE and values:
                measured.append(position)
                step_time_s.append(values[0])
                explored.add(position)
            elif not state.is_finished():
                pending.add(position)
            else:
                status = trial.user_attrs.get(STATUS, Status.CRASHED)
                if status in (Status.CRASHED, Status.OUT_OF_MEMORY):
                    impossible.add(position)
                    if status == Status.OUT_OF_MEMORY:
                        misfits.add(position)
                elif status in (Status.TIMEOUT, Status.PRUNED):
                    explored.add(position)
        return History(
            measured=np.array(measured, dtype=np.int64),
            step_time_s=np.array(step_time_s),
            explored=frozenset(explored),
            impossible=frozenset(impossible - explored),
            misfits=frozenset(misfits - explored),
            pending=frozenset(pending),
            num_decisions=num_decisions,
        )

    def population(self, history: History) -> Population:
        """M joint draws of all step times and the fastest candidate of each; computed once per state of the study."""
        impossible = np.array(sorted(history.impossible), dtype=np.int64)
        unmeasured = np.array(sorted(history.explored - set(history.measured.tolist())), dtype=np.int64)
        misfits = np.array(sorted(history.misfits), dtype=np.int64)
        arrays = (history.measured, history.step_time_s, impossible, unmeasured, misfits)
        key = tuple(array.tobytes() for array in arrays)
        if self._cached is None or self._cached[0] != key:
            rng = np.random.default_rng([self._seed, 0, len(history.measured), len(impossible), len(unmeasured)])
            log_ratio = np.log(history.step_time_s) - self._log_predicted[history.measured]
            surrogate = fit_step_surrogate(self._features[history.measured], log_ratio, self._prior)
            drawn = surrogate.draw(self._features, self._draws, rng)
            drawn += self._log_predicted.astype(np.float32)
            np.exp(drawn, out=drawn)
            self._leave_out_misfits(drawn, history, rng)
            drawn[:, impossible] = np.inf
            fastest = np.argmin(drawn, axis=1).astype(np.int64)
            tried = np.isin(fastest, np.array(sorted(history.explored), dtype=np.int64))
            population = Population(fastest=fastest, p_star=float(tried.mean()), drawn_s=drawn)
            self._cached = (key, population)
        return self._cached[1]

    def _leave_out_misfits(self, drawn: NDArray[np.float32], history: History, rng: np.random.Generator) -> None:
        """Makes candidates infinitely slow in the draws in which their memory does not fit.

        A draw of the memory is the prediction times one error that all candidates share and one of their own. What ran
        fits, and it tells of the shared error, as does what ran out of memory.
        """
        if self._memory_share is None:
            return
        log_share = np.log(self._memory_share)
        own_error = self._memory_error * np.sqrt(1 - MEMORY_ERROR_SHARED)
        shared = self._memory_error * np.sqrt(MEMORY_ERROR_SHARED) * rng.standard_normal(WORLDS_OF_MEMORY)
        # importance resampling: a shared error is as likely as it explains what ran, and what ran out of memory
        ran, misfit = sorted(set(history.measured.tolist())), sorted(history.misfits)
        log_weight = log_ndtr(-(log_share[ran] + shared[:, None]) / own_error).sum(axis=1)
        log_weight += log_ndtr((log_share[misfit] + shared[:, None]) / own_error).sum(axis=1)
        weight = np.exp(log_weight - log_weight.max())
        shared = rng.choice(shared, size=(self._draws, 1), p=weight / weight.sum())
        own = np.float32(own_error) * rng.standard_normal(drawn.shape, dtype=np.float32)
        misfits = (log_share + shared).astype(np.float32) + own > 0
        misfits[:, sorted(history.explored)] = False
        misfits[misfits.all(axis=1)] = False
        drawn[misfits] = np.inf

    def is_confident(self, history: History) -> bool:
        """Whether p_star exceeds eta (FlexParallel 3.3)."""
        return bool(len(history.measured)) and self.population(history).p_star > self._confidence

    def is_exhausted(self, history: History) -> bool:
        """Whether no candidate is left to try."""
        return len(history.explored | history.impossible | history.pending) >= len(self._candidates)

    def has_unexplored_draw(self, history: History) -> bool:
        """Whether some draw names a candidate that is neither explored nor pending."""
        closed = history.explored | history.pending
        return any(int(position) not in closed for position in self.population(history).fastest)

    def choose(self, history: History) -> int:
        """The position of the next candidate: uniform over the unexplored draws, pending ones excluded.

        If no such draw is left, each draw names its fastest candidate among the untried ones; when all have been tried,
        the fastest of all is measured again.
        """
        if self._first is not None and not history.num_decisions:
            return self._first
        population = self.population(history)
        closed = np.array(sorted(history.explored | history.impossible | history.pending), dtype=np.int64)
        named = population.fastest[~np.isin(population.fastest, closed)]
        if not len(named):
            open_s = population.drawn_s.copy()
            if len(closed) < len(self._candidates):
                open_s[:, closed] = np.inf
            named = np.argmin(open_s, axis=1)
        rng = np.random.default_rng([self._seed, 1, history.num_decisions])
        return int(rng.choice(named))
