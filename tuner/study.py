"""The ask/tell loop: opens or resumes a study, keeps the trial slots busy, records what comes back, stops by itself.

A trial's life: asked (its candidate's dimensions are parameters, its prediction an attribute), submitted, observed (the
observation is an attribute), told. A driver that dies leaves trials behind at any of these points; the next one adopts
them under their own numbers: a trial without a candidate is closed, one with an observation is told, the others are
submitted again. Nothing that was observed is lost, and no candidate is finished twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import optuna
from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from hardware.errors import ConfigError, shown
from trials.backend import Observation, Status
from trials.ray_executor import RayExecutor
from tuner.candidates import Candidates, candidates_of, prediction_json
from tuner.config import StudyConfig, first_difference
from tuner.driver import DRIVER, claim, is_held, release, renew
from tuner.record import (
    MEANING,
    OBSERVATION,
    ORIGIN,
    PREDICTION,
    STOP_REASON,
    TrialRecord,
    best_record,
    read_records,
)
from tuner.sampler import P_STAR, STATUS, History, ThompsonSampler
from tuner.stopping import StopReason
from tuner.storage import load_study, open_storage

POLL_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is, for whoever shows it.

    Attributes:
        done: Trials that have ended, those of earlier runs included.
        running: Trials in flight.
        budget: Trials allowed.
        best: The fastest trial so far.
        p_star: The latest p_star.
        seconds_left: Of the budget of time, None without one.
        note: Something to tell once, or empty.
    """

    done: int
    running: int
    budget: int
    best: TrialRecord | None
    p_star: float
    seconds_left: float | None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunResult:
    """How a run ended.

    Attributes:
        records: Every trial of the study.
        best: The fastest completed trial, None if there is none.
        stop_reason: Why the search ended.
        p_star: The last p_star.
        num_candidates: Size of the searched space.
        warnings: What a user should know.
    """

    records: list[TrialRecord]
    best: TrialRecord | None
    stop_reason: StopReason
    p_star: float
    num_candidates: int
    warnings: tuple[str, ...]


def run_study(
    config: StudyConfig,
    *,
    on_progress: Callable[[Progress], None],
    ray_address: str | None = None,
    clock: Callable[[], float] = time.time,
) -> RunResult:
    """Runs the study until it stops, continuing what the storage already holds.

    Raises:
        ConfigError: nothing fits, the stored study means something else, or another process is running it.
    """
    candidates = candidates_of(config)
    if not len(candidates.space.grid):
        return _nothing_to_try(candidates)
    sampler = make_sampler(config, candidates)
    study = open_study(config, sampler)
    held = claim(study, now_s=clock())
    run = _Run(config=config, candidates=candidates, sampler=sampler, study=study)
    started_s = clock()
    stop_reason = StopReason.INTERRUPTED
    try:
        todo = run.adopt()
        reason = run.reason_to_stop(0.0)
        if reason is not None and not todo:
            stop_reason = reason
        else:
            with RayExecutor(
                config.backend,
                parallel_trials=config.search.parallel_trials,
                time_limit_s=config.time_limit_s,
                address=ray_address,
            ) as executor:
                on_progress(run.progress(clock() - started_s, note=executor.slots_note or ""))
                while True:
                    held = renew(study, held, now_s=clock())
                    reason = run.reason_to_stop(clock() - started_s)
                    while executor.num_free_slots and (todo or reason is None):
                        trial = todo.pop(0) if todo else run.ask()
                        if trial is None:
                            break
                        executor.submit(trial.number, sampler.config_of(trial.params))
                        reason = run.reason_to_stop(clock() - started_s)
                    if reason is not None and not executor.pending and not todo:
                        stop_reason = reason
                        break
                    for number, observation in executor.poll(POLL_S):
                        run.record(number, observation)
                    on_progress(run.progress(clock() - started_s))
    except KeyboardInterrupt:
        stop_reason = StopReason.INTERRUPTED
    finally:
        study.set_user_attr(STOP_REASON, stop_reason.value)
        release(study)
    records = read_records(study)
    return RunResult(
        records=records,
        best=best_record(records),
        stop_reason=stop_reason,
        p_star=float(study.user_attrs.get(P_STAR, 0.0)),
        num_candidates=len(candidates.space.grid),
        warnings=candidates.space.warnings,
    )


def _nothing_to_try(candidates: Candidates) -> RunResult:
    removed = max(candidates.space.removed.items(), key=lambda entry: entry[1], default=("", 0))
    return RunResult(
        records=[],
        best=None,
        stop_reason=StopReason.EXHAUSTED,
        p_star=0.0,
        num_candidates=0,
        warnings=(f"no configuration is left; {removed[0]} removed the most: see `meshtune space`",),
    )


def make_sampler(config: StudyConfig, candidates: Candidates) -> ThompsonSampler:
    """The sampler that a study's options ask for."""
    return ThompsonSampler(
        candidates.space.grid,
        candidates.estimate.step_time_s,
        candidates.features,
        memory_share=candidates.space.memory.peak_bytes / candidates.space.memory.capacity_bytes,
        draws=config.search.draws,
        confidence=config.search.confidence,
        seed=config.search.seed,
        first=config.expert,
    )


def open_study(config: StudyConfig, sampler: ThompsonSampler) -> Study:
    """The study in its storage, new or as it was left.

    Raises:
        ConfigError: the stored study's trials mean something else than the study file now says.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = open_storage(config.storage)
    study = optuna.create_study(
        study_name=config.name, storage=storage, sampler=sampler, direction="minimize", load_if_exists=True
    )
    meaning = json.loads(json.dumps(config.meaning))
    stored = study.user_attrs.get(MEANING)
    if stored is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(MEANING, meaning)
        study.set_user_attr(ORIGIN, config.backend.origin)
    else:
        _check_meaning(config, stored or {}, meaning)
    return study


def _check_meaning(config: StudyConfig, stored: dict[str, object], meaning: dict[str, object]) -> None:
    difference = first_difference(stored, meaning)
    if difference is not None:
        key, before, now = difference
        raise ConfigError(
            f"the stored study {config.name!r} was measured with {shown(before)}; its trials would no longer mean the "
            "same",
            file=config.file,
            key=key,
            value=shown(now, 80),
            nearest="give the study another name, or change the key back",
        )


def stored_study(config: StudyConfig) -> Study:
    """The study that the storage holds, for reading.

    Raises:
        ConfigError: there is none yet.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = load_study(open_storage(config.storage), config.name)
    if study is None:
        raise ConfigError(
            "has no trials in its storage yet",
            file=config.file,
            key="name",
            value=config.name,
            nearest=f"start it with `meshtune run {config.file}`",
        )
    return study


def is_running(study: Study) -> bool:
    """Whether some process is driving the study."""
    held = study.user_attrs.get(DRIVER)
    return bool(held) and is_held(held)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Run:
    """One driver at work on one study."""

    config: StudyConfig
    candidates: Candidates
    sampler: ThompsonSampler
    study: Study

    def adopt(self) -> list[FrozenTrial]:
        """Settles what an earlier driver left running; returns the trials that must run again."""
        again = []
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self.sampler.position_of(trial.params) is None:
                self._tell(trial.number, Observation(status=Status.CANCELLED, reason="its driver died before it began"))
            elif OBSERVATION in trial.user_attrs:
                self._tell(trial.number, Observation.from_json(trial.user_attrs[OBSERVATION]))
            else:
                again.append(trial)
        return again

    def ask(self) -> FrozenTrial | None:
        """The next trial, or None where the draws name only candidates that are still being measured."""
        history = self._history()
        if history.pending and history.num_decisions and not self.sampler.has_unexplored_draw(history):
            return None
        trial = self.study.ask(fixed_distributions=self.sampler.search_space)
        position = self.sampler.position_of(trial.params)
        assert position is not None, "the sampler suggested a configuration that is no candidate"
        prediction = prediction_json(
            self.config.setting,
            self.candidates.estimate,
            self.candidates.space.memory,
            position,
            self.config.options.memory_headroom,
        )
        trial.set_user_attr(PREDICTION, prediction)
        return self.study.get_trials(deepcopy=False)[trial.number]

    def record(self, number: int, observation: Observation) -> None:
        """Keeps the observation, then ends the trial: a driver that dies in between has lost nothing."""
        trial = self.study.get_trials(deepcopy=False)[number]
        self.study._storage.set_trial_user_attr(trial._trial_id, STATUS, observation.status.value)
        self.study._storage.set_trial_user_attr(trial._trial_id, OBSERVATION, observation.as_json())
        self._tell(number, observation)

    def _tell(self, number: int, observation: Observation) -> None:
        if observation.step_time_s is not None:
            self.study.tell(number, observation.step_time_s)
        elif observation.status == Status.PRUNED:
            self.study.tell(number, state=TrialState.PRUNED)
        else:
            self.study.tell(number, state=TrialState.FAIL)

    def reason_to_stop(self, elapsed_s: float) -> StopReason | None:
        """Why no further trial should be asked for, or None; confidence waits for the trials in flight."""
        history = self._history()
        search = self.config.search
        if self.sampler.is_confident(history):
            return StopReason.CONFIDENT
        if history.num_decisions >= search.max_trials:
            return StopReason.TRIALS
        if search.max_seconds is not None and elapsed_s >= search.max_seconds:
            return StopReason.SECONDS
        if self.sampler.is_exhausted(history):
            return StopReason.EXHAUSTED
        return None

    def progress(self, elapsed_s: float, note: str = "") -> Progress:
        """Where the run stands."""
        records = read_records(self.study)
        max_seconds = self.config.search.max_seconds
        return Progress(
            done=sum(record.finished for record in records),
            running=sum(not record.finished for record in records),
            budget=self.config.search.max_trials,
            best=best_record(records),
            p_star=float(self.study.user_attrs.get(P_STAR, 0.0)),
            seconds_left=None if max_seconds is None else max(max_seconds - elapsed_s, 0.0),
            note=note,
        )

    def _history(self) -> History:
        return self.sampler.history(self.study.get_trials(deepcopy=False))
