"""Tasks of trials: a candidate at full size or a proxy in its place, and what the study knows of it beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optuna.trial import FrozenTrial

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from trials.backend import Observation
from tuner.forecast.candidates import plan_of, prediction_json
from tuner.forecast.prepared import Prepared
from tuner.run.memory_limit import hold_to_limit
from tuner.search.constraints import memory_excess
from tuner.search.parameters import ASSIGNMENT, params_of
from tuner.search.proxy.proxy_trials import PROXY, Proxy
from tuner.search.sampler import ThompsonSampler
from tuner.storage.history import keep_run
from tuner.storage.record import PREDICTION, TrialRecord
from tuner.storage.store import AbstractStore
from tuner.storage.stored_values import check_new_trial
from tuner.subject.ability import Ability

Asked = tuple[int, ParallelConfig, Reduction | None]
"""Trial that is to run: its number and its candidate, or a proxy's configuration and the smaller job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Task of a trial.

    Attributes:
        position: Position of its candidate; None if it never got one.
        proxy: Proxy that it runs in place of the candidate.
    """

    position: int | None = None
    proxy: Proxy | None = None

    @property
    def full_position(self) -> int | None:
        """Position of the candidate if it runs at full size; None for a proxy, which measures a smaller job."""
        return self.position if self.proxy is None else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tasks:
    """Tasks that trials of a study may have.

    Attributes:
        prepared: Study, with its candidates and their predictions.
        sampler: Its sampler, which chooses among them.
    """

    prepared: Prepared
    sampler: ThompsonSampler

    def task_of_trial(self, trial: FrozenTrial, *, has_candidate: bool) -> Task:
        """Return the task of a stored trial that has not ended."""
        stored = trial.user_attrs.get(PROXY)
        return Task(
            position=self.sampler.position_of(trial.params) if has_candidate else None,
            proxy=Proxy.from_json(stored) if stored else None,
        )

    def task_of_record(self, record: TrialRecord | None) -> Task:
        """Return the task of a trial with this record; one without a record never got a candidate."""
        if record is None:
            return Task()
        return Task(position=self.sampler.position_of(params_of(record.params)), proxy=record.proxy)

    def as_asked(self, number: int, task: Task) -> Asked:
        """Return a trial as an executor takes it."""
        if task.proxy is not None:
            return number, task.proxy.config, task.proxy.reduction
        assert task.position is not None, "only a trial with a candidate runs"
        return number, self.sampler.choices.config(task.position), None

    def num_devices(self, task: Task) -> int:
        """Return how many devices a trial occupies."""
        return task.proxy.config.num_devices if task.proxy else self.prepared.problem.cluster.num_devices

    def predicted_s(self, position: int) -> float:
        """Return the step time that the cost model predicts for a candidate [s]."""
        return float(self.prepared.candidates.estimate.step_time_s[self.sampler.choices.layout_of(position)])

    def capacity_bytes(self, position: int) -> float:
        """Return the memory of the devices that a candidate has [bytes]."""
        return float(self.prepared.candidates.space.memory.capacity_bytes[self.sampler.choices.layout_of(position)])

    def describe(self, task: Task) -> dict[str, Any]:
        """Return the attributes of a trial: its proxy, and the prediction of its candidate."""
        assert task.position is not None, "only a trial with a candidate is described"
        estimate, memory = self.prepared.candidates.estimate, self.prepared.candidates.space.memory
        prediction = prediction_json(
            self.prepared.problem, estimate, memory, self.sampler.choices.layout_of(task.position)
        )
        chosen = self.sampler.choices.config(task.position)
        attributes: dict[str, Any] = {PREDICTION: prediction | plan_of(self.prepared.problem, chosen)}
        if task.proxy is not None:
            attributes[PROXY] = task.proxy.as_json()
        if chosen.assignment:
            attributes[ASSIGNMENT] = str(chosen.assignment)
        check_new_trial(attributes)
        return attributes

    def hold_to_limit(self, task: Task, observation: Observation) -> Observation:
        """Return the observation, as one of a configuration that does not fit if it leaves too little memory free."""
        if task.full_position is None:
            return observation
        return hold_to_limit(
            observation, self.capacity_bytes(task.full_position), self.prepared.request.economics.limits.free_memory
        )

    def memory_excess(self, task: Task, observation: Observation | None) -> float | None:
        """Return the constraint of a trial at full size; None for others."""
        if task.full_position is None or observation is None:
            return None
        return memory_excess(observation, self.capacity_bytes(task.full_position))

    def values(self, task: Task, observation: Observation) -> Sequence[float]:
        """Return the values of a trial that completes."""
        assert task.position is not None, "only a trial with a candidate completes"
        return self.sampler.values_of(task.position, observation)

    def keep_run(self, store: AbstractStore, study: str, number: int, task: Task, observation: Observation) -> None:
        """Keep the run of a trial in a store, for later studies."""
        position, proxy = task.position, task.proxy
        if position is None or not self.prepared.problem.subject.has(Ability.HISTORY):
            return
        setting, config = self.prepared.problem.setting, self.sampler.choices.config(position)
        if config.knobs != self.prepared.problem.with_knobs(replace(config, knobs=())).knobs:
            return  # other studies learn from layouts with today's knobs
        if proxy is not None:
            setting, config = proxy.setting(setting), proxy.config
        keep_run(store, study, number, setting, config, observation)
