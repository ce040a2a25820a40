"""Attributes of a study and its trials in the storage, and the records that are read from them.

A trial's parameters are the dimensions of its candidate. Its attributes hold, as JSON:

    prediction   prediction of the cost model before the trial (see candidates.prediction_json)
    observation  outcome of the trial (see trials.backend.Observation)
    status       status of the observation, so that the Optuna dashboard can filter by it
    proxy        smaller job that the trial ran in place of its candidate (see proxy_trials.py); none at full size
    p_star       p_star after the trial
    population   population that p_star is a part of (see population.py)

Several trials of one candidate are one measurement, of which each is a part; Optuna's own best value is that of a
single trial.

A proxy that ended well is a pruned trial for Optuna. It has no value, because its step time is not the candidate's, and
an extrapolated one was never measured. So the value of a complete trial is always a measurement at full size.

The study's attributes hold: the meaning of its trials, its driver, its last stop reason, the wall time that its drivers
have spent on it, the size of the history that the last of them has read, p_star, the population before the first trial,
conclusions from failures (failures.py), the baseline that its answer is compared with where no current configuration is
named, the gain over it (gain.py), and the answer that proxies suggest (extrapolation.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from costmodels.job.parallel_config import DEGREES, HAND, Value
from trials.backend import Observation, Status
from tuner.search.observations import FAILS_ALIKE, observation_of, of_trials, status_without_value, step_time_in
from tuner.search.parameters import PLAN, values_of
from tuner.search.population import P_STAR, end_order
from tuner.search.proxy.extrapolation import Extrapolated, extrapolated_of
from tuner.search.proxy.proxy_trials import PROXY, Proxy

PREDICTION = "prediction"
MEANING = "meaning"
STOP_REASON = "stop_reason"
SPENT_S = "spent_s"
ORIGIN = "origin"
HISTORY = "history"
BASELINE = "baseline"
PHASES = "phases"
"""Attribute of the study that names its studies on fewer hosts, with the numbers of these hosts."""
OWN_PLANS = "own_plans"
"""Attribute of the study that keeps the sharding plans of a step of the user's own, by the size of the axis `model`."""
LAYER_PLANS = "layer_plans"
"""Attribute of the study that keeps the sharding plans of its candidates' layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """One trial as the storage holds it.

    Attributes:
        number: Number of the trial in its study.
        params: Dimensions of the candidate; empty if the trial never got one.
        finished: Whether the trial has ended.
        status: Status of its observation; None while it runs.
        step_time_s: Median of the measured steps, where it completed [s].
        predicted_s: Step time that the cost model predicted [s].
        prediction: All predicted values.
        observation: All observed values.
        proxy: Proxy that ran in place of the candidate; None at full size.
        p_star: Value of the study's p_star after this trial.
        end_order: Key that sorts trials by when they ended.
        started_at: Date at which it was asked for.
        ended_at: Date at which it was told.
        values: Values that the study minimizes, where it completed: the step time [s], or those of its objective.
        waits: Whether its driver has given it up, and it waits for the next one.
        excuses: Numbers of the trials whose failures say nothing about a candidate, by what this one showed.
    """

    number: int
    params: dict[str, Value]
    finished: bool
    status: Status | None
    step_time_s: float | None
    predicted_s: float | None
    prediction: dict[str, Any]
    observation: Observation | None
    proxy: Proxy | None
    p_star: float | None
    end_order: tuple[int, float, int]
    started_at: datetime | None
    ended_at: datetime | None
    values: tuple[float, ...] = ()
    waits: bool = False
    excuses: tuple[int, ...] = ()

    @property
    def merit(self) -> float:
        """Number by which completed trials are ordered: the one value of the study or, of two, the step time."""
        assert self.step_time_s is not None, "the trial completed"
        return self.values[0] if len(self.values) == 1 else self.step_time_s

    @property
    def unfinished_in_words(self) -> str:
        """State of a trial that has not ended."""
        return "waiting" if self.waits else "running"

    @property
    def is_proxy(self) -> bool:
        """Whether a smaller job ran in place of the candidate."""
        return self.proxy is not None

    @property
    def has_failed(self) -> bool:
        """Whether it ended without its measurement, and was not stopped early."""
        is_measured = self.step_time_s is not None or (self.is_proxy and self.status is Status.OK)
        return self.finished and not is_measured and self.status is not Status.PRUNED


def read_records(study: Study) -> list[TrialRecord]:
    """Return the records of all trials that got a candidate, in the order of their numbers."""
    return records_of(study.get_trials(deepcopy=False), study.user_attrs)


def records_of(trials: Sequence[FrozenTrial], attributes: Mapping[str, Any]) -> list[TrialRecord]:
    """Return the records of a study's trials that got a candidate, in the order of their numbers.

    A trial that lacks one of the dimensions is just being asked for, or its driver died while it was. Without a plan it
    is from before the study had others than that by hand.
    """
    dimensions = {*DEGREES, *attributes.get(MEANING, {}).get("space", {}).get("opened", ())}
    has_plans = any("plan" in change for change in attributes.get(LAYER_PLANS, {}).get("changes", ()))
    return [
        record_of(trial, attributes.get(f"{P_STAR}:{trial.number}"), has_plans=has_plans)
        for trial in sorted(trials, key=lambda trial: trial.number)
        if dimensions <= set(trial.params)
    ]


def record_of(trial: FrozenTrial, p_star: float | None = None, *, has_plans: bool = False) -> TrialRecord:
    """Return the record of a trial that got a candidate.

    Args:
        trial: Trial of the study.
        p_star: The study's p_star after it, which earlier versions kept on the study.
        has_plans: Whether the plan is a dimension of the study.
    """
    prediction = trial.user_attrs.get(PREDICTION, {})
    proxy = trial.user_attrs.get(PROXY)
    params = values_of(trial)
    if has_plans:
        params = {**params, PLAN: params.get(PLAN, HAND)}
    finished, observation = trial.state.is_finished(), observation_of(trial)
    is_complete = trial.state == TrialState.COMPLETE and bool(trial.values)
    status = Status.OK if trial.state == TrialState.COMPLETE else status_without_value(trial, trial.state)
    return TrialRecord(
        number=trial.number,
        params=params,
        finished=finished,
        status=status if finished else None,
        step_time_s=step_time_in(observation, trial.values) if is_complete else None,
        values=tuple(trial.values) if is_complete else (),
        predicted_s=prediction.get("step_time_s"),
        prediction=prediction,
        observation=observation,
        proxy=Proxy.from_json(proxy) if proxy else None,
        p_star=trial.user_attrs.get(P_STAR, p_star),
        end_order=end_order(trial),
        started_at=trial.datetime_start,
        ended_at=trial.datetime_complete,
        waits=trial.state == TrialState.WAITING,
        excuses=tuple(trial.user_attrs.get(FAILS_ALIKE, ())),
    )


def best_record(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the first completed trial of the best candidate, the fastest one, with the step time of all its trials.

    The best is that of the study's objective, where it has one of its own.

    Of equals the earliest is returned; None without a completed trial.
    """
    return min(_candidates(records), key=lambda record: (record.merit, record.number), default=None)


def answer_of(
    records: Sequence[TrialRecord], attributes: Mapping[str, Any]
) -> tuple[TrialRecord | None, Extrapolated | None]:
    """Return the best record of a study, or in its place what proxies suggest where no trial completed at full size.

    A measurement that the study file states is no trial: proxies tell whether another candidate is faster.
    """
    best, extrapolated = best_record(records), extrapolated_of(attributes)
    completed = [record.observation for record in records if record.step_time_s is not None]
    if extrapolated is not None and all(seen is not None and seen.taken_from for seen in completed):
        return None, extrapolated
    return best, None


def fastest(records: Sequence[TrialRecord], count: int) -> list[TrialRecord]:
    """Return the first completed trial of each of the `count` best candidates, the best first; see `best_record`."""
    return sorted(_candidates(records), key=lambda record: (record.merit, record.number))[:count]


def repeated_trials(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the first completed trial of every candidate with several, in their order."""
    return [record for record in _candidates(records) if len(completed_times_s(records, record.params)) > 1]


def _candidates(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the first completed trial of each candidate, with the step time of all its trials."""
    completed: dict[tuple[Value, ...], list[TrialRecord]] = {}
    for record in records:
        if record.step_time_s is not None:
            completed.setdefault(tuple(record.params.values()), []).append(record)
    return [
        replace(
            same[0],
            step_time_s=of_trials([each.step_time_s for each in same if each.step_time_s is not None]),
            values=tuple(of_trials(of_all) for of_all in zip(*(each.values for each in same), strict=True)),
        )
        for same in completed.values()
    ]


def step_time_of(records: Sequence[TrialRecord], params: Mapping[str, Value] | None) -> float | None:
    """Return the measured step time of a candidate, from all its completed trials [s]; None without one."""
    times_s = completed_times_s(records, params)
    return of_trials(times_s) if times_s else None


def completed_times_s(records: Sequence[TrialRecord], params: Mapping[str, Value] | None) -> tuple[float, ...]:
    """Return the step times of a candidate's completed trials, in the order of their numbers [s]."""
    return tuple(record.step_time_s for record in records if record.params == params and record.step_time_s is not None)


def counted(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials that have ended and count against the study's budget: all but those that failed alike."""
    excused = {number for record in records for number in record.excuses}
    return [record for record in records if record.finished and record.number not in excused]


def excused_in_words(records: Sequence[TrialRecord]) -> str:
    """Return a clause on the trials that count against no budget; empty without any."""
    excused = sum(record.finished for record in records) - len(counted(records))
    return f"{excused:,} more failed alike, whatever the layout, and count against nothing" if excused else ""


def num_failed(records: Sequence[TrialRecord]) -> int:
    """Count the trials that ended without their measurement, except those stopped early."""
    return sum(record.has_failed for record in records)


def num_running(records: Sequence[TrialRecord]) -> int:
    """Count the trials that have not ended, except those that wait for the next driver."""
    return sum(not record.finished and not record.waits for record in records)


def num_proxies(records: Sequence[TrialRecord]) -> int:
    """Count the trials that ran a smaller job and have ended."""
    return sum(record.is_proxy and record.finished for record in records)


def num_pruned(records: Sequence[TrialRecord]) -> int:
    """Count the trials that were stopped early, because they were clearly slower than the best."""
    return sum(record.status is Status.PRUNED for record in records)


def saved_s(records: Sequence[TrialRecord]) -> float:
    """Return the time of steps that stopping early has saved, start-up not counted [s]."""
    return sum(record.observation.saved_s for record in records if record.observation is not None)
