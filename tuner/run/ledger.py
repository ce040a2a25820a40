"""Ledger of one driver: all that it writes of its study, and what it remembers of that.

A trial passes five points. It is created: its candidate's dimensions are parameters, its prediction an attribute. It is
submitted, and followed: its first steps are intermediate values. It is observed: the observation is an attribute. It is
told to Optuna. Each point is one transaction under the driver's claim, so there are no halves of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from optuna import Study
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from trials.backend import Observation, Status
from tuner.answers.reference import Reference, reference_of
from tuner.economics.device_time import device_time_of
from tuner.run.alike_failures import alike_failures
from tuner.run.driver import Claim
from tuner.run.own_trials import DrivenStudy, OwnTrials
from tuner.run.tasks import Asked, Task, Tasks
from tuner.search.constraints import MEMORY_ATTRIBUTE
from tuner.search.gain import GAIN, gain_in
from tuner.search.observations import FAILS_ALIKE, OBSERVATION, STATUS
from tuner.search.optuna_inside import create_trial_in, study_id_of, trial_id_of
from tuner.search.parameters import params_of
from tuner.search.population import P_STAR
from tuner.search.pruning import reported_steps
from tuner.search.stopping import StopReason
from tuner.storage.record import SPENT_S, STOP_REASON
from tuner.storage.stored_values import storable


class Ledger:
    """Trials of a study as its driver writes and remembers them.

    Args:
        tasks: Tasks that trials may have.
        claim: Claim of this driver on the study.
        study: Study as Optuna opened it.

    Attributes:
        tasks: Tasks that trials may have.
        claim: Claim of this driver on the study.
        trials: Trials of the study.
        study: Study whose reads are answered from memory: while the claim holds, nobody else writes.
        reference: Configuration that the study is compared with.
        live: Tasks of the trials that have not ended, by number.
        ended: Numbers and observations of trials that have ended, in the order of their ends, as far as this driver
            knows it.
        fails_alike: Numbers of the trials that failed alike up to the last one that this driver recorded, if that shows
            that the command fails whatever the layout.
    """

    def __init__(self, tasks: Tasks, claim: Claim, study: Study) -> None:
        self.tasks, self.claim = tasks, claim
        # past Optuna's cache, which would keep all that was ever read
        self.trials = OwnTrials(
            self.storage.get_all_trials(study_id_of(study), deepcopy=False),
            tasks.prepared.problem.dimensions,
            tasks.sampler,
            lambda record: device_time_of(tasks.prepared.request, [record]).device_s,
        )
        self.study = DrivenStudy(study, self.trials)
        self.reference: Reference | None = reference_of(tasks.prepared.problem, study)
        self.live: dict[int, Task] = {}
        self.ended = [
            (each.number, each.observation) for each in self.trials.records if each.finished and each.observation
        ]
        self.fails_alike: tuple[int, ...] = ()

    def go_on_with(self, tasks: Tasks) -> None:
        """Go on with other tasks of the same study, whose candidates are all of these and more."""
        choices = self.tasks.sampler.choices
        self.live = {
            number: task
            if task.position is None
            else replace(task, position=tasks.sampler.position_of(params_of(choices.values(task.position))))
            for number, task in self.live.items()
        }
        self.tasks = tasks
        problem = tasks.prepared.problem
        stored = self.storage.get_all_trials(study_id_of(self.study), deepcopy=False)
        self.trials.read(stored, problem.dimensions, tasks.sampler)
        self.reference = reference_of(problem, self.study)

    @property
    def storage(self) -> BaseStorage:
        """Studies as they are stored, past Optuna's cache."""
        return self.claim.store.storage

    def keep(self, attributes: Mapping[str, Any]) -> None:
        """Write attributes of the study together."""
        with self.claim.together():
            for key, value in attributes.items():
                self.study.set_user_attr(key, value)

    def create(self, task: Task, params: Mapping[str, Any], known: Mapping[str, Any]) -> Asked:
        """Write a trial of a candidate with its prediction and the attributes `known`, and begin it.

        It is written with its candidate and all its attributes at once: there are no halves of a trial.
        """
        trial = create_trial(
            state=TrialState.RUNNING,
            params=dict(params),
            distributions=self.tasks.sampler.search_space,
            user_attrs=self.tasks.describe(task) | dict(known),
        )
        with self.claim.together():
            create_trial_in(self.storage, self.study, trial)
            self.tasks.sampler.before_trial(self.study, trial)
        trial.number = number = self._number_of(trial_id_of(trial))
        self.trials.begin(trial)
        self.live[number] = task
        return self.tasks.as_asked(number, task)

    def _number_of(self, trial_id: int) -> int:
        """Return the number of a trial that was just written: the next one, unless somebody has enqueued others."""
        number = self.trials.next_number
        if self.storage.get_trial_id_from_study_id_trial_number(study_id_of(self.study), number) == trial_id:
            return number
        return self.storage.get_trial_number_from_id(trial_id)

    def resume(self, trial: FrozenTrial) -> None:
        """Write that a trial that an earlier driver gave up runs again."""
        with self.claim.together():
            self.storage.set_trial_state_values(trial_id_of(trial), TrialState.RUNNING)
        trial.state, trial.datetime_start = TrialState.RUNNING, datetime.now()

    def describe(self, trial: FrozenTrial, task: Task) -> None:
        """Write the attributes of a trial that was created without them."""
        with self.claim.together():
            for key, value in self.tasks.describe(task).items():
                self.storage.set_trial_user_attr(trial_id_of(trial), key, value)
                trial.set_user_attr(key, value)

    def record(self, number: int, observation: Observation) -> None:
        """Keep the observation, then end the trial: a driver that dies in between has lost nothing."""
        ran = storable(observation)  # later studies learn from what ran, whatever this one allows
        task, trial_id = self.live[number], trial_id_of(self.trials[number])
        observation = self.tasks.hold_to_limit(task, ran)
        excess = self.tasks.memory_excess(task, observation)
        self.ended.append((number, replace(observation, operator_samples=(), log_tail="")))
        self.fails_alike = alike_failures(self.ended)
        excuses = {FAILS_ALIKE: list(self.fails_alike)} if self.fails_alike else {}
        with self.claim.together():
            self.storage.set_trial_user_attr(trial_id, STATUS, observation.status.value)
            self.storage.set_trial_user_attr(trial_id, OBSERVATION, observation.as_json())
            for key, value in excuses.items():
                self.storage.set_trial_user_attr(trial_id, key, value)
            if excess is not None:
                self.storage.set_trial_system_attr(trial_id, MEMORY_ATTRIBUTE, excess)
            self._keep_run(number, ran)
        self.trials[number].user_attrs.update({STATUS: observation.status.value, OBSERVATION: observation, **excuses})
        self._end(number, observation)

    def end(self, number: int, observation: Observation) -> None:
        """End a trial whose observation an earlier driver has written already."""
        with self.claim.together():
            self._keep_run(number, observation)
        self._end(number, observation)

    def _keep_run(self, number: int, observation: Observation) -> None:
        """Keep the run of a trial for later studies too."""
        self.tasks.keep_run(self.claim.store, self.study.study_name, number, self.live[number], observation)

    def _end(self, number: int, observation: Observation) -> None:
        """End a trial for Optuna; its values are those of a step at full size, which a proxy does not measure."""
        task, trial = self.live.pop(number), self.trials[number]
        state, values = TrialState.FAIL, None
        if observation.step_time_s is not None and task.proxy is None:
            state, values = TrialState.COMPLETE, self.tasks.values(task, observation)
        elif observation.status == Status.PRUNED or observation.step_time_s is not None:
            # a pruned trial's value is what it reported last, as Optuna has it
            state, values = TrialState.PRUNED, reported_steps(trial)[-1:] or None
        with self.claim.together():
            self.tasks.sampler.after_trial(self.study, trial, state, values)
            self.storage.set_trial_state_values(trial_id_of(trial), state, values)
        self.trials.end(number, state, values, self.study.user_attrs[P_STAR])
        best, known = self.trials.best, gain_in(self.study.user_attrs)
        is_of_reference = self.reference is not None and any(
            dict(self.reference.values) == dict(record.params) for record in self.trials.records_of([number])
        )
        if best is not None and (is_of_reference or known is None or known.best != best.params):
            self._keep_gain()

    def _keep_gain(self) -> None:
        """Keep the gain of the best over the reference in the study, unless it knows all trials that have ended.

        It takes as long as a decision. So it is computed when the best changes, when the reference was measured, and
        when the run ends in order.
        """
        best, known = self.trials.best, gain_in(self.study.user_attrs)
        if best is None or self.reference is None:
            return
        values, observations = dict(self.reference.values), self.trials.observations()
        if known is not None and (known.best, known.reference, known.trials) == (
            best.params,
            values,
            observations.num_decisions,
        ):
            return
        found = self.tasks.sampler.gain(observations, best.params, values)
        self.keep({GAIN: None if found is None else found.as_json()})

    def give_up(self, stop_reason: StopReason, spent_s: float) -> None:
        """Give the study up, if this driver has it: trials that have not ended wait for the next driver."""
        if self.claim.is_lost:
            return
        if stop_reason is not StopReason.INTERRUPTED:  # who interrupts does not wait
            self._keep_gain()
        with self.claim.together():
            for number in self.live:
                self.storage.set_trial_state_values(trial_id_of(self.trials[number]), TrialState.WAITING)
            self.study.set_user_attr(STOP_REASON, stop_reason.value)
            self.study.set_user_attr(SPENT_S, spent_s)
        self.claim.release()
