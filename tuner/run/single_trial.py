"""One trial outside of the search, and its place in the study afterwards.

It runs as a trial of the search would: the same backend, in the same executor. Its log is told as it grows, where this
machine sees it. A trial that measured a candidate is then kept in the study, which need not measure it again. One that
failed is not kept: the command is what a user mends next, and the failure says nothing about the candidate.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.step.step_time import estimate_step
from hardware.io.errors import ConfigError
from hardware.io.input_file import open_input
from hardware.io.temporary import temporary_folder
from trials.backend import AbstractBackend, Observation
from trials.on_ray.executor import RayExecutor
from tuner.answers.reference import keep_baseline, reference_among
from tuner.forecast.prepared import Prepared
from tuner.run.driver import claim, interrupts_held
from tuner.run.ledger import Ledger
from tuner.run.studies import check_meaning, is_running, make_sampler, open_study
from tuner.run.tasks import Task, Tasks
from tuner.search.observations import OBSERVATION, STATUS
from tuner.search.parameters import params_of
from tuner.search.proxy.proxy_trials import Proxy, proxy_of
from tuner.storage.history import make_tables, past_of
from tuner.storage.opening import open_store, storage_errors
from tuner.storage.stored_studies import StoredStudies

POLL_S = 0.5


@dataclass(slots=True)
class LogFollower:
    """Follower of a log that a trial writes.

    Attributes:
        backend: Backend of the trial, which knows its log's place.
        number: Number of the trial.
        tell: Function that is told what is new.
        told: Bytes that were told.
    """

    backend: AbstractBackend
    number: int
    tell: Callable[[str], None]
    told: int = 0
    _old: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Remember the logs of earlier trials of this number."""
        self._old = {(str(path), path.stat().st_ino) for path in self._paths()}

    def _paths(self) -> tuple[Path, ...]:
        return self.backend.kept_logs().get(self.number, ())

    def follow(self) -> None:
        """Tell what the first host has printed since."""
        for path in self._paths()[:1]:
            if (str(path), path.stat().st_ino) in self._old:
                return
            with open_input(path) as file:
                file.seek(self.told)
                read = file.read()
            whole = read[: read.rfind(b"\n") + 1]
            self.told += len(whole)
            if whole:
                self.tell(whole.decode(errors="replace"))


def run_single(
    prepared: Prepared,
    config: ParallelConfig,
    *,
    tell_log: Callable[[str], None],
    tell: Callable[[str], None],
    ray_address: str | None = None,
    proxy: Proxy | None = None,
) -> Observation:
    """Run one trial and return its observation.

    Args:
        prepared: Study of the trial.
        config: Configuration that is measured.
        tell_log: Function that is told what the trial prints, as it comes.
        tell: Function that is told notes on how it runs.
        ray_address: Address of the Ray cluster that runs it; None takes RAY_ADDRESS, or starts Ray here.
        proxy: Smaller job that runs in place of the configuration; None runs it at full size.

    Raises:
        ConfigError: No trial can run.
    """
    number = num_trials(prepared)
    with temporary_folder("the log of a trial") as folder:
        is_local = (ray_address or os.environ.get("RAY_ADDRESS") or "local") == "local"
        backend, measured = starting(prepared, config, proxy)
        backend = backend.keeping_logs(folder) if is_local else backend
        follower = LogFollower(backend=backend, number=number, tell=tell_log)
        with _executor(prepared, backend, tell, ray_address) as running:
            if running.slots_note:
                tell(running.slots_note)
            running.submit(number, measured, None)
            was_queued = False
            while not (ended := running.poll(POLL_S)):
                follower.follow()
                if running.queued and not was_queued:
                    tell("waiting in the queue")
                was_queued = bool(running.queued)
            follower.follow()
        observation = ended[0][1]
        if not follower.told and observation.log_tail:
            tell_log(observation.log_tail.rstrip("\n") + "\n")
        return observation


def starting(prepared: Prepared, config: ParallelConfig, proxy: Proxy | None) -> tuple[AbstractBackend, ParallelConfig]:
    """Return the backend that runs a trial, with the configuration that it measures: the proxy's, if there is one."""
    if proxy is None:
        return prepared.backend, config
    return prepared.backend.reduced(proxy.reduction), proxy.config


def smaller_job(prepared: Prepared, config: ParallelConfig) -> Proxy:
    """Return the smaller job that the study runs in place of a configuration.

    Raises:
        ConfigError: The study has no smaller jobs, or none of this configuration fits.
    """
    options, problem = prepared.request.trials.proxy, prepared.problem
    if options is None:
        raise ConfigError("needs smaller jobs", key="--proxy", nearest="trial.proxy: {hosts: 2} in the study")
    found = proxy_of(config, problem.setting, options, problem.options)
    if found is None:
        raise ConfigError(
            f"has no smaller job of this configuration that fits on {options.hosts} hosts",
            key="--proxy",
            value=str(config),
            nearest="more hosts in trial.proxy.hosts",
        )
    return found


def predict_proxy(prepared: Prepared, proxy: Proxy) -> float:
    """Return the step time that the cost model predicts for a smaller job [s]."""
    grid = ConfigGrid.from_configs([proxy.config])
    return float(estimate_step(proxy.setting(prepared.problem.setting), grid).step_time_s[0])


def _executor(
    prepared: Prepared, backend: AbstractBackend, tell: Callable[[str], None], ray_address: str | None
) -> RayExecutor:
    request = prepared.request
    return RayExecutor(
        backend,
        parallel_trials=1,
        study=request.name,
        time_limit_s=request.trials.time_limit_s,
        address=ray_address,
        placement_wait_s=request.search.placement_wait_s,
        on_note=tell,
        uninterrupted=interrupts_held,
    )


def num_trials(prepared: Prepared) -> int:
    """Return the number of trials that the study holds, which is that of the next one."""
    study = StoredStudies(prepared.request.storage).find(prepared.request.name)
    return 0 if study is None else len(study.get_trials(deepcopy=False))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """Place of a trial in its study.

    Attributes:
        prepared: Study.
        tasks: Tasks that its trials may have.
        position: Position of the trial's candidate; None if the study searches no such candidate.
        hindrance: Reason why the study cannot keep the trial; empty if it can.
    """

    prepared: Prepared
    tasks: Tasks
    position: int | None
    hindrance: str = ""

    def keep(self, observation: Observation, proxy: Proxy | None = None) -> int:
        """Keep a trial that has ended, or that of a smaller job in its place, and return its number in the study.

        Raises:
            ConfigError: Another process is running the study, its trials mean something else, or the database fails.
        """
        assert self.position is not None, "only a candidate is kept"
        request = self.prepared.request
        with storage_errors(request.storage):
            store = open_store(request.storage)
            make_tables(store)
            study = open_study(self.prepared, self.tasks.sampler, store.storage)
            keep_baseline(study, reference_among(self.prepared))
            held = claim(store, request.name, now_s=time.time())
            try:
                ledger = Ledger(self.tasks, held, study)
                params = params_of(self.tasks.sampler.choices.values(self.position))
                # with its observation from the first, as a measurement that the study file states
                known = {STATUS: observation.status.value, OBSERVATION: observation.as_json()}
                number, _, _ = ledger.create(Task(position=self.position, proxy=proxy), params, known)
                ledger.record(number, observation)
            finally:
                held.release()
        return number


def place_of(prepared: Prepared, config: ParallelConfig, tell: Callable[[str], None]) -> Place:
    """Return the place that a trial of a configuration has in the study; finding it predicts all candidates."""
    request, problem = prepared.request, prepared.problem
    sampler = make_sampler(prepared, past_of(request), on_note=tell)
    wanted = problem.with_knobs(config)
    position = sampler.position_of(params_of(wanted.values(problem.dimensions)))
    if position is not None and sampler.choices.config(position) != wanted:
        position = None  # it differs in a dimension that the study does not search
    hindrance = "" if position is not None else "it is no candidate that the study searches"
    return Place(
        prepared=prepared,
        tasks=Tasks(prepared=prepared, sampler=sampler),
        position=position,
        hindrance=hindrance or _hindrance_of(prepared),
    )


def _hindrance_of(prepared: Prepared) -> str:
    """Return why the stored study cannot take a trial now; empty if it can."""
    study = StoredStudies(prepared.request.storage).find(prepared.request.name)
    if study is None:
        return ""
    if is_running(study):
        return "another process is running the study, and both may share devices"
    try:
        check_meaning(prepared.request, study)
    except ConfigError as error:
        return str(error.rule)
    return ""
