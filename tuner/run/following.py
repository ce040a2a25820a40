"""Run of a study whose cluster loses hosts: it goes on with those that are left, and on all when they are back.

On fewer hosts there are other candidates, and equal ones take another time. So each set of hosts has a study of its own
in the same storage, a phase, with its own grid, trials and claim: whoever reads the storage finds studies like any
other. The runs of the others are history to each (`HistoryOptions.kin`). The whole study names its phases in an
attribute.

Trials that lose their hosts are left running, as by a driver that dies. The study adopts them when it goes on.
The budgets of trials, time and device-hours are those of the whole study and its phases together.

Which hosts are there is known in two cases: the trials occupy the machines of a Ray cluster that was joined, or the
world is simulated and its cluster has a trace, whose time is that for which the study and its phases have run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from optuna import Study

from hardware.dynamics import lost_hosts
from trials.on_ray.executor import RayExecutor
from trials.on_ray.placement import NoRoomError
from tuner.answers.fewer_hosts import phases_in, phases_of
from tuner.economics.device_time import device_time_of
from tuner.forecast.prepared import Prepared
from tuner.run.executor import Executor
from tuner.run.hosts import Expected
from tuner.run.loop import run_study
from tuner.run.progress import Progress, RunResult
from tuner.run.studies import make_sampler, open_study, prepared_of
from tuner.search.prior import ignore_progress
from tuner.search.stopping import StopReason
from tuner.storage.record import PHASES, SPENT_S, read_records
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.request import StudyRequest
from tuner.study_file.study_keys import SearchOptions
from tuner.subject.ability import Ability

FOLLOW_AFTER_S = 30.0
"""Time for which machines of a Ray cluster have to be gone or back before the study follows [s]; assumed. A raylet that
is restarted is back sooner, and a trial without its worker is given up after two minutes."""

LEAST_SHARE = 0.8
"""Share of the largest number of hosts with candidates below which fewer hosts are not considered: a step on them would
have to take a fifth less work (assumed)."""

LOOK_EVERY_S = 2.0
"""Time between two looks at the nodes of a Ray cluster [s]."""

OnHosts = Callable[[tuple[int, ...]], StudyRequest | Prepared]
"""Function that loads the study as one of its own on some of its hosts."""

MakeExecutor = Callable[[Prepared], AbstractContextManager[Executor]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Followed:
    """End of a run.

    Attributes:
        result: Result of the study or the phase that ran last.
        prepared: That study or phase.
        hosts: Its hosts.
    """

    result: RunResult
    prepared: Prepared
    hosts: tuple[int, ...]


def run_following(
    study: StudyRequest | Prepared,
    on_hosts: OnHosts,
    *,
    on_progress: Callable[[Progress], None] = ignore_progress,
    ray_address: str | None = None,
    executor_of: MakeExecutor | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Followed:
    """Run a study until it stops, on whatever hosts are there.

    Args:
        study: Study, on all hosts.
        on_hosts: Function that loads the study on some of them.
        on_progress: Function that is told the progress of the run.
        ray_address: Address of the Ray cluster that runs the trials; see `run_study`.
        executor_of: Function that makes the executor of a study in place of Ray's.
        clock: Clock of the run's duration [s].

    Raises:
        ConfigError: See `run_study`.
    """
    prepared = prepared_of(study)
    request = prepared.request
    everywhere = tuple(range(request.problem.cluster.num_hosts))
    follows_trace = request.trace is not None and request.trials.backend.origin == "synthetic"
    follows_ray = len(request.trials.backend.hosts) > 1 and not request.trials.only_proxies
    if not request.problem.subject.has(Ability.FEWER_HOSTS) or not (follows_trace or follows_ray):
        executor = None if executor_of is None else executor_of(prepared)
        result = run_study(prepared, on_progress=on_progress, ray_address=ray_address, executor=executor, clock=clock)
        return Followed(result=result, prepared=result.prepared or prepared, hosts=everywhere)
    following = _Following(prepared, on_hosts, everywhere)
    hosts = following.first_hosts() if follows_trace else everywhere
    has_moved = False
    while True:
        phase = following.phase(hosts)
        if hosts != everywhere:
            _name_phase(prepared, following.stored.find(request.name), phase.request.name, hosts)
        now = following.trace_hosts(phase.request.name) if follows_trace else following.ray_hosts(clock)
        try:
            result = run_study(
                phase,
                on_progress=on_progress,
                ray_address=ray_address,
                executor=None if executor_of is None else executor_of(phase),
                clock=clock,
                expected=Expected(hosts=hosts, now=now),
            )
        except NoRoomError as error:
            # a study that never ran on all its hosts was described for another cluster
            if not 0 < error.fitting < len(hosts) or not (has_moved or following.has_begun()):
                raise
            left = following.usable(everywhere[: error.fitting])
        else:
            if result.stop_reason is not StopReason.HOSTS:
                warnings = (*result.warnings, *(phase.in_words for phase in phases_of(request, following.stored)))
                return Followed(
                    result=replace(result, warnings=warnings), prepared=result.prepared or phase, hosts=hosts
                )
            left = result.hosts
        hosts, has_moved = left, True
        on_progress(
            Progress(
                done=0,
                running=0,
                budget=request.search.max_trials,
                note=f"the study goes on with {len(left)} of {len(everywhere)} hosts",
            )
        )


class _Following:
    """Study, its phases so far, and the hosts that are there.

    Attributes:
        stored: Studies in its storage: that on all hosts, and its phases.
    """

    def __init__(self, whole: Prepared, on_hosts: OnHosts, everywhere: tuple[int, ...]) -> None:
        self._whole, self._load, self._everywhere = whole, on_hosts, everywhere
        self.stored = StoredStudies(whole.request.storage)
        self._usable: dict[tuple[int, ...], tuple[int, ...]] = {everywhere: everywhere}
        self._seen: tuple[int, ...] | None = None
        self._seen_since_s = self._due_s = float("-inf")

    def _on_hosts(self, hosts: tuple[int, ...]) -> Prepared:
        return prepared_of(self._load(hosts))

    def first_hosts(self) -> tuple[int, ...]:
        """Return the hosts that the trace has at the time that the study has run."""
        spent_s = sum(self._spent_s(one) for one in self._requests())
        return self._traced(spent_s)

    def usable(self, left: tuple[int, ...]) -> tuple[int, ...]:
        """Return the hosts to go on with: those whose candidates are predicted to have the fastest.

        Few layouts divide the devices of an odd number of hosts, and some hosts may have to stay idle.
        """
        if left not in self._usable:
            found: list[tuple[float, tuple[int, ...]]] = []
            for count in range(len(left), 0, -1):
                hosts = left[:count]
                if found and count < LEAST_SHARE * len(found[0][1]):
                    break
                candidates = self._on_hosts(hosts).candidates
                if len(candidates.space.grid):
                    found.append((float(candidates.estimate.step_time_s.min()), hosts))
            self._usable[left] = min(found)[1] if found else left
        return self._usable[left]

    def has_begun(self) -> bool:
        """Return whether the study has had a trial on all its hosts, or a phase."""
        study = self.stored.find(self._whole.request.name)
        return study is not None and (bool(study.get_trials(deepcopy=False)) or bool(phases_in(study)))

    def phase(self, hosts: tuple[int, ...]) -> Prepared:
        """Return the study on these hosts, with the budgets that the others leave, and these as its kin."""
        own = self._whole if hosts == self._everywhere else self._on_hosts(hosts)
        others = [one for one in self._requests() if one.name != own.request.name]
        history = replace(own.request.history, kin=tuple(one.name for one in others))
        search = self._rest(own.request.search, others)
        return replace(own, request=replace(own.request, search=search, history=history))

    def trace_hosts(self, phase: str) -> Callable[[Executor, float], tuple[int, ...]]:
        """Return the function of `Expected` that looks into the trace."""
        others = [one for one in self._requests() if one.name != phase]
        before_s = sum(map(self._spent_s, others))
        return lambda _executor, elapsed_s: self._traced(before_s + elapsed_s)

    def ray_hosts(self, clock: Callable[[], float]) -> Callable[[Executor, float], tuple[int, ...] | None]:
        """Return the function of `Expected` that counts the machines of the Ray cluster."""

        def look(executor: Executor, _elapsed_s: float) -> tuple[int, ...] | None:
            now_s = clock()
            if now_s >= self._due_s and isinstance(executor, RayExecutor):
                self._due_s = now_s + LOOK_EVERY_S
                left = executor.hosts_left
                seen = self.usable(self._everywhere[:left]) if left else None
                if seen != self._seen:
                    self._seen, self._seen_since_s = seen, now_s
            return self._seen if now_s >= self._seen_since_s + FOLLOW_AFTER_S else None

        return look

    def _traced(self, time_s: float) -> tuple[int, ...]:
        trace = self._whole.request.trace
        assert trace is not None, "only a study with a trace follows one"
        lost = lost_hosts(trace, time_s)
        return self.usable(tuple(host for host in self._everywhere if host not in lost))

    def _requests(self) -> list[StudyRequest]:
        """Return the requests of the whole study and of its phases so far."""
        study = self.stored.find(self._whole.request.name)
        phases = {} if study is None else phases_in(study)
        loaded = map(self._load, phases.values())
        return [self._whole.request, *(one.request if isinstance(one, Prepared) else one for one in loaded)]

    def _spent_s(self, request: StudyRequest) -> float:
        study = self.stored.find(request.name)
        return 0.0 if study is None else float(study.user_attrs.get(SPENT_S, 0.0))

    def _rest(self, search: SearchOptions, others: list[StudyRequest]) -> SearchOptions:
        """Take what the others have spent off the budgets."""
        trials, device_hours = 0, 0.0
        for one in others:
            study = self.stored.find(one.name)
            records = [] if study is None else read_records(study)
            trials += sum(record.finished for record in records)
            device_hours += device_time_of(one, records).device_hours
        minutes = sum(map(self._spent_s, others)) / 60
        used = {"max_trials": trials, "max_minutes": minutes, "budget_device_hours": device_hours}
        budgets = {name: budget for name in used if (budget := getattr(search, name)) is not None}
        return search.model_copy(update={name: max(budget - used[name], 0) for name, budget in budgets.items()})


def _name_phase(whole: Prepared, study: Study | None, phase: str, hosts: tuple[int, ...]) -> None:
    """Write the name of a phase to the whole study, which is begun if it was not yet."""
    if study is None:
        study = open_study(whole, make_sampler(whole))
    known = phases_in(study)
    if known.get(phase) != hosts:
        study.set_user_attr(PHASES, {name: list(each) for name, each in (known | {phase: hosts}).items()})
