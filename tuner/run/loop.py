"""Loop of one study: keep the trial slots busy, record the results, and stop by itself.

The loop asks and tells through the hooks of the study's Optuna sampler, as `study.optimize` does, and adds durable
transactions. `ledger.py` writes and remembers the trials, `adoption.py` takes over those of an earlier driver,
`budgets.py` has the reasons to stop, and `reporter.py` tells the progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from optuna.trial import TrialState, create_trial

from trials.backend import TrialAbility
from trials.on_ray.executor import RayExecutor
from tuner.answers.reference import keep_baseline, reference_among
from tuner.forecast.planned_candidates import as_stored
from tuner.forecast.prepared import Prepared
from tuner.run.adoption import adopt, count_measured
from tuner.run.budgets import RunBudgets
from tuner.run.driver import claim, interrupts_held
from tuner.run.executor import Executor
from tuner.run.hosts import Expected, HostWatch
from tuner.run.later_plans import LaterPlans
from tuner.run.ledger import Ledger
from tuner.run.progress import Progress, RunResult
from tuner.run.rehearsing import Rehearsals
from tuner.run.reporter import Reporter
from tuner.run.rescue import rescued
from tuner.run.spending import Spending
from tuner.run.studies import make_pruner, make_sampler, open_study, prepared_of
from tuner.run.tasks import Asked, Task, Tasks
from tuner.run.trackers.following import tracked
from tuner.search.gain import gain_in
from tuner.search.population import P_STAR
from tuner.search.prior import ignore_progress
from tuner.search.proxy.proxy_plan import ProxyPlan
from tuner.search.pruning import StepReports
from tuner.search.sampler import ThompsonSampler
from tuner.search.stopping import StopReason
from tuner.search.waiting import Wait
from tuner.storage.history import make_tables, past_of
from tuner.storage.opening import open_store, storage_errors
from tuner.storage.record import HISTORY, LAYER_PLANS, OWN_PLANS, SPENT_S, STOP_REASON, answer_of
from tuner.study_file.request import StudyRequest

POLL_S = 1.0

SETTLED = (StopReason.CONFIDENT, StopReason.EXHAUSTED)
"""Reasons to stop that no longer hold when there are more candidates."""


def run_study(
    study: StudyRequest | Prepared,
    *,
    on_progress: Callable[[Progress], None] = ignore_progress,
    ray_address: str | None = None,
    executor: AbstractContextManager[Executor] | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    expected: Expected | None = None,
    rehearsals_of: Callable[[Ledger], Rehearsals] = Rehearsals,
) -> RunResult:
    """Run the study until it stops, continuing what the storage already holds.

    Args:
        study: Study to run; its layers are planned here if they are not yet.
        on_progress: Function that is told the progress of the run, at least once per poll.
        ray_address: Address of the Ray cluster that runs the trials; None takes RAY_ADDRESS, or starts Ray here.
        executor: Executor that runs the trials in place of Ray; entered only if there is something to run.
        clock: Clock of the run's duration [s]; nobody sets it.
        wall_clock: Seconds since the epoch, for other hosts; it may be set at any time.
        expected: Hosts that the study needs; None if it need not look after them.
        rehearsals_of: Function that returns the rehearsals beside a run.

    Raises:
        ConfigError: Nothing fits, the stored study means something else, another process is running it, or the
            database fails.
        StorageLostError: The storage's file was lost; what was measured is kept beside it.
    """
    prepared = prepared_of(study)
    with tracked(prepared.request, on_progress) as told:
        return _run(prepared, told, ray_address, executor, clock, wall_clock, expected, rehearsals_of)


def _run(
    prepared: Prepared,
    on_progress: Callable[[Progress], None],
    ray_address: str | None,
    executor: AbstractContextManager[Executor] | None,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    expected: Expected | None,
    rehearsals_of: Callable[[Ledger], Rehearsals],
) -> RunResult:
    """Run a prepared study; see `run_study`."""
    request, candidates = prepared.request, prepared.candidates
    if not len(candidates.space.grid):
        removed = max(candidates.space.removed.items(), key=lambda entry: entry[1], default=("", 0))
        none_left = f"no configuration is left; {removed[0]} removed the most: see `meshtune space`"
        return RunResult(stop_reason=StopReason.EXHAUSTED, warnings=(none_left, *candidates.space.warnings))

    def tell(note: str) -> None:
        on_progress(Progress(done=0, running=0, budget=request.search.max_trials, note=note))

    if executor is None:
        executor = RayExecutor(
            prepared.backend_of_run,
            parallel_trials=request.search.parallel_trials,
            study=request.name,
            time_limit_s=request.trials.time_limit_s,
            address=ray_address,
            placement_wait_s=request.search.placement_wait_s,
            share_hosts=request.search.share_hosts,
            on_note=tell,
            uninterrupted=interrupts_held,
        )
    trains = TrialAbility.TRAINING in request.trials.backend.abilities
    past = past_of(request)
    sampler = make_sampler(prepared, past, on_note=tell)
    with storage_errors(request.storage):
        store = open_store(request.storage)
        make_tables(store)
        stored = open_study(prepared, sampler, store.storage)
        keep_baseline(stored, reference_among(prepared))
        if prepared.problem.layer_plans.keys() > stored.user_attrs.get(LAYER_PLANS, {"plans": {}})["plans"].keys():
            stored.set_user_attr(LAYER_PLANS, as_stored(prepared.problem))
        if (kept := prepared.problem.subject.as_stored()) and OWN_PLANS not in stored.user_attrs:
            stored.set_user_attr(OWN_PLANS, kept)
        held = claim(store, request.name, now_s=wall_clock(), on_note=tell)
        try:
            ledger = Ledger(Tasks(prepared=prepared, sampler=sampler), held, stored)
            budgets = RunBudgets(
                ledger=ledger,
                spending=Spending(request.search, occupies_devices=trains),
                reports=StepReports(study=ledger.study, pruner=make_pruner(prepared.problem))
                if request.search.prune
                else None,
            )
        except KeyboardInterrupt:  # reading a large study takes seconds
            held.release()
            raise
        hosts = HostWatch(expected)
        with rescued(request.storage, request.file, ledger):
            started_s = clock() - float(ledger.study.user_attrs.get(SPENT_S, 0.0))
            loop = Loop(
                ledger=ledger,
                budgets=budgets,
                reporter=Reporter(budgets, on_progress),
                hosts=hosts,
                past_in_words=past.in_words,
                elapsed_s=lambda: clock() - started_s,
                wall_clock=wall_clock,
                rehearsals=rehearsals_of(ledger),
                plans=LaterPlans(prepared, takes_turns=trains),
                sampler_of=lambda planned: make_sampler(planned, past, on_note=tell),
            )
            stop_reason = loop.drive(executor)
        attributes, tasks = ledger.study.user_attrs, ledger.tasks
        best, extrapolated = answer_of(ledger.trials.records, attributes)
        return RunResult(
            records=ledger.trials.records,
            best=best,
            extrapolated=extrapolated,
            stop_reason=stop_reason,
            fails_alike=ledger.fails_alike,
            p_star=float(attributes.get(P_STAR, 0.0)),
            num_candidates=tasks.sampler.choices.num_candidates,
            warnings=(*candidates.space.warnings, *past.warnings, *_warn_of_proxies(sampler.proxies)),
            prepared=tasks.prepared,
            reference=ledger.reference,
            gain=gain_in(attributes),
            hosts=hosts.others if stop_reason is StopReason.HOSTS else (),
        )


def _warn_of_proxies(proxies: ProxyPlan | None) -> tuple[str, ...]:
    """Return a warning of the candidates that no proxy can be run for, if there are any."""
    if proxies is not None and proxies.has_none and not proxies.options.full_trials:
        few = f"the {proxies.options.hosts} hosts of trial.proxy" if proxies.options.hosts > 1 else "one host"
        stage = "" if proxies.options.stage else "; with trial.proxy.stage: true one of their stages may run alone"
        return (f"no trial could run: on {few} no smaller job of the likely candidates has room{stage}",)
    if proxies is None or not proxies.num_too_wide:
        return ()
    what = "are tried at full size only" if proxies.options.full_trials else "are judged by predictions alone"
    stages = "one of their stages" if proxies.options.stage else "one of their stages, or two of a pipeline"
    return (
        f"{proxies.num_too_wide:,} of {len(proxies.grid):,} candidates {what}: the {proxies.options.hosts} hosts that "
        f"trial.proxy allows have fewer than the tp*cp*up devices of {stages}",
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loop:
    """Loop of one run of a study.

    Attributes:
        ledger: Trials of the study.
        budgets: Reasons to stop, and to end trials early.
        reporter: Reporter that tells the progress.
        hosts: Watch over the hosts that the study needs.
        past_in_words: Sentence on what the history taught; empty if there is none.
        elapsed_s: Function that returns the time that the study has run, in all its runs [s].
        wall_clock: Function that returns the seconds since the epoch.
        rehearsals: Rehearsals of candidates before their trials.
        plans: Plans that are made beside the trials.
        sampler_of: Function that returns the sampler of the study with other plans.
    """

    ledger: Ledger
    budgets: RunBudgets
    reporter: Reporter
    hosts: HostWatch
    past_in_words: str
    elapsed_s: Callable[[], float]
    wall_clock: Callable[[], float]
    rehearsals: Rehearsals
    plans: LaterPlans
    sampler_of: Callable[[Prepared], ThompsonSampler]

    def drive(self, executor: AbstractContextManager[Executor]) -> StopReason:
        """Ask, submit, poll and record until there is a reason to stop, then give the claim up; return the reason.

        It is given up before the executor ends, which takes seconds. Steps that write more than one thing are not
        interrupted half-way; only a kill can do that, and `adopt` mends it.
        """
        stop_reason = StopReason.INTERRUPTED

        def give_up() -> None:
            with interrupts_held():
                self.ledger.give_up(stop_reason, self.elapsed_s())

        try:
            with ExitStack() as last, ExitStack() as first:
                first.callback(self.plans.close)
                first.callback(give_up)
                with interrupts_held():
                    todo = adopt(self.ledger)
                    count_measured(self.ledger)
                reason = self.budgets.reason_to_stop(self.elapsed_s())
                if not (todo := self.budgets.allowed(todo, reason)) and reason is not None:
                    stop_reason = reason
                    return stop_reason
                # told now, because a driver that is killed cannot
                told = {STOP_REASON: StopReason.INTERRUPTED.value}
                if self.past_in_words != self.ledger.study.user_attrs.get(HISTORY, ""):
                    told[HISTORY] = self.past_in_words
                self.ledger.keep(told)
                first.callback(self.rehearsals.close)
                self.rehearsals.begin()
                self.plans.begin()
                self.reporter.tell(self.elapsed_s(), opening=self.reporter.opening(todo))
                left_over = self._end_left_over()
                running = last.enter_context(executor)
                first.callback(self._end_left_over)
                notes = "; ".join(filter(None, (self.past_in_words, left_over, running.slots_note)))
                self.reporter.tell(self.elapsed_s(), note=notes)
                stop_reason = self._keep_busy(running, todo)
        except KeyboardInterrupt:
            stop_reason = StopReason.INTERRUPTED
        return stop_reason

    def _keep_busy(self, running: Executor, todo: list[Asked]) -> StopReason:
        """Keep the slots busy until the run is over; return why it is. Trials in `todo` come first."""
        ledger = self.ledger
        while True:
            if ledger.claim.renew(now_s=self.wall_clock()):
                with ledger.claim.together():
                    ledger.study.set_user_attr(SPENT_S, self.elapsed_s())
            if (planned := self.plans.take()) is not None:
                self._go_on_with(planned, running)
            if self.plans.has_turn(POLL_S):
                continue
            moves = self.hosts.finds_others(running, elapsed_s := self.elapsed_s())
            reason = StopReason.HOSTS if moves else self.budgets.reason_to_stop(elapsed_s)
            todo = self.budgets.allowed(todo, reason)
            if not self.plans.is_due:
                reason = self._fill_slots(running, todo, reason)
            if self.plans.is_busy and reason in SETTLED and not running.pending:
                # what is planned may be faster than all that was tried
                self.plans.look(has_ended=True, runs=False)
                if (planned := self.plans.take(POLL_S)) is not None:
                    self._go_on_with(planned, running)
                continue
            if reason is not None and self._is_over(moves=moves, waits=bool(todo), pending=running.pending):
                return reason
            self.rehearsals.go_ahead()
            waits_for_rehearsal = self.rehearsals.is_busy and not running.pending
            ended = running.poll(0.0 if waits_for_rehearsal else POLL_S)
            self.rehearsals.look(POLL_S if waits_for_rehearsal else 0.0)
            while self.rehearsals.notes:
                self.reporter.tell(self.elapsed_s(), note=self.rehearsals.notes.pop(0))
            with interrupts_held():
                for number, observation in ended:
                    ledger.record(number, observation)
                self.budgets.end_early(running, self.elapsed_s())
                # what is recorded is told, too: a later run tells it no more
                records = ledger.trials.records_of(number for number, _ in ended)
                self.reporter.tell(self.elapsed_s(), ended=records, queued=running.queued)
            self.plans.look(has_ended=bool(ended), runs=bool(running.pending))

    def _go_on_with(self, prepared: Prepared, running: Executor) -> None:
        """Go on with the candidates of all plans."""
        tasks = Tasks(prepared=prepared, sampler=self.sampler_of(prepared))
        with interrupts_held():
            self.ledger.keep({LAYER_PLANS: as_stored(prepared.problem)})
            self.ledger.go_on_with(tasks)
            running.take(prepared.backend_of_run)
        note = f"all {len(prepared.problem.layer_plans)} shapes of layers are planned"
        self.reporter.tell(self.elapsed_s(), note="; ".join((note, *self.plans.notes)))

    def _fill_slots(self, running: Executor, todo: list[Asked], reason: StopReason | None) -> StopReason | None:
        """Start trials on free slots until there is a reason to stop or to wait; return the reason to stop.

        Trials in `todo` come first, and start unless the hosts have changed; those that start leave the list.
        """
        while running.num_free_slots and reason is not StopReason.HOSTS and (todo or reason is None):
            runs_again = bool(todo)
            with interrupts_held():
                asked = self._ask_again(todo.pop(0)) if todo else self.ask()
            if isinstance(asked, Wait):
                break
            running.submit(*asked)
            if not runs_again and (chosen := self.reporter.next_trial(asked[0])) is not None:
                self.reporter.tell(self.elapsed_s(), chosen=chosen)
            reason = self.budgets.reason_to_stop(self.elapsed_s())
        self.reporter.look_at_slots(running, reason)
        return reason

    def _ask_again(self, asked: Asked) -> Asked:
        """Return a trial that must run again, if this driver still holds the claim."""
        with self.ledger.claim.together():
            return asked

    def ask(self) -> Asked | Wait:
        """Return the next trial, written already, or why it is better to wait for one that runs."""
        sampler, observations = self.ledger.tasks.sampler, self.ledger.trials.observations()
        if (wait := sampler.waits(observations)) is not None:
            return wait
        empty = create_trial(state=TrialState.RUNNING)
        params = sampler.sample_relative(self.ledger.study, empty, sampler.search_space)
        position = sampler.position_of(params)
        assert position is not None, "the sampler names candidates only"
        if self.rehearsals.holds_back(position):
            return Wait.REHEARSAL
        return self.ledger.create(Task(position=position, proxy=sampler.proxy_for(observations, position)), params, {})

    def _is_over(self, *, moves: bool, waits: bool, pending: Sequence[int]) -> bool:
        """Return whether a run that has a reason to stop has nothing to wait for.

        Trials that lost their hosts are left as by a driver that dies: they run again when the hosts are back.

        Args:
            moves: Whether it stops because of its hosts.
            waits: Whether a trial of an earlier run waits for a slot.
            pending: Numbers of the trials that run.
        """
        if not moves:
            return not pending and not waits
        return not pending or self.hosts.lost_some

    def _end_left_over(self) -> str:
        """End what trials without a driver have left on other machines; return a note on it, or nothing."""
        ended = 0 if self.ledger.claim.is_lost else self.ledger.tasks.prepared.request.trials.backend.end_left_over()
        return f"ended {ended} job{'s' * (ended != 1)} that an earlier run of this study had left" if ended else ""
