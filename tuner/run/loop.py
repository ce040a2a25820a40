"""Loop of one study: keep the trial slots busy, record the results, and stop by itself.

The loop asks and tells through the hooks of the study's Optuna sampler, as `study.optimize` does, and adds durable
transactions. A trial passes five points. It is asked for: its candidate's dimensions are parameters, its prediction an
attribute. It is submitted to the executor. It is followed: its first steps are intermediate values, and it is stopped
where they are clearly slower than the best. It is observed: the observation is an attribute. It is told to Optuna.

A driver that dies leaves trials behind at any of these points, and one that ends in order lets those that it has not
told wait. The next one adopts them under their own numbers: it closes a trial without a candidate, tells one with an
observation, and submits the others again. So nothing that was observed is lost, and no candidate is finished twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from optuna.trial import FrozenTrial, TrialState, create_trial

from costmodels.job.parallel_config import ParallelConfig, Value
from costmodels.job.proxy_job import Reduction
from trials.backend import Observation, Status
from trials.on_ray.executor import RayExecutor
from tuner.answers.candidates import Candidates, candidates_of, plan_of, prediction_json
from tuner.answers.comparison import Comparison, comparison_of
from tuner.answers.device_time import HOUR_S, device_time_of
from tuner.answers.planned_candidates import as_stored, plan_layers
from tuner.answers.reference import Reference, keep_baseline, reference_among, reference_of
from tuner.run.alike_failures import alike_failures
from tuner.run.driver import Claim, claim, interrupts_held
from tuner.run.executor import Executor
from tuner.run.memory_limit import hold_to_limit
from tuner.run.opening import Opening, Why, reason_for
from tuner.run.own_trials import DrivenStudy, OwnTrials
from tuner.run.progress import Progress, RunResult
from tuner.run.rescue import Remembered, rescued
from tuner.run.spending import HARD_BUDGETS, Spending
from tuner.run.studies import make_pruner, make_sampler, open_study
from tuner.search.constraints import MEMORY_ATTRIBUTE, memory_excess
from tuner.search.gain import GAIN, gain_in
from tuner.search.observations import FAILS_ALIKE, OBSERVATION, STATUS, observation_of
from tuner.search.parameters import ASSIGNMENT, params_of, values_of
from tuner.search.population import ENDED, P_STAR
from tuner.search.prior import ignore_progress
from tuner.search.proxy.extrapolation import extrapolated_of
from tuner.search.proxy.proxy_plan import ProxyPlan
from tuner.search.proxy.proxy_trials import PROXY, Proxy
from tuner.search.pruning import StepReports, reported_steps
from tuner.search.sampler import ThompsonSampler
from tuner.search.stopping import StopReason
from tuner.search.waiting import SLOTS, Slots, Wait
from tuner.storage.history import Past, keep_run, make_tables, past_of
from tuner.storage.opening import open_store, storage_errors
from tuner.storage.record import HISTORY, LAYER_PLANS, OWN_PLANS, PREDICTION, SPENT_S, STOP_REASON, TrialRecord
from tuner.storage.store import AbstractStore
from tuner.storage.stored_studies import StoredStudies
from tuner.storage.stored_values import check_new_trial, storable
from tuner.study_file.config import StudyConfig
from tuner.subject.contract import Ability

POLL_S = 1.0

Asked = tuple[int, ParallelConfig, Reduction | None]
"""Trial that is to run: its number and its candidate, or a proxy's configuration and the smaller job."""


HostsNow = Callable[[Executor, float], tuple[int, ...] | None]
"""Function that returns the hosts of the whole cluster that are there, given the executor and the time that the study
has run [s]; None if nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Hosts that a study needs.

    Attributes:
        hosts: Hosts of the study; the run ends when some are lost, or when others come back.
        now: Function that returns the hosts that are there.
    """

    hosts: tuple[int, ...]
    now: HostsNow


def run_study(
    config: StudyConfig,
    *,
    on_progress: Callable[[Progress], None] = ignore_progress,
    ray_address: str | None = None,
    executor: AbstractContextManager[Executor] | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    expected: Expected | None = None,
) -> RunResult:
    """Run the study until it stops, continuing what the storage already holds.

    Args:
        config: Study to run.
        on_progress: Function that is told the progress of the run, at least once per poll.
        ray_address: Address of the Ray cluster that runs the trials; None takes RAY_ADDRESS, or starts Ray here.
        executor: Executor that runs the trials in place of Ray; entered only if there is something to run.
        clock: Clock of the run's duration [s]; nobody sets it.
        wall_clock: Seconds since the epoch, for other hosts; it may be set at any time.
        expected: Hosts that the study needs; None if it need not look after them.

    Raises:
        ConfigError: Nothing fits, the stored study means something else, another process is running it, or the
            database fails.
        StorageLostError: The storage's file was lost; what was measured is kept beside it.
    """
    config = plan_layers(config, StoredStudies(config.storage))
    candidates = candidates_of(config)
    if not len(candidates.space.grid):
        removed = max(candidates.space.removed.items(), key=lambda entry: entry[1], default=("", 0))
        none_left = f"no configuration is left; {removed[0]} removed the most: see `meshtune space`"
        return RunResult(stop_reason=StopReason.EXHAUSTED, warnings=(none_left, *candidates.space.warnings))

    def tell(note: str) -> None:
        on_progress(Progress(done=0, running=0, budget=config.search.max_trials, note=note))

    if executor is None:
        executor = RayExecutor(
            config.backend,
            parallel_trials=config.search.parallel_trials,
            time_limit_s=config.time_limit_s,
            address=ray_address,
            placement_wait_s=config.search.placement_wait_s,
            share_hosts=config.search.share_hosts,
            on_note=tell,
            uninterrupted=interrupts_held,
        )
    past = past_of(config)
    sampler = make_sampler(config, candidates, past, on_note=tell)
    with storage_errors(config.storage):
        store = open_store(config.storage)
        make_tables(store)
        study = open_study(config, sampler, store.storage)
        keep_baseline(study, reference_among(config, candidates))
        if config.layer_plans.keys() > study.user_attrs.get(LAYER_PLANS, {"plans": {}})["plans"].keys():
            study.set_user_attr(LAYER_PLANS, as_stored(config))
        if (kept := config.subject.as_stored()) and OWN_PLANS not in study.user_attrs:
            study.set_user_attr(OWN_PLANS, kept)
        held = claim(store, config.name, now_s=wall_clock(), on_note=tell)
        try:
            # past Optuna's cache, which would keep all that was ever read
            trials = OwnTrials(
                store.storage.get_all_trials(study._study_id, deepcopy=False),
                config.dimensions,
                sampler,
                lambda record: device_time_of(config, [record]).device_s,
            )
            ended = [(each.number, each.observation) for each in trials.records if each.finished and each.observation]
            run = _Run(
                config=config,
                candidates=candidates,
                sampler=sampler,
                store=store,
                held=held,
                study=DrivenStudy(study, trials),
                trials=trials,
                past=past,
                reference=reference_of(config, study),
                spending=Spending(config.search, occupies_devices=config.backend.trains),
                reports=StepReports(study=study, pruner=make_pruner(config)) if config.search.prune else None,
                expected=expected,
                ended=ended,
            )
        except KeyboardInterrupt:  # reading a large study takes seconds
            held.release()
            raise
        with rescued(config.storage, config.file, run.remember):
            stop_reason = _drive(run, executor, on_progress, clock, wall_clock)
        best = trials.best
        return RunResult(
            records=trials.records,
            best=best,
            extrapolated=None if best else extrapolated_of(run.study.user_attrs),
            stop_reason=stop_reason,
            fails_alike=tuple(run.fails_alike),
            p_star=float(run.study.user_attrs.get(P_STAR, 0.0)),
            num_candidates=sampler.choices.num_candidates,
            warnings=(*candidates.space.warnings, *past.warnings, *_warn_of_wide(sampler.proxies)),
            reference=run.reference,
            gain=gain_in(run.study.user_attrs),
            hosts=tuple(run.hosts) if stop_reason is StopReason.HOSTS else (),
        )


def _warn_of_wide(proxies: ProxyPlan | None) -> tuple[str, ...]:
    """Return a warning of the candidates that no proxy can be run for, if there are any."""
    if proxies is None or not proxies.num_too_wide:
        return ()
    return (
        f"{proxies.num_too_wide:,} of {len(proxies.grid):,} candidates are tried at full size only: their tp*cp*up is "
        f"more than the devices of the {proxies.options.hosts} hosts that trial.proxy allows",
    )


def _drive(
    run: _Run,
    executor: AbstractContextManager[Executor],
    on_progress: Callable[[Progress], None],
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> StopReason:
    """Ask, submit, poll and record until there is a reason to stop, then give the claim up.

    It is given up before the executor ends, which takes seconds. Steps that write more than one thing are not
    interrupted half-way; only a kill can do that, and `_Run.adopt` mends it.
    """
    started_s = clock() - float(run.study.user_attrs.get(SPENT_S, 0.0))
    stop_reason = StopReason.INTERRUPTED

    def give_up() -> None:
        with interrupts_held():
            run.give_up(stop_reason, clock() - started_s)

    try:
        with ExitStack() as last, ExitStack() as first:
            first.callback(give_up)
            with interrupts_held():
                todo = run.adopt()
                run.count_measured()
            reason = run.reason_to_stop(clock() - started_s)
            if not (todo := run.keep(todo, reason)) and reason is not None:
                stop_reason = reason
                return stop_reason
            with run.held.together():
                # told now, because a driver that is killed cannot
                run.study.set_user_attr(STOP_REASON, StopReason.INTERRUPTED.value)
                if run.past.in_words != run.study.user_attrs.get(HISTORY, ""):
                    run.study.set_user_attr(HISTORY, run.past.in_words)
            on_progress(run.progress(clock() - started_s, opening=run.opening(todo)))
            left_over = run.end_left_over()
            running = last.enter_context(executor)
            first.callback(run.end_left_over)
            notes = "; ".join(filter(None, (run.past.in_words, left_over, running.slots_note)))
            on_progress(run.progress(clock() - started_s, note=notes))
            while True:
                if run.held.renew(now_s=wall_clock()):
                    with run.held.together():
                        run.study.set_user_attr(SPENT_S, clock() - started_s)
                moves = run.hosts_changed(running, elapsed_s := clock() - started_s)
                reason = StopReason.HOSTS if moves else run.reason_to_stop(elapsed_s)
                todo = run.keep(todo, reason)
                reason = _fill_slots(run, running, todo, reason, lambda: clock() - started_s)
                if reason is not None and run.is_over(moves=moves, waits=bool(todo), pending=running.pending):
                    stop_reason = reason
                    break
                ended = running.poll(POLL_S)
                with interrupts_held():
                    for number, observation in ended:
                        run.record(number, observation)
                    run.end_early(running, clock() - started_s)
                records = run.trials.records_of(number for number, _ in ended)
                on_progress(run.progress(clock() - started_s, ended=records, queued=running.queued))
    except KeyboardInterrupt:
        stop_reason = StopReason.INTERRUPTED
    return stop_reason


def _fill_slots(
    run: _Run, running: Executor, todo: list[Asked], reason: StopReason | None, elapsed_s: Callable[[], float]
) -> StopReason | None:
    """Start trials on free slots until there is a reason to stop or to wait; return the reason to stop.

    Trials in `todo` come first, and start unless the hosts have changed; those that start leave the list.
    """
    while running.num_free_slots and reason is not StopReason.HOSTS and (todo or reason is None):
        with interrupts_held():
            asked = run.again(todo.pop(0)) if todo else run.ask()
        if isinstance(asked, Wait):
            break
        running.submit(*asked)
        reason = run.reason_to_stop(elapsed_s())
    run.look_at_slots(running, reason)
    return reason


@dataclass(frozen=True, kw_only=True, slots=True)
class _Live:
    """Trial that has not ended.

    Attributes:
        trial_id: Identifier of the trial in Optuna's storage.
        position: Position of its candidate; None if it never got one.
        proxy: Proxy that it runs in place of the candidate.
    """

    trial_id: int
    position: int | None
    proxy: Proxy | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Run:
    """Work of one driver on one study.

    Attributes:
        study: Study whose reads are answered from memory: while the claim holds, nobody else writes.
        trials: Trials of the study.
        expected: Hosts that the study needs; None if it does not look after them.
        hosts: Hosts that were there at the last look.
        live: Trials that have not ended, by number.
        ended: Numbers and observations of trials that have ended, in the order of their ends, as far as this driver
            knows it.
        fails_alike: Numbers of the trials that failed alike up to the last one that this driver recorded, if that shows
            that the command fails whatever the layout.
        spending: What the trials in flight take of the budgets.
        slots: Trial slots at the last look, as the only entry.
    """

    config: StudyConfig
    candidates: Candidates
    sampler: ThompsonSampler
    store: AbstractStore
    held: Claim
    study: DrivenStudy
    trials: OwnTrials
    past: Past
    reference: Reference | None
    spending: Spending
    reports: StepReports | None
    expected: Expected | None = None
    hosts: list[int] = field(default_factory=list)
    slots: list[Slots] = field(default_factory=lambda: [Slots()])
    live: dict[int, _Live] = field(default_factory=dict)
    ended: list[tuple[int, Observation]] = field(default_factory=list)
    fails_alike: list[int] = field(default_factory=list)

    def adopt(self) -> list[Asked]:
        """Settle the trials that an earlier driver left running; return those that must run again."""
        again = []
        for trial in self.trials.running:
            if trial.state == TrialState.WAITING and PREDICTION in trial.user_attrs:  # given up
                with self.held.together():
                    self.store.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
                trial.state, trial.datetime_start = TrialState.RUNNING, datetime.now()
            if trial.state != TrialState.RUNNING:  # enqueued by somebody else
                continue
            position = self.sampler.position_of(trial.params) if self.trials.has_candidate(trial) else None
            stored = trial.user_attrs.get(PROXY)
            proxy = Proxy.from_json(stored) if stored else None
            self.live[trial.number] = _Live(trial_id=trial._trial_id, position=position, proxy=proxy)
            if (observation := observation_of(trial)) is not None:
                with self.held.together():
                    self._keep_run(trial.number, observation)
                self._tell(trial.number, observation)
            elif position is None:
                self.record(
                    trial.number,
                    Observation(
                        status=Status.CANCELLED,
                        reason="its driver died before the trial had a candidate of the study",
                        origin=self.config.backend.origin,
                    ),
                )
            else:
                if PREDICTION not in trial.user_attrs:  # its driver, of an earlier version, died just then
                    proxy = self.sampler.proxy_for(self.trials.observations(but=trial.number), position)
                    self.live[trial.number] = replace(self.live[trial.number], proxy=proxy)
                    with self.held.together():
                        for key, value in self._describe(position, proxy).items():
                            self.store.storage.set_trial_user_attr(trial._trial_id, key, value)
                            trial.set_user_attr(key, value)
                again.append(self._as_task(trial.number, position, proxy))
        return again

    def hosts_changed(self, running: Executor, elapsed_s: float) -> bool:
        """Return whether other hosts are there than the study expects."""
        there = None if self.expected is None else self.expected.now(running, elapsed_s)
        if self.expected is None or not there or there == self.expected.hosts:
            return False
        self.hosts[:] = there
        return True

    def is_over(self, *, moves: bool, waits: bool, pending: Sequence[int]) -> bool:
        """Return whether a run that has a reason to stop has nothing to wait for.

        Trials that lost their hosts are left as by a driver that dies: they run again when the hosts are back.

        Args:
            moves: Whether it stops because of its hosts.
            waits: Whether a trial of an earlier run waits for a slot.
            pending: Numbers of the trials that run.
        """
        if not moves:
            return not pending and not waits
        assert self.expected is not None, "a run that looks after its hosts expects some"
        return not pending or not {*self.hosts} >= {*self.expected.hosts}

    def give_up(self, stop_reason: StopReason, spent_s: float) -> None:
        """Give the study up, if this driver has it: trials that have not ended wait for the next driver."""
        if self.held.is_lost:
            return
        if stop_reason is not StopReason.INTERRUPTED:  # who interrupts does not wait
            self.keep_gain()
        with self.held.together():
            for live in self.live.values():
                self.store.storage.set_trial_state_values(live.trial_id, TrialState.WAITING)
            self.study.set_user_attr(STOP_REASON, stop_reason.value)
            self.study.set_user_attr(SPENT_S, spent_s)
        self.held.release()

    def end_left_over(self) -> str:
        """End what trials without a driver have left on other machines; return a note on it, or nothing."""
        ended = 0 if self.held.is_lost else self.config.backend.end_left_over()
        return f"ended {ended} job{'s' * (ended != 1)} that an earlier run of this study had left" if ended else ""

    def count_measured(self) -> None:
        """Count the measurement of the current configuration that the study file states as a trial, once."""
        observation, current = self.config.current_observation, self.config.current
        if observation is None or current is None:
            return
        if any(record.observation and record.observation.taken_from for record in self.trials.records):
            return
        params = params_of(current.values(self.config.dimensions))
        position = self.sampler.position_of(params)
        assert position is not None, "the current configuration is always a candidate"
        # with its observation from the first: a driver that dies here leaves a trial that needs no devices
        known = {STATUS: observation.status.value, OBSERVATION: observation.as_json()}
        number, _, _ = self._create(params, position, None, known)
        self.record(number, observation)

    def again(self, asked: Asked) -> Asked:
        """Return a trial that must run again, if this driver still holds the claim."""
        with self.held.together():
            return asked

    def look_at_slots(self, running: Executor, reason: StopReason | None) -> None:
        """Note how many slots there are, and why some are idle: for `reason`, or because the sampler waits."""
        idle = running.num_free_slots
        why = ""
        if idle and running.pending:
            why = reason.sentence if reason else self.sampler.waits(self.trials.observations()) or ""
        now = Slots(count=idle + len(running.pending), why=why)
        if now != self.slots[-1]:
            self.slots[:] = [now]
            with self.held.together():
                self.study.set_user_attr(SLOTS, asdict(now))

    def ask(self) -> Asked | Wait:
        """Return the next trial, or why it is better to wait for one that runs.

        The trial is written with its candidate and all its attributes at once: there are no halves of a trial.
        """
        observations = self.trials.observations()
        if (wait := self.sampler.waits(observations)) is not None:
            return wait
        empty = create_trial(state=TrialState.RUNNING)
        params = self.sampler.sample_relative(self.study, empty, self.sampler.search_space)
        position = self.sampler.position_of(params)
        assert position is not None, "the sampler names candidates only"
        return self._create(params, position, self.sampler.proxy_for(observations, position), {})

    def _create(self, params: Mapping[str, Any], position: int, proxy: Proxy | None, known: Mapping[str, Any]) -> Asked:
        """Write a trial of a candidate with its prediction and the attributes `known`, and begin it."""
        trial = create_trial(
            state=TrialState.RUNNING,
            params=dict(params),
            distributions=self.sampler.search_space,
            user_attrs=self._describe(position, proxy) | dict(known),
        )
        with self.held.together():
            trial_id = self.store.storage.create_new_trial(self.study._study_id, trial)
            trial._trial_id = trial_id
            self.sampler.before_trial(self.study, trial)
        trial.number = number = self._number_of(trial_id)
        self.trials.begin(trial)
        self.live[number] = _Live(trial_id=trial_id, position=position, proxy=proxy)
        return self._as_task(number, position, proxy)

    def _number_of(self, trial_id: int) -> int:
        """Return the number of a trial that was just written: the next one, unless somebody has enqueued others."""
        storage, number = self.store.storage, self.trials.next_number
        if storage.get_trial_id_from_study_id_trial_number(self.study._study_id, number) == trial_id:
            return number
        return storage.get_trial_number_from_id(trial_id)

    def _as_task(self, number: int, position: int, proxy: Proxy | None) -> Asked:
        if proxy is not None:
            return number, proxy.config, proxy.reduction
        return number, self.sampler.choices.config(position), None

    def _describe(self, position: int, proxy: Proxy | None) -> dict[str, Any]:
        """Return the attributes of a trial: its proxy, and the prediction of its candidate."""
        estimate, memory = self.candidates.estimate, self.candidates.space.memory
        prediction = prediction_json(self.config, estimate, memory, self.sampler.choices.layout_of(position))
        chosen = self.sampler.choices.config(position)
        attributes: dict[str, Any] = {PREDICTION: prediction | plan_of(self.config, chosen)}
        if proxy is not None:
            attributes[PROXY] = proxy.as_json()
        if chosen.assignment:
            attributes[ASSIGNMENT] = str(chosen.assignment)
        check_new_trial(attributes)
        return attributes

    def record(self, number: int, observation: Observation) -> None:
        """Keep the observation, then end the trial: a driver that dies in between has lost nothing."""
        observation = storable(observation)
        live = self.live[number]
        trial_id = live.trial_id
        storage, ran = self.store.storage, observation  # later studies learn from what ran, whatever this one allows
        if live.position is not None and live.proxy is None:
            layout = self.sampler.choices.layout_of(live.position)
            capacity_bytes = float(self.candidates.space.memory.capacity_bytes[layout])
            observation = hold_to_limit(observation, capacity_bytes, self.config.limits.free_memory)
        excess = self._memory_excess(live.position, live.proxy, observation)
        self.ended.append((number, replace(observation, operator_samples=(), log_tail="")))
        self.fails_alike[:] = alike_failures(self.ended)
        excuses = {FAILS_ALIKE: list(self.fails_alike)} if self.fails_alike else {}
        with self.held.together():
            storage.set_trial_user_attr(trial_id, STATUS, observation.status.value)
            storage.set_trial_user_attr(trial_id, OBSERVATION, observation.as_json())
            for key, value in excuses.items():
                storage.set_trial_user_attr(trial_id, key, value)
            if excess is not None:
                storage.set_trial_system_attr(trial_id, MEMORY_ATTRIBUTE, excess)
            self._keep_run(number, ran)
        self.trials[number].user_attrs.update({STATUS: observation.status.value, OBSERVATION: observation, **excuses})
        self._tell(number, observation)

    def _memory_excess(
        self, position: int | None, proxy: Proxy | None, observation: Observation | None
    ) -> float | None:
        """Return the constraint of a trial at full size; None for proxies, whose peak is that of a smaller job."""
        if position is None or proxy is not None or observation is None:
            return None
        layout = self.sampler.choices.layout_of(position)
        return memory_excess(observation, float(self.candidates.space.memory.capacity_bytes[layout]))

    def _keep_run(self, number: int, observation: Observation) -> None:
        """Keep the run of a trial for later studies too."""
        live = self.live[number]
        self._keep_run_in(self.store, number, observation, live.position, live.proxy)

    def _keep_run_in(
        self, store: AbstractStore, number: int, observation: Observation, position: int | None, proxy: Proxy | None
    ) -> None:
        if position is None or not self.config.subject.has(Ability.HISTORY):
            return
        setting, config = self.config.setting, self.sampler.choices.config(position)
        if config.knobs != self.config.with_knobs(replace(config, knobs=())).knobs:
            return  # other studies learn from layouts with today's knobs
        if proxy is not None:
            setting, config = proxy.setting(setting), proxy.config
        keep_run(store, self.study.study_name, number, setting, config, observation)

    def remember(self) -> Remembered:
        """Return the study as this driver remembers it."""
        known = {record.number: record for record in self.trials.records}
        order = [number for number, _ in self.ended]
        observations = dict(self.ended)

        def place_of(number: int) -> tuple[int | None, Proxy | None]:
            record = known.get(number)
            return (
                (None, None) if record is None else (self.sampler.position_of(params_of(record.params)), record.proxy)
            )

        def describe(trial: FrozenTrial) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
            position, proxy = place_of(trial.number)
            ended = {ENDED: order.index(trial.number)} if trial.number in observations else {}
            if position is None:
                return ended, {}
            excess = self._memory_excess(position, proxy, observations.get(trial.number))
            system = {} if excess is None else {MEMORY_ATTRIBUTE: excess}
            return {**ended, **self._describe(position, proxy), P_STAR: known[trial.number].p_star}, system

        return Remembered(
            store=self.store,
            name=self.study.study_name,
            attributes=self.study.user_attrs,
            trials=self.trials.all,
            observations=observations,
            describe=describe,
            keep_run=lambda store, number, observation: self._keep_run_in(
                store, number, observation, *place_of(number)
            ),
        )

    def hopeless(self, running: Mapping[int, tuple[float, ...]]) -> Mapping[int, str]:
        """Return the running trials to stop, with the reason, by number, and keep their first steps on the way."""
        if self.reports is None or not any(running.values()):
            return {}
        known = {number: self.trials[number] for number in running}
        return self.reports.hopeless(running, known, self.trials.best_trial, self.held.together)

    def _tell(self, number: int, observation: Observation) -> None:
        """End a trial for Optuna; its values are those of a step at full size, which a proxy does not measure."""
        live = self.live.pop(number)
        state, values = TrialState.FAIL, None
        if observation.step_time_s is not None and live.proxy is None:
            assert live.position is not None, "only a trial with a candidate completes"
            state, values = TrialState.COMPLETE, self.sampler.values_of(live.position, observation)
        elif observation.status == Status.PRUNED or observation.step_time_s is not None:
            # a pruned trial's value is what it reported last, as Optuna has it
            state, values = TrialState.PRUNED, reported_steps(self.trials[number])[-1:] or None
        trial = self.trials[number]
        with self.held.together():
            self.sampler.after_trial(self.study, trial, state, values)
            self.store.storage.set_trial_state_values(trial._trial_id, state, values)
        self.trials.end(number, state, values, self.study.user_attrs[P_STAR])
        best, known = self.trials.best, gain_in(self.study.user_attrs)
        is_of_reference = any(self._is_reference(record.params) for record in self.trials.records_of([number]))
        if best is not None and (is_of_reference or known is None or known.best != best.params):
            self.keep_gain()

    def _is_reference(self, values: Mapping[str, Value]) -> bool:
        return self.reference is not None and dict(self.reference.values) == dict(values)

    def keep_gain(self) -> None:
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
        found = self.sampler.gain(observations, best.params, values)
        with self.held.together():
            self.study.set_user_attr(GAIN, None if found is None else found.as_json())

    def keep(self, todo: list[Asked], reason: StopReason | None) -> list[Asked]:
        """Return the trials that are to run again: none once a budget is spent, which cancels them."""
        if reason is None or reason not in HARD_BUDGETS:
            return todo
        origin = self.config.backend.origin
        with interrupts_held():
            for number, _, _ in todo:
                self.record(number, Observation(status=Status.CANCELLED, reason=reason.sentence, origin=origin))
        return []

    def end_early(self, running: Executor, elapsed_s: float) -> None:
        """End running trials that are clearly slower than the best, and all of them once a budget is spent."""
        for number, reason in self.hopeless(running.reported).items():
            running.stop(number, reason)
        self.spending.look(running, elapsed_s, self.trials.device_s, self._devices_of)
        if self.spending.used_up is not None:
            for number in running.pending:
                running.cancel(number, self.spending.used_up.sentence)

    def _devices_of(self, number: int) -> int:
        """Return how many devices a trial in flight occupies."""
        proxy = self.live[number].proxy
        return proxy.config.num_devices if proxy else self.config.cluster.num_devices

    def reason_to_stop(self, elapsed_s: float) -> StopReason | None:
        """Return the reason to ask for no further trial, or None; confidence waits for the trials in flight."""
        if self.fails_alike:
            return StopReason.FAILS_ALIKE
        if self.spending.used_up is not None:
            return self.spending.used_up
        budgets = self.spending.left(elapsed_s, self.trials.device_s)
        return self.sampler.decide(self.trials.observations(), budgets).reason

    def opening(self, todo: Sequence[Asked]) -> Opening:
        """Return the trial that comes first: the first one of `todo`, or else the sampler's choice."""
        choices, observations = self.sampler.choices, self.trials.observations()
        if todo:
            live = self.live[todo[0][0]]
            assert live.position is not None, "only trials with a candidate run again"
            position, why, proxy = live.position, Why.LEFT_OVER, live.proxy
        else:
            position = self.sampler.choose(observations)
            why = reason_for(position, choices.values(position), self.sampler, observations, self.reference)
            proxy = self.sampler.proxy_for(observations, position)
        predicted_s = float(self.candidates.estimate.step_time_s[choices.layout_of(position)])
        return Opening(values=choices.values(position), why=why, predicted_s=predicted_s, is_proxy=proxy is not None)

    def progress(
        self,
        elapsed_s: float,
        *,
        note: str = "",
        opening: Opening | None = None,
        ended: tuple[TrialRecord, ...] = (),
        queued: tuple[int, ...] = (),
    ) -> Progress:
        """Return the progress of the run, `elapsed_s` after its start [s], with what has not been told yet."""
        attributes, left = self.study.user_attrs, self.spending.left(elapsed_s, self.trials.device_s)
        in_flight = [trial for trial in self.trials.running if self.trials.has_candidate(trial)]
        running = [trial for trial in in_flight if trial.number not in queued]
        return Progress(
            done=self.trials.num_ended,
            running=len(running),
            queued=len(in_flight) - len(running),
            slots=self.slots[-1],
            budget=self.config.search.max_trials,
            best=self.trials.best,
            ended=ended,
            compared=self._compared() if ended else None,
            layouts=tuple(values_of(trial) for trial in running),
            opening=opening,
            extrapolated=extrapolated_of(attributes),
            p_star=float(attributes.get(P_STAR, 0.0)),
            seconds_left=left.seconds_left,
            device_hours_left=left.device_hours_left,
            device_hours=self.trials.device_s / HOUR_S,
            by_status=dict(self.trials.by_status),
            note=note,
        )

    def _compared(self) -> Comparison | None:
        values = None if self.reference is None else self.reference.values
        return comparison_of(self.reference, self.trials.records_to_compare(values))
