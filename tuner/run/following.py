"""Run of a study whose cluster loses hosts: it goes on with those that are left, and on all when they are back.

On fewer hosts there are other candidates, and equal ones take another time. So each set of hosts has a study of its own
in the same storage, a phase, with its own grid, trials and claim: whoever reads the storage finds studies like any
other. The runs of the others are history to each (`StudyConfig.kin`). The whole study names its phases in an attribute.

Trials that lose their hosts are left running, as by a driver that dies. The study adopts them when it goes on.
The budgets of trials, time and device-hours are those of the whole study and its phases together.

Which hosts are there is known in two cases: the trials occupy the machines of a Ray cluster that was joined, or the
world is simulated and its cluster has a trace, whose time is that for which the study and its phases have run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from optuna import Study

from hardware.dynamics import lost_hosts
from trials.on_ray.executor import RayExecutor
from trials.on_ray.placement import NoRoomError
from tuner.answers.fewer_hosts import phases_in, phases_of
from tuner.economics.device_time import device_time_of
from tuner.forecast.candidates import candidates_of
from tuner.run.executor import Executor
from tuner.run.hosts import Expected
from tuner.run.loop import run_study
from tuner.run.progress import Progress, RunResult
from tuner.run.studies import make_sampler, open_study
from tuner.search.prior import ignore_progress
from tuner.search.stopping import StopReason
from tuner.storage.record import PHASES, SPENT_S, read_records
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import StudyConfig
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

OnHosts = Callable[[tuple[int, ...]], StudyConfig]
"""Function that loads the study as one of its own on some of its hosts."""

MakeExecutor = Callable[[StudyConfig], AbstractContextManager[Executor]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Followed:
    """End of a run.

    Attributes:
        result: Result of the study or the phase that ran last.
        config: That study or phase.
        hosts: Its hosts.
    """

    result: RunResult
    config: StudyConfig
    hosts: tuple[int, ...]


def run_following(
    config: StudyConfig,
    on_hosts: OnHosts,
    *,
    on_progress: Callable[[Progress], None] = ignore_progress,
    ray_address: str | None = None,
    executor_of: MakeExecutor | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Followed:
    """Run a study until it stops, on whatever hosts are there.

    Args:
        config: Study, on all hosts.
        on_hosts: Function that loads the study on some of them.
        on_progress: Function that is told the progress of the run.
        ray_address: Address of the Ray cluster that runs the trials; see `run_study`.
        executor_of: Function that makes the executor of a study in place of Ray's.
        clock: Clock of the run's duration [s].

    Raises:
        ConfigError: See `run_study`.
    """
    everywhere = tuple(range(config.cluster.num_hosts))
    follows_trace = config.trace is not None and config.backend.origin == "synthetic"
    follows_ray = len(config.backend.hosts) > 1
    if not config.subject.has(Ability.FEWER_HOSTS) or not (follows_trace or follows_ray):
        executor = None if executor_of is None else executor_of(config)
        result = run_study(config, on_progress=on_progress, ray_address=ray_address, executor=executor, clock=clock)
        return Followed(result=result, config=config, hosts=everywhere)
    following = _Following(config, on_hosts, everywhere)
    hosts = following.first_hosts() if follows_trace else everywhere
    has_moved = False
    while True:
        phase = following.phase(hosts)
        if hosts != everywhere:
            _name_phase(config, following.stored.find(config.name), phase, hosts)
        now = following.trace_hosts(phase) if follows_trace else following.ray_hosts(clock)
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
                warnings = (*result.warnings, *(phase.in_words for phase in phases_of(config, following.stored)))
                return Followed(result=replace(result, warnings=warnings), config=phase, hosts=hosts)
            left = result.hosts
        hosts, has_moved = left, True
        on_progress(
            Progress(
                done=0,
                running=0,
                budget=config.search.max_trials,
                note=f"the study goes on with {len(left)} of {len(everywhere)} hosts",
            )
        )


class _Following:
    """Study, its phases so far, and the hosts that are there.

    Attributes:
        stored: Studies in its storage: that on all hosts, and its phases.
    """

    def __init__(self, config: StudyConfig, on_hosts: OnHosts, everywhere: tuple[int, ...]) -> None:
        self._config, self._on_hosts, self._everywhere = config, on_hosts, everywhere
        self.stored = StoredStudies(config.storage)
        self._usable: dict[tuple[int, ...], tuple[int, ...]] = {everywhere: everywhere}
        self._seen: tuple[int, ...] | None = None
        self._seen_since_s = self._due_s = float("-inf")

    def first_hosts(self) -> tuple[int, ...]:
        """Return the hosts that the trace has at the time that the study has run."""
        spent_s = sum(self._spent_s(one) for one in (self._config, *self._phases().values()))
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
                candidates = candidates_of(self._on_hosts(hosts))
                if len(candidates.space.grid):
                    found.append((float(candidates.estimate.step_time_s.min()), hosts))
            self._usable[left] = min(found)[1] if found else left
        return self._usable[left]

    def has_begun(self) -> bool:
        """Return whether the study has had a trial on all its hosts, or a phase."""
        study = self.stored.find(self._config.name)
        return study is not None and (bool(study.get_trials(deepcopy=False)) or bool(phases_in(study)))

    def phase(self, hosts: tuple[int, ...]) -> StudyConfig:
        """Return the study on these hosts, with the budgets that the others leave, and these as its kin."""
        own = self._config if hosts == self._everywhere else self._on_hosts(hosts)
        others = [one for one in (self._config, *self._phases().values()) if one.name != own.name]
        return replace(own, search=self._rest(own.search, others), kin=tuple(one.name for one in others))

    def trace_hosts(self, phase: StudyConfig) -> Callable[[Executor, float], tuple[int, ...]]:
        """Return the function of `Expected` that looks into the trace."""
        others = [one for one in (self._config, *self._phases().values()) if one.name != phase.name]
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
        assert self._config.trace is not None, "only a study with a trace follows one"
        lost = lost_hosts(self._config.trace, time_s)
        return self.usable(tuple(host for host in self._everywhere if host not in lost))

    def _phases(self) -> Mapping[str, StudyConfig]:
        study = self.stored.find(self._config.name)
        return {} if study is None else {name: self._on_hosts(hosts) for name, hosts in phases_in(study).items()}

    def _spent_s(self, config: StudyConfig) -> float:
        study = self.stored.find(config.name)
        return 0.0 if study is None else float(study.user_attrs.get(SPENT_S, 0.0))

    def _rest(self, search: SearchOptions, others: list[StudyConfig]) -> SearchOptions:
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


def _name_phase(config: StudyConfig, study: Study | None, phase: StudyConfig, hosts: tuple[int, ...]) -> None:
    """Write the name of a phase to the whole study, which is begun if it was not yet."""
    if study is None:
        study = open_study(config, make_sampler(config))
    known = phases_in(study)
    if known.get(phase.name) != hosts:
        study.set_user_attr(PHASES, {name: list(each) for name, each in (known | {phase.name: hosts}).items()})
