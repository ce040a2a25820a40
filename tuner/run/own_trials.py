"""Trials of a study in the memory of its driver, which reads them once and then adds what it writes itself.

Reading the trials of a large study takes long, and nobody else writes any while the driver holds its claim on the
study. Of an ended trial, memory keeps only what decisions, progress and the answer need. Operator times, predictions
and populations (population.py) stay in the storage, so that the driver's memory hardly grows.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from tuner.search.observations import Observations
from tuner.search.optuna_inside import storage_of
from tuner.search.parameters import PLAN
from tuner.search.population import P_STAR
from tuner.search.pruning import best_among
from tuner.search.sampler import ThompsonSampler
from tuner.search.standing import Standing
from tuner.storage.record import TrialRecord, best_record, record_of
from tuner.storage.stored_values import check_new_attribute


class OwnTrials:
    """Trials of the study that this process drives.

    Args:
        trials: All trials of the study.
        dimensions: Dimensions that a trial's parameters must hold to name a candidate.
        sampler: Sampler that reads their observations.
        device_s_of: Function that returns the device time of a record of a trial that has ended [device s].

    Attributes:
        standing: The trials as the sampler reads them.
        device_s: Device time of all trials that have ended [device s].
        by_status: Number of trials that have ended, by the status of their records.
        best: Best record of the study; see `record.best_record`.
        best_trial: Best completed trial; see `pruning.best_among`.
    """

    def __init__(
        self,
        trials: Sequence[FrozenTrial],
        dimensions: Sequence[str],
        sampler: ThompsonSampler,
        device_s_of: Callable[[TrialRecord], float],
    ) -> None:
        self._device_s_of = device_s_of
        self.read(trials, dimensions, sampler)

    def read(self, trials: Sequence[FrozenTrial], dimensions: Sequence[str], sampler: ThompsonSampler) -> None:
        """Read all trials of the study, in place of those that are known; see the arguments of the class."""
        self._dimensions = frozenset(dimensions) - {PLAN}  # without it the plan is that by hand
        self._has_plans = PLAN in dimensions
        self._sampler = sampler
        self._known = {trial.number: _copy_trial(trial) for trial in sorted(trials, key=lambda trial: trial.number)}
        self._running = {number: trial for number, trial in self._known.items() if not trial.state.is_finished()}
        self.standing = Standing(
            ended=[trial for trial in self._known.values() if trial.state.is_finished()], running=self._running
        )
        self._records: dict[int, TrialRecord] = {}
        self._first: TrialRecord | None = None  # of the trial with the smallest number
        self._of_params: dict[frozenset[tuple[str, Any]], list[TrialRecord]] = defaultdict(list)
        self._excused: set[int] = set()
        self.device_s = 0.0
        self.by_status: Counter[str] = Counter()
        self._observations: Observations | None = None
        self.observations()
        for number in self._known.keys() - self._running.keys():
            self._remember(number)
        completed = [record for record in self._records.values() if record.step_time_s is not None]
        self._completed = {tuple(record.params.values()) for record in completed}
        self.best = best_record(completed)
        self.best_trial = best_among(list(self._known.values()))

    def __getitem__(self, number: int) -> FrozenTrial:
        """Return a trial; if it has ended, without its user attributes."""
        return self._known[number]

    def observations(self, *, but: int | None = None) -> Observations:
        """Return the observations of all trials except the trial `but`."""
        if but is not None:
            return self._sampler.observations_of(self.standing, but=but)
        if self._observations is None:
            self._observations = self._sampler.observations_of(self.standing)
        return self._observations

    def forget_observations(self) -> None:
        """Have the observations read again: the sampler has learned something that is no trial."""
        self._observations = None

    @property
    def all(self) -> list[FrozenTrial]:
        """All trials, by number; ended ones have lost their user attributes."""
        return list(self._known.values())

    @property
    def running(self) -> list[FrozenTrial]:
        """Trials that have not ended, in the order of their numbers."""
        return list(self._running.values())

    @property
    def records(self) -> list[TrialRecord]:
        """Records of trials with a candidate, by number; without predictions, operator times and dates."""
        return sorted((*self._records.values(), *self._running_records()), key=_number_of)

    def records_to_compare(self, params: Mapping[str, Any] | None) -> list[TrialRecord]:
        """Return the records of a candidate, by number; without one, those of the candidate that was tried first."""
        running = self._running_records()
        if params is None:
            first = min(filter(None, (self._first, *running)), key=_number_of, default=None)
            if first is None:
                return []
            params = first.params
        alike = (record for record in running if record.params == params)
        return sorted((*self._of_params.get(frozenset(params.items()), ()), *alike), key=_number_of)

    def _running_records(self) -> list[TrialRecord]:
        return [
            _shorten(trial, has_plans=self._has_plans) for trial in self._running.values() if self.has_candidate(trial)
        ]

    def records_of(self, numbers: Iterable[int]) -> tuple[TrialRecord, ...]:
        """Return the records of ended trials, in the order of `numbers`; trials without a candidate have none."""
        return tuple(self._records[number] for number in numbers if number in self._records)

    @property
    def num_counted(self) -> int:
        """Number of trials with a candidate that have ended and count against the budget; see `record.counted`."""
        return len(self._records) - len(self._excused & self._records.keys())

    @property
    def next_number(self) -> int:
        """Number of the next trial, if this process begins it."""
        return next(reversed(self._known), -1) + 1

    def begin(self, trial: FrozenTrial) -> None:
        """Add a trial that has just been asked for."""
        self._known[trial.number] = self._running[trial.number] = trial
        self._observations = None

    def end(self, number: int, state: TrialState, values: Sequence[float] | None, p_star: float) -> None:
        """Note that a running trial has ended and is in the storage; `p_star` is the study's confidence after it."""
        trial = self._running.pop(number)
        trial.values, trial.state = values, state
        trial.user_attrs[P_STAR] = p_star
        self.standing.ended.append(trial)
        self._observations = None
        self.observations()  # read it before its attributes are dropped
        if state == TrialState.COMPLETE:
            self.best_trial = best_among([trial, *([self.best_trial] if self.best_trial else [])])
        record = self._remember(number)
        if record is None or record.step_time_s is None:
            return
        candidate = tuple(record.params.values())
        # if the candidate was measured before, any other may now be the best, so compare all
        some = self._records.values() if candidate in self._completed else filter(None, (self.best, record))
        self._completed.add(candidate)
        self.best = best_record(sorted(some, key=lambda each: each.number))

    def _remember(self, number: int) -> TrialRecord | None:
        """Keep the record of a trial that has ended, and drop its attributes."""
        assert self._observations is not None, "observations are read before the attributes are dropped"
        trial = self._known[number]
        record = _shorten(trial, has_plans=self._has_plans) if self.has_candidate(trial) else None
        trial.user_attrs = {}
        if record is not None:
            self._records[number] = record
            self._excused.update(record.excuses)
            self._of_params[frozenset(record.params.items())].append(record)
            if self._first is None or number < self._first.number:
                self._first = record
            self.device_s += self._device_s_of(record)
            self.by_status[record.status.value if record.status else ""] += 1
        return record

    def has_candidate(self, trial: FrozenTrial) -> bool:
        """Return whether a trial's parameters hold every dimension of a candidate."""
        return self._dimensions <= trial.params.keys()


class DrivenStudy(Study):
    """Study that this process drives, as the hooks of its sampler see it.

    It answers reads from the driver's memory, because nobody else writes while the driver's claim holds. Writes go to
    the storage as for any Optuna study.

    Args:
        study: The study as Optuna opened it.
        trials: Its trials.
    """

    def __init__(self, study: Study, trials: OwnTrials) -> None:
        super().__init__(study.study_name, storage_of(study), sampler=study.sampler, pruner=study.pruner)
        self._own_trials = trials
        self._own_attributes = dict(study.user_attrs)

    @property
    def standing(self) -> Standing:
        """All trials of the study, for a sampler that reads new ones only."""
        return self._own_trials.standing

    @property
    def user_attrs(self) -> dict[str, Any]:
        """Attributes of the study, as read once and as written since."""
        return dict(self._own_attributes)

    def set_user_attr(self, key: str, value: Any) -> None:
        """Write an attribute of the study, and remember it.

        Raises:
            ConfigError: No version could read it.
        """
        check_new_attribute(key, value)
        super().set_user_attr(key, value)
        self._own_attributes[key] = value

    def get_trials(
        self,
        deepcopy: bool = True,  # Optuna's signature
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """Return the trials of the study, or those in some states."""
        trials = [trial for trial in self._own_trials.all if states is None or trial.state in states]
        return copy.deepcopy(trials) if deepcopy else trials


def _number_of(record: TrialRecord) -> int:
    return record.number


def _copy_trial(trial: FrozenTrial) -> FrozenTrial:
    """Return a copy of the trial that can change while the storage's stays as it is."""
    own = copy.copy(trial)
    own.user_attrs, own.intermediate_values = dict(trial.user_attrs), dict(trial.intermediate_values)
    return own


def _shorten(trial: FrozenTrial, *, has_plans: bool) -> TrialRecord:
    """Return the part of a trial that memory keeps; the rest, with the dates, stays in the storage."""
    record = record_of(trial, has_plans=has_plans)
    observation = record.observation and replace(record.observation, operator_samples=())
    return replace(
        record, prediction={}, observation=observation, end_order=(0, 0.0, trial.number), started_at=None, ended_at=None
    )
