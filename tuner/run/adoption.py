"""Trials that a driver takes over: those that an earlier one left, and the measurement that the study file states.

A driver that dies leaves trials behind at any point of their way, and one that ends in order lets those that it has not
told wait. The next one adopts them under their own numbers: it closes a trial without a candidate, tells one with an
observation, and submits the others again. So nothing that was observed is lost, and no candidate is finished twice.
"""

from __future__ import annotations

from dataclasses import replace

from optuna.trial import FrozenTrial, TrialState

from trials.backend import Observation, Status
from tuner.run.ledger import Ledger
from tuner.run.tasks import Asked, Task
from tuner.search.observations import OBSERVATION, STATUS, observation_of
from tuner.search.parameters import params_of
from tuner.storage.record import PREDICTION


def adopt(ledger: Ledger) -> list[Asked]:
    """Settle the trials that an earlier driver left running; return those that must run again."""
    found = []
    for trial in ledger.trials.running:
        if trial.state == TrialState.WAITING and PREDICTION in trial.user_attrs:  # given up
            ledger.resume(trial)
        if trial.state == TrialState.RUNNING:  # others were enqueued by somebody else
            found.append(_settle(ledger, trial))
    return [asked for asked in found if asked is not None]


def _settle(ledger: Ledger, trial: FrozenTrial) -> Asked | None:
    """Settle one trial; return it if it must run again."""
    number = trial.number
    task = ledger.tasks.task_of_trial(trial, has_candidate=ledger.trials.has_candidate(trial))
    ledger.live[number] = task
    if (observation := observation_of(trial)) is not None:
        ledger.end(number, observation)
        return None
    if task.position is None:
        ledger.record(number, _cancelled(ledger, "its driver died before the trial had a candidate of the study"))
        return None
    if PREDICTION not in trial.user_attrs:  # its driver, of an earlier version, died just then
        proxy = ledger.tasks.sampler.proxy_for(ledger.trials.observations(but=number), task.position)
        ledger.live[number] = task = replace(task, proxy=proxy)
        ledger.describe(trial, task)
    if task.proxy is None and ledger.tasks.prepared.request.trials.only_proxies:
        ledger.record(number, _cancelled(ledger, "the study runs smaller jobs only now, and this was none"))
        return None
    return ledger.tasks.as_asked(number, task)


def _cancelled(ledger: Ledger, reason: str) -> Observation:
    origin = ledger.tasks.prepared.request.trials.backend.origin
    return Observation(status=Status.CANCELLED, reason=reason, origin=origin)


def count_measured(ledger: Ledger) -> None:
    """Count the measurement of the current configuration that the study file states as a trial, once."""
    prepared = ledger.tasks.prepared
    observation, current = prepared.request.trials.current, prepared.problem.current
    if observation is None or current is None:
        return
    if any(record.observation and record.observation.taken_from for record in ledger.trials.records):
        return
    params = params_of(current.values(prepared.problem.dimensions))
    position = ledger.tasks.sampler.position_of(params)
    assert position is not None, "the current configuration is always a candidate"
    # with its observation from the first: a driver that dies here leaves a trial that needs no devices
    known = {STATUS: observation.status.value, OBSERVATION: observation.as_json()}
    number, _, _ = ledger.create(Task(position=position), params, known)
    ledger.record(number, observation)
