"""Executor that runs trials on Ray: a pool of worker processes, a time limit, and failures that come back as data.

Lifecycle: `with RayExecutor(...)` starts a local Ray or joins a cluster and asks for one actor per slot. It does not
wait for local actors. `submit` hands a trial to a free slot. `poll` returns the trials that have ended, replaces dead
workers, and cuts off trials that took too long. `reported` holds the steps that running trials have measured so far,
and `stop` ends one of them. Leaving the block kills the actors and shuts down the Ray that was started here.

An exception in `measure` is caught in the worker (`crashed`, with the traceback). The death of a worker is seen from
here: the trial is retried once in another worker, and a second death is an `incident`. An incident of the processes
that the worker runs is retried as well; the same fault of the program in both attempts is a crash. A dead worker is
asked for again, but if its node is gone there may never be room for it. The trial therefore goes to the first worker
that is free, and the slot takes no other trial until its worker is back.

Ray is imported when an executor is entered, not before (`local.py` says why). The actors are in
`worker.py` and `mailbox.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from hardware.io.errors import ConfigError
from trials.backend import PROGRAM_SIGNALS, AbstractBackend, HostNeeds, Observation, Status, tail_of
from trials.on_ray.cluster import first_line, join_cluster
from trials.on_ray.local import import_ray, renew_keepers, start_local_ray, stop_local_ray
from trials.on_ray.mailbox import Mailbox, News, Start
from trials.on_ray.placement import in_words, machines_in_words, machines_of, no_room, reserve_hosts, room_for
from trials.on_ray.worker import Slot
from trials.ranks.contract import RanksLostError

PLACEMENT_WAIT_S = 30.0
"""Default time that a cluster has to provide the slots [s]; a study then uses those that it has."""

START_LIMIT_S = 120.0
"""Time that a worker may take to start [s] before its trial counts as having lost its machine."""

CLOSE_LIMIT_S = 10.0
"""Time that the actors may take to die when the executor is closed [s]."""

_SHARING = "search.share_hosts: true lets trials share hosts"
_SECOND_ATTEMPT = ", and in a second attempt "

MAX_DEATHS = 2
"""Number of lost workers after which a trial is given up: the first loss may be bad luck."""

MAIL_LIMIT_S = 5.0
"""Time that the mailbox may take to hand over the last steps of a trial that is given up [s]."""

MAIL_EVERY_S = 0.5
"""Interval at which the mailbox is asked for steps [s]. Short steps would otherwise keep the driver busy: one turn of
its loop takes some 40 ms with 40 trials in the study (measured)."""


_NAMED = itertools.count()
"""Numbers in names of actors and placement groups: Ray keeps a name for a while after its owner was killed."""


@dataclass(slots=True)
class _Trial:
    """Submitted trial.

    Attributes:
        number: Number of the trial in the study.
        config: Configuration that is measured.
        reduction: Proxy job that the configuration belongs to; None for the backend's own job.
        result: Reference of Ray to the observation.
        since_s: Time at which the worker was first known to work on the trial [s]; None while it starts, and while the
            trial waits in a queue.
        steps_s: Times of the steps that the present attempt has measured so far [s].
        measured_after_s: Wall clock of this attempt until its first measured step [s].
        deaths: Cause of death of each worker that ran the trial.
        lost_s: Wall clock of the attempts that were lost with their workers [s].
        killed_by: Signal that killed a process of the trial in the first attempt; empty if none did.
    """

    number: int
    config: ParallelConfig
    reduction: Reduction | None = None
    result: Any = None
    since_s: float | None = None
    steps_s: list[float] = field(default_factory=list)
    measured_after_s: float | None = None
    deaths: list[str] = field(default_factory=list)
    lost_s: float = 0.0
    killed_by: str = ""


@dataclass(slots=True)
class _Place:
    """Slot of the pool: its actor, the placement group of its resources, and the trial that it works on.

    `is_lost` is true from the death of the actor until another one has started.
    """

    group: Any
    actor: Any = None
    ready: Any = None
    created_s: float = 0.0
    is_ready: bool = False
    is_lost: bool = False
    trial: _Trial | None = None


class RayExecutor:
    """Pool of `parallel_trials` slots for the trials of one study.

    Args:
        backend: Backend that measures; it is copied into every worker.
        parallel_trials: Number of slots asked for.
        study: Name of the study, for names in Ray: tasks are STUDY/NUMBER.ATTEMPT by their trials, attempts from 0;
            actors are STUDY/slot-N, each of which measures many trials, STUDY/slot-N/host-M and STUDY/mailbox-N.
        time_limit_s: Longest time that one trial may take [s]; None sets no limit.
        address: Address of the Ray cluster: `auto`, `ray://host:port` or `host:port`; `local` starts one here. None
            takes RAY_ADDRESS from the environment, and starts one here if there is none.
        placement_wait_s: Time that a joined cluster has to provide the slots [s].
        share_hosts: Whether trials may share hosts that the backend would have to itself.
        on_note: Callback that is told the reason if slots have to wait.
        uninterrupted: Context that holds interrupts back around calls in which Ray does not survive an interrupt. The
            wait for slots stays outside of it.

    Attributes:
        slots_note: Reason for having fewer slots than were asked for; empty if there are enough.
    """

    def __init__(
        self,
        backend: AbstractBackend,
        *,
        parallel_trials: int,
        study: str = "study",
        time_limit_s: float | None = None,
        address: str | None = None,
        placement_wait_s: float = PLACEMENT_WAIT_S,
        share_hosts: bool = False,
        on_note: Callable[[str], None] = lambda _: None,
        uninterrupted: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if parallel_trials < 1:
            raise ConfigError("must be at least 1", key="parallel_trials", value=parallel_trials)
        if time_limit_s is not None and not time_limit_s > 0:
            raise ConfigError("must be above 0", key="time_limit_s", value=time_limit_s)
        backend.check()
        self._backend = backend
        self._parallel_trials = parallel_trials
        self._study = study
        self._time_limit_s = time_limit_s
        self._address = address
        self._placement_wait_s = placement_wait_s
        self._is_alone = backend.wants_hosts_alone and not share_hosts
        self._on_note = on_note
        self._uninterrupted = uninterrupted
        self._reserved = backend.hosts
        self._ray: Any = None
        self._owns_connection = False
        self._is_local = True
        self._slot_class: Any = None
        self._stored_backend: Any = None
        self._places: list[_Place] = []
        self._waiting: list[_Trial] = []
        self._mailbox: Any = None
        self._mail: Any = None
        self._mail_due_s = 0.0
        self._num_read = 0
        self._ended: list[tuple[int, Observation]] = []
        self.slots_note = ""

    def __enter__(self) -> RayExecutor:
        """Start or join Ray and ask for the slots.

        Raises:
            ConfigError: The cluster does not answer, can never run a trial, or gives no slot.
        """
        try:
            with self._uninterrupted():
                is_local = self._is_local = self._connect()
                if not is_local:
                    self._ask_for_what_fits()
                self._slot_class = self._ray.remote(Slot)
                self._stored_backend = self._ray.put(self._backend)
                for _ in range(self._parallel_trials):
                    self._places.append(self._new_place())
                # asked for last: a worker that has started already should take a trial
                mailbox = self._ray.remote(Mailbox)
                name = f"{self._study}/mailbox-{next(_NAMED)}"
                self._mailbox = mailbox.options(name=name, num_cpus=0, max_restarts=-1, max_task_retries=0).remote()
            if not is_local:
                self._keep_what_started()
        except BaseException:
            with self._uninterrupted():
                self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close the executor, also when the block is left by Ctrl-C."""
        self.close()

    @property
    def num_free_slots(self) -> int:
        """Number of trials that `submit` takes now."""
        return max(len(self._free_places()) - len(self._waiting), 0)

    @property
    def pending(self) -> tuple[int, ...]:
        """Numbers of the trials that `poll` has not returned yet."""
        running = [place.trial.number for place in self._places if place.trial is not None]
        waiting = [trial.number for trial in self._waiting]
        return tuple(running + waiting + [number for number, _ in self._ended])

    @property
    def reported(self) -> dict[int, tuple[float, ...]]:
        """Step times [s] that each running trial has measured as of the last `poll`, by its number."""
        trials = [place.trial for place in self._places if place.trial is not None]
        return {trial.number: tuple(trial.steps_s) for trial in trials}

    @property
    def queued(self) -> tuple[int, ...]:
        """Numbers of the trials that wait for their devices in a queue, as of the last `poll`."""
        trials = [place.trial for place in self._places if place.trial is not None and place.is_ready]
        return tuple(trial.number for trial in trials if self._backend.waits_in_queue and trial.since_s is None)

    @property
    def hosts_left(self) -> int | None:
        """Number of machines of a cluster that was joined that can be a host of a trial; None if nobody knows."""
        if self._ray is None or self._is_local:
            return None
        try:
            machines = machines_of(self._ray.nodes())
        except self._ray.exceptions.RayError:
            return None
        return sum(machine.has(self._backend.hosts[0]) for machine in machines)

    def take(self, backend: AbstractBackend) -> None:
        """Run later trials on another backend of the study, with the same hosts; those that run go on as they are."""
        assert backend.hosts == self._backend.hosts, "the slots have been made for these hosts"
        self._backend = backend
        self._stored_backend = self._ray.put(backend)
        for place in self._places:
            # an actor runs one call after the other, so that this one waits for the trial
            place.actor.take.remote(self._stored_backend)

    def submit(self, trial_number: int, config: ParallelConfig, reduction: Reduction | None = None) -> None:
        """Start a trial on a free slot and return at once; `reduction` is its proxy job, if it runs one."""
        assert self.num_free_slots, "submit needs a free slot: look at num_free_slots first"
        free = self._free_places()
        place = next((place for place in free if place.is_ready), free[0])
        self._start(place, _Trial(number=trial_number, config=config, reduction=reduction))

    def stop(self, trial_number: int, reason: str) -> None:
        """End a running trial at once with its worker, as `pruned`; `poll` returns it.

        A trial that has ended or measured its last step meanwhile, or is not running here, is left as it is.
        """
        for place in self._places:
            trial = place.trial
            if trial is None or trial.number != trial_number or self._is_there(trial.result):
                continue
            self._read_rest()
            expected_steps = self._backend.expected_steps(trial.config)
            if expected_steps is None or len(trial.steps_s) < expected_steps:
                self._replace(place)
                self._end(trial, self._observe(trial, Status.PRUNED, reason, expected_steps=expected_steps))

    def cancel(self, trial_number: int, reason: str) -> None:
        """End a trial at once with its worker, as `cancelled`, whether it runs or waits; `poll` returns it.

        A trial that has ended meanwhile, or is not here, is left as it is.
        """
        for place in self._places:
            trial = place.trial
            if trial is not None and trial.number == trial_number and not self._is_there(trial.result):
                self._read_rest()
                self._replace(place)
                self._end(trial, self._observe(trial, Status.CANCELLED, reason))
        for trial in [each for each in self._waiting if each.number == trial_number]:
            self._waiting.remove(trial)
            self._end(trial, self._observe(trial, Status.CANCELLED, reason))

    def poll(self, timeout_s: float) -> list[tuple[int, Observation]]:
        """Return the trials that have ended; none if nothing is pending.

        It waits up to `timeout_s` for the first end, or for a measured step, which `reported` then holds.
        """
        deadline_s = time.monotonic() + timeout_s
        renew_keepers()
        while True:
            self._wait(deadline_s)
            has_news = self._read_mail()
            for place in self._places:
                if place.trial is not None:
                    self._check_trial(place, place.trial)
                elif not place.is_ready and self._is_there(place.ready):
                    self._check_worker(place)
            self._retry()
            if self._ended or has_news or not self.pending or time.monotonic() >= deadline_s:
                ended, self._ended = self._ended, []
                return ended

    def close(self) -> None:
        """Kill the actors with the trials that still run, and shut down the Ray that was started here.

        It may be called twice.
        """
        places, self._places = self._places, []
        self._ended, self._waiting = [], []
        if self._ray is None or not self._ray.is_initialized():
            return
        for place in places:
            self._kill(place.actor)
            self._free(place.group)
        if self._mailbox is not None:
            self._kill(self._mailbox)
        self._stored_backend = self._mailbox = self._mail = None
        if self._owns_connection:
            self._owns_connection = False
            stop_local_ray(self._ray)
        elif places:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.wait([p.ready for p in places], num_returns=len(places), timeout=CLOSE_LIMIT_S)

    # Connecting

    def _connect(self) -> bool:
        """Start Ray here or join a cluster, unless the program has done so; return whether it was started here."""
        address = self._address or os.environ.get("RAY_ADDRESS") or "local"
        if address != "local":
            self._ray = import_ray()
            if not self._ray.is_initialized():
                self._owns_connection = True
                join_cluster(self._ray, address, study=self._study)
            return False
        hosts = self._backend.hosts
        self._take_turns_elsewhere()
        if len(hosts) > 1:
            raise ConfigError(
                f"is one machine, and a trial wants {len(hosts)} hosts of {in_words(hosts[:1])}",
                key="address",
                value=address,
                nearest="join the cluster's Ray with RAY_ADDRESS",
            )
        cores, each = os.cpu_count() or 1, hosts[0].cpus
        room = max(cores // each, 1) if each > 1 else self._parallel_trials
        if self._parallel_trials > room:
            self._run_fewer(room, f"each wants {each} cores of the {cores} here")
        # ranks may share cores; the observation then says which clock their times count
        self._owns_connection = start_local_ray(max(self._parallel_trials * each, cores), study=self._study)
        self._ray = import_ray()
        if hosts[0].gpus:
            self._check_gpus(hosts[0].gpus)
        return self._owns_connection

    def _check_gpus(self, each: int) -> None:
        """Limit the slots to those that this machine has GPUs for."""
        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        if gpus < each:
            raise ConfigError(
                f"wants {each} GPUs for a trial, and this machine has {gpus}",
                key="trial.device",
                value="cuda",
                nearest="join a cluster with RAY_ADDRESS, or describe the cluster as it is",
            )
        room = 1 if self._is_alone else gpus // each
        if self._parallel_trials > room:
            alone = f"each has this machine to itself ({_SHARING})" if gpus // each > room else ""
            self._run_fewer(room, alone or f"each wants {each} of the {gpus} GPUs here")

    def _take_turns_elsewhere(self) -> None:
        """Run one trial at a time if each goes on from the last, or wants hosts to itself that Ray does not manage."""
        if self._backend.goes_on and self._parallel_trials > 1:
            self._run_fewer(1, "each goes on from the checkpoint of the one before")
        if self._is_alone and self._backend.hosts == (HostNeeds(),) and self._parallel_trials > 1:
            because = f"the command reaches its hosts by itself, and may find another trial there ({_SHARING})"
            self._run_fewer(1, because)

    def _run_fewer(self, room: int, because: str) -> None:
        """Reduce the slots to `room`, and note the reason."""
        trials = "trial runs" if room == 1 else "trials run"
        self.slots_note = f"{room} {trials} at once instead of {self._parallel_trials}: {because}"
        self._parallel_trials = room

    def _ask_for_what_fits(self) -> None:
        """Limit the slots to those that the machines of the cluster have room for, unless the cluster may grow."""
        hosts = self._backend.hosts
        self._take_turns_elsewhere()
        machines = machines_of(self._ray.nodes())
        if self._is_alone and hosts != (HostNeeds(),):
            self._reserved = reserve_hosts(hosts, machines)
        room = room_for(self._reserved, machines)
        if room >= self._parallel_trials:
            return
        if any(machine.may_multiply for machine in machines):
            self._on_note(
                f"a trial wants {in_words(hosts)}, and of the {self._parallel_trials} asked for the cluster has room "
                f"for {room}, with {machines_in_words(machines)}; it may grow, and gets {self._placement_wait_s:g} s "
                "for that"
            )
            return
        if not room:
            raise no_room(hosts, machines)
        shared = min(room_for(hosts, machines), self._parallel_trials)
        alone = f"; each has its hosts to itself ({_SHARING}, and then {shared} run at once)" if shared > room else ""
        self._run_fewer(room, f"each wants {in_words(hosts)}, and the cluster has {machines_in_words(machines)}{alone}")

    def _keep_what_started(self) -> None:
        """Wait for the slots that the cluster gives, and release the others."""
        refs = [place.ready for place in self._places]
        started, _ = self._ray.wait(refs, num_returns=len(refs), timeout=self._placement_wait_s)
        kept, failure = [], ""
        for place in self._places:
            if place.ready in started:
                try:
                    self._ray.get(place.ready)
                except self._ray.exceptions.RayError as error:
                    failure = _cause_of_death(error)
                else:
                    place.is_ready = True
                    kept.append(place)
            if not place.is_ready:
                self._kill(place.actor)
                self._free(place.group)
        self._places = kept
        if not kept:
            raise ConfigError(
                f"is more than the cluster provides: no slot of {in_words(self._backend.hosts)} within "
                f"{self._placement_wait_s:g} s" + (f" ({failure})" if failure else ""),
                key="parallel_trials",
                value=self._parallel_trials,
                nearest="wait until it has that free, raise search.placement_wait_s, or set address: local"
                + (f"; {_SHARING}" if self._reserved != self._backend.hosts else ""),
            )
        if len(kept) < self._parallel_trials:
            why = f"the cluster provided no more slots within {self._placement_wait_s:g} s"
            self._run_fewer(len(kept), "; ".join(filter(None, (why, self.slots_note))))

    # Running

    def _new_place(self) -> _Place:
        """Ask for the resources of a slot, and start its actor there."""
        group = None
        if self._backend.hosts != (HostNeeds(),):
            bundles = [{"CPU": needs.cpus} | ({"GPU": needs.gpus} if needs.gpus else {}) for needs in self._reserved]
            strategy = "STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK"
            name = f"{self._study}/hosts-{next(_NAMED)}"
            group = self._ray.util.placement_group(bundles, strategy=strategy, name=name)
        place = _Place(group=group)
        self._fill(place)
        return place

    def _fill(self, place: _Place) -> None:
        """Start a fresh actor in a slot, in the first bundle of its placement group if it has one."""
        # on one host this actor starts the ranks itself; on several hosts, each has an actor that does
        needs = self._backend.hosts[0] if len(self._backend.hosts) == 1 else HostNeeds(cpus=0)
        name = f"{self._study}/slot-{next(_NAMED)}"
        options: dict[str, Any] = {"name": name, "num_cpus": needs.cpus, "max_restarts": 0, "max_task_retries": 0}
        if needs.gpus:
            options["num_gpus"] = needs.gpus
        if place.group is not None:
            options["scheduling_strategy"] = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=place.group, placement_group_bundle_index=0
            )
        place.actor = self._slot_class.options(**options).remote(self._stored_backend, place.group, name)
        place.ready, place.created_s = place.actor.ready.remote(), time.monotonic()
        place.is_ready, place.trial = False, None

    def _free_places(self) -> list[_Place]:
        """Return the slots without a trial; slots that have lost their worker only if there is no other slot."""
        usable = [place for place in self._places if not place.is_lost] or self._places
        return [place for place in usable if place.trial is None]

    def _check_worker(self, place: _Place) -> None:
        """Note that a worker without a trial has started, or replace it if it has failed to start.

        A worker may fail on a node of whose death Ray has not heard yet; another worker may then start. A fault of the
        backend itself occurs in every worker, for example a module that only the driver has. A waiting trial is then
        ended with this cause; if none waits, nothing is tried.
        """
        try:
            self._ray.get(place.ready)
        except self._ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                if self._waiting:
                    self._handle_death(place, self._waiting.pop(0), _cause_of_death(error), str(error))
                return
            since_s = place.created_s
            self._replace(place)
            place.created_s = since_s
        else:
            place.is_ready, place.is_lost = True, False

    def _retry(self) -> None:
        """Hand trials that have lost their workers to free ones; give one up if no worker is free for too long."""
        for place in self._places:
            if self._waiting and place.trial is None and place.is_ready:
                self._start(place, self._waiting.pop(0))
        now_s = time.monotonic()
        if self._waiting and all(p.trial is None and now_s >= p.created_s + START_LIMIT_S for p in self._places):
            cause = f"no worker started within {START_LIMIT_S:.0f} s"
            self._handle_death(self._places[0], self._waiting.pop(0), cause, "")

    def _start(self, place: _Place, trial: _Trial) -> None:
        trial.steps_s, trial.measured_after_s = [], None
        attempt = len(trial.deaths)
        measure = place.actor.measure.options(name=f"{self._study}/{trial.number}.{attempt}")
        trial.result = measure.remote(trial.config, trial.reduction, trial.number, attempt, self._mailbox)
        trial.since_s = time.monotonic() if place.is_ready and not self._backend.waits_in_queue else None
        place.trial = trial

    def _wait(self, deadline_s: float) -> None:
        """Sleep until a trial or a starting worker has news, a limit is reached, or `deadline_s` has come."""
        refs, alarms_s = [], [deadline_s]
        for place in self._places:
            if place.trial is None:
                if self._waiting and not place.is_ready:
                    refs.append(place.ready)
                continue
            refs.append(place.trial.result)
            if not place.is_ready:
                refs.append(place.ready)
                alarms_s.append(place.created_s + START_LIMIT_S)
            elif self._time_limit_s is not None and place.trial.since_s is not None:
                alarms_s.append(place.trial.since_s + self._time_limit_s)
        if refs and self._mail is not None:
            refs.append(self._mail)
        else:
            alarms_s.append(self._mail_due_s)
        if refs and not self._ended:
            self._ray.wait(refs, num_returns=1, timeout=max(0.0, min(alarms_s) - time.monotonic()))

    def _read_mail(self) -> bool:
        """Ask the mailbox when it is due, and hand out its answer; return whether a running trial got a step."""
        now_s = time.monotonic()
        if self._mail is None:
            if now_s >= self._mail_due_s and self.pending:
                self._mail = self._mailbox.read.remote(self._num_read)
            return False
        if not self._is_there(self._mail):
            return False
        answer, self._mail, self._mail_due_s = self._mail, None, now_s + MAIL_EVERY_S
        try:
            return self._hand_out(*self._ray.get(answer))
        except self._ray.exceptions.RayError:  # it is being restarted, and is asked again
            return False

    def _read_rest(self) -> None:
        """Hand out all steps in the mailbox, so that a trial that is given up loses none of its steps."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # a mailbox that is being restarted has no mail
            self._hand_out(*self._ray.get(self._mailbox.read.remote(self._num_read), timeout=MAIL_LIMIT_S))

    def _hand_out(self, first: int, news: list[News]) -> bool:
        """Give what was not read before to its trials; return whether a running trial got any."""
        attempts = {(p.trial.number, len(p.trial.deaths)): p.trial for p in self._places if p.trial is not None}
        has_news = False
        for one in news[self._num_read - first :]:
            trial = attempts.get((one.trial_number, one.attempt))
            if trial is None:
                continue
            has_news = True
            if isinstance(one, Start):
                trial.since_s = time.monotonic()
            else:
                trial.steps_s.append(one.step_time_s)
                trial.measured_after_s = one.measured_after_s
        self._num_read = max(self._num_read, first + len(news))
        return has_news

    def _is_there(self, ref: Any) -> bool:
        return bool(self._ray.wait([ref], timeout=0)[0])

    def _check_trial(self, place: _Place, trial: _Trial) -> None:
        """Take the trial's result, or notice that its worker died or that its time is over."""
        now_s = time.monotonic()
        if self._is_there(trial.result):
            self._take_result(place, trial)
        elif not place.is_ready:
            if self._is_there(place.ready):
                place.is_ready, place.is_lost = True, False
                trial.since_s = trial.since_s if self._backend.waits_in_queue else now_s
            elif now_s >= place.created_s + START_LIMIT_S:
                self._handle_death(place, trial, f"its worker did not start within {START_LIMIT_S:.0f} s", "")
        elif (
            self._time_limit_s is not None and trial.since_s is not None and now_s >= trial.since_s + self._time_limit_s
        ):
            self._read_rest()
            self._replace(place)
            reason = f"was cut off at the time limit of {self._time_limit_s:g} s"
            self._end(trial, self._observe(trial, Status.TIMEOUT, reason, time_limit_s=self._time_limit_s))

    def _take_result(self, place: _Place, trial: _Trial) -> None:
        """Take the result of a trial whose worker has answered or died."""
        errors = self._ray.exceptions
        try:
            observation: Observation = self._ray.get(trial.result)
        except errors.RayTaskError as error:
            if isinstance(error.cause, RanksLostError):
                self._handle_death(place, trial, first_line(error.cause), str(error.cause))
                return
            # raised outside `measure`: a backend or result that does not pickle
            observation = Observation(
                status=Status.CRASHED,
                log_tail=tail_of(str(error)),
                reason=str(error).rstrip().rpartition("\n")[2][:500],
                origin=self._backend.origin,
                clock=self._backend.clock,
            )
        except errors.RayError as error:
            self._handle_death(place, trial, _cause_of_death(error), str(error))
            return
        place.is_ready, place.is_lost = True, False
        if observation.status is Status.INCIDENT and not trial.deaths:  # of a process that the worker runs
            trial.deaths.append(observation.reason)
            trial.lost_s += observation.elapsed_s or 0.0
            trial.killed_by = observation.killed_by
            self._start(place, trial)
            return
        if observation.killed_by == trial.killed_by and observation.killed_by in PROGRAM_SIGNALS:
            observation = dataclasses.replace(observation, status=Status.CRASHED)
        place.trial = None
        self._end(trial, observation)

    def _handle_death(self, place: _Place, trial: _Trial, cause: str, log: str) -> None:
        """Retry a trial whose worker died or lost its ranks; a second loss ends it as an incident."""
        self._read_rest()
        for idle in self._places:
            if idle.trial is None and idle.is_ready:
                self._replace(idle)  # it may have died with the same node, which nobody would tell
        self._replace(place)
        place.is_lost = True
        trial.deaths.append(cause)
        if len(trial.deaths) < MAX_DEATHS:
            trial.lost_s += 0.0 if trial.since_s is None else time.monotonic() - trial.since_s
            trial.since_s, trial.steps_s, trial.measured_after_s = None, [], None
            self._waiting.append(trial)
            return
        is_same = trial.deaths[0] == cause
        both = f"{cause}, and so did that of a second attempt" if is_same else _SECOND_ATTEMPT.join(trial.deaths)
        self._end(trial, self._observe(trial, Status.INCIDENT, both, log_tail=tail_of(log)))

    def _observe(self, trial: _Trial, status: Status, reason: str, **further: Any) -> Observation:
        """Return the observation of a trial whose worker was killed from here or has died."""
        return Observation(
            status=status,
            step_times_s=tuple(trial.steps_s),
            elapsed_s=None if trial.since_s is None else time.monotonic() - trial.since_s,
            measured_after_s=trial.measured_after_s,
            reason=reason,
            origin=self._backend.origin,
            clock=self._backend.clock,
            **further,
        )

    def _end(self, trial: _Trial, observation: Observation) -> None:
        """Keep the result of a trial for `poll`, with a note on earlier attempts."""
        reason = observation.reason
        if trial.deaths and observation.status is not Status.INCIDENT:
            retried = f"retried once, because {trial.deaths[0]}"
            reason = f"{reason} ({retried})" if reason else retried
        elif trial.deaths and not reason.startswith(trial.deaths[0]):
            reason = f"{trial.deaths[0]}{_SECOND_ATTEMPT}{reason}"
        self._ended.append((trial.number, dataclasses.replace(observation, reason=reason, lost_s=trial.lost_s)))

    def _replace(self, place: _Place) -> None:
        """Put a fresh worker in the slot."""
        self._kill(place.actor)
        self._fill(place)

    def _kill(self, actor: Any) -> None:
        """Kill an actor, if it still lives."""
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(actor, no_restart=True)

    def _free(self, group: Any) -> None:
        """Give the resources of a placement group back."""
        if group is not None:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.util.remove_placement_group(group)


def _cause_of_death(error: BaseException) -> str:
    """Shorten Ray's many lines on a dead actor: `its worker died (SYSTEM_ERROR: Worker unexpectedly exits ...)`."""
    if getattr(error, "actor_init_failed", False):
        raised = str(error).rstrip().rpartition("\n")[2]
        return f"its worker could not begin ({raised[:300]})"
    text = " ".join(str(error).split())
    exit_type = text.partition("Worker exit type: ")[2].partition(" ")[0]
    detail = text.partition("Worker exit detail: ")[2] or text
    sentence = detail.partition(". ")[0][:300]
    return f"its worker died ({exit_type}: {sentence})" if exit_type else f"its worker died ({sentence})"
