"""What can run on a cluster while it changes: configurations on sets of hosts, and how fast each is when.

Words of this module:
- A setup is a set of hosts of the nominal cluster and a configuration that occupies all of their devices.
- A scene is the cluster that some hosts make in a state of the network, beside the one that they make nominally. The
  cost model prices it as any cluster; sets of hosts that make the same are priced once.
- A study's trials ran on the nominal cluster. What they taught of its configurations is carried over to every scene by
  the study's own belief: the candidates of all scenes stand behind those of the study in one surrogate.

Few even layouts divide 56 devices, so where hosts are lost, or some are slower than others, setups may leave some idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from optuna import Study
from optuna.trial import FrozenTrial

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig, concatenate
from costmodels.step.memory import MemoryEstimate, estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.dynamics import HostEvent, Interval, Trace, cluster_at
from hardware.io.errors import ConfigError
from tuner.replan.network import lost_hosts
from tuner.search.observations import Observations, observations_of
from tuner.search.parameters import params_of, values_of
from tuner.search.prior import ignore_progress, initial_posterior
from tuner.space.enumeration import Space, build_space, launchable
from tuner.storage.history import past_of
from tuner.study_file.config import StudyConfig

MOST_KEPT = 64
"""Configurations of a scene that may run in it: those predicted to be the fastest before any trial."""

MOST_SIZES = 2
"""Numbers of hosts for which an interval has setups of its own, where not all hosts are there or some are slow: those
that are predicted to be the fastest."""

LEAST_WORK, LEAST_WORK_MIXED = 0.8, 0.4
"""Device seconds of a step on fewer hosts, at least, over those of the fastest on the nominal cluster; the second
where devices are unlike. What could not be faster even so is not looked at (assumed)."""

MOST_SETS = 6
"""Sets of hosts with setups in one interval: its own, then those of its neighbours in time."""

MOST_CORRECTED = 24
"""Scenes in which trials correct predictions one by one. Of more, those unlike each other are, and each of the others
takes over the corrections of the one with the same hosts whose predicted steps are the most alike."""

FARTHEST = 1.6
"""Sets of hosts whose fastest setup is predicted to take so many times the step of the fastest in an interval, or more,
are not looked at there: trials rarely correct a ratio of predictions by as much, and to change saves minutes only."""

Hosts = tuple[int, ...]
"""Hosts of the nominal cluster by their numbers, ascending."""

Scene = tuple[Cluster, Cluster]
"""What some hosts make nominally, and what they make in a state of the network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A configuration on some hosts.

    Attributes:
        hosts: All that it occupies.
        config: The configuration.
    """

    hosts: Hosts
    config: ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """One way in which the cluster changes.

    Attributes:
        trace: What happens.
        intervals: The stretches in which nothing does.
    """

    trace: Trace
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What is expected of a setup in an interval.

    Attributes:
        step_time_s: Its step.
        state_bytes: Weights and optimizer states of one device.
        devices_per_host: Devices that share a host's way to the storage.
        nic_bytes_per_s: Bandwidth of one device to other hosts, of the slowest.
    """

    step_time_s: float
    state_bytes: float
    devices_per_host: int
    nic_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Options:
    """All setups that may run.

    Attributes:
        setups: The setups [o].
        figures: For every course and interval those that can run there, by their place in `setups`.
        num_scenes: Clusters that were priced.
        num_trials: Trials of the study that corrected the prices.
    """

    setups: tuple[Setup, ...]
    figures: tuple[tuple[Mapping[int, Figures], ...], ...]
    num_scenes: int
    num_trials: int


def cluster_of(nominal: Cluster, trace: Trace, time_s: float, hosts: Hosts) -> Cluster:
    """Some hosts of the cluster as they are at a time, as a cluster of their own; all of them are there then."""
    before = tuple(event for event in trace.events if event.time_s <= time_s)
    lost = set(lost_hosts(trace, time_s))
    left_out = [host for host in range(nominal.num_hosts) if host not in hosts and host not in lost]
    absent = tuple(HostEvent(time_s=time_s, host=host, is_lost=True) for host in left_out)
    return cluster_at(nominal, Trace(events=before + absent), time_s)


def fastest_hosts(interval: Interval, count: int) -> Hosts:
    """So many hosts of an interval: those that are left when, one by one, the host with the slowest network goes.

    Of equals the last one goes.
    """
    cluster = interval.cluster
    nic = np.repeat(
        [sum(link.bandwidth_bytes_per_s for link in group.nic_links) for group in cluster.groups],
        [group.hosts for group in cluster.groups],
    )
    left = list(range(len(interval.hosts)))
    while len(left) > count:
        worst = {host: float(nic[host]) for host in left}
        for pair in cluster.slow_pairs:
            ends = (pair.first_host, pair.second_host)
            if worst.keys() >= {*ends}:
                for host in ends:
                    worst[host] = min(worst[host], pair.share * float(min(nic[list(ends)])))
        left.remove(min(left, key=lambda host: (worst[host], -host)))
    return tuple(interval.hosts[host] for host in left)


def has_slow_hosts(interval: Interval, nominal: Cluster) -> bool:
    """Whether the network of some hosts is slower than that of others, and was not at first."""
    return bool(interval.cluster.slow_pairs) or len(interval.cluster.groups) > len(nominal.groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """The configurations of a scene that are predicted to be the fastest before any trial.

    Attributes:
        configs: At most MOST_KEPT, the fastest first, those that do not fit last.
        best_s: Step time of the first; inf without one.
    """

    configs: tuple[ParallelConfig, ...]
    best_s: float


class Pricing:
    """Enumerates and prices setups of one study; what is asked twice is computed once."""

    def __init__(self, config: StudyConfig) -> None:
        self.config, self.nominal = config, config.setting.cluster
        self.all_hosts: Hosts = tuple(range(self.nominal.num_hosts))
        self._spaces: dict[Cluster, Space] = {}
        self._ranked: dict[Scene, Ranked] = {}

    def base(self, hosts: Hosts) -> Cluster:
        """The cluster that some hosts make nominally."""
        return cluster_of(self.nominal, Trace(events=()), 0.0, hosts)

    def space_on(self, cluster: Cluster) -> Space:
        """The study's candidates on some hosts, as these are nominally."""
        if cluster not in self._spaces:
            if cluster == self.nominal:
                self._spaces[cluster] = self.config.space()
            else:
                setting = replace(self.config.setting, cluster=cluster)
                try:
                    self._spaces[cluster] = build_space(setting, self.config.options, current=None)
                except ConfigError as error:
                    raise error.in_file(self.config.file) from None
        return self._spaces[cluster]

    def ranked(self, scene: Scene) -> Ranked:
        """What is predicted to be the fastest in a scene before any trial."""
        if scene not in self._ranked:
            base, cluster = scene
            space, setting = self.space_on(base), self.config.setting
            self._ranked[scene] = Ranked(configs=(), best_s=math.inf)
            if len(space.grid):
                step = (setting.job, cluster, setting.runtime, space.grid)
                step_time_s = estimate_step(*step, memory=space.memory).step_time_s
                misfit = ~space.memory.fits(self.config.options.memory_headroom)
                order = np.lexsort((step_time_s, misfit))[:MOST_KEPT]
                configs = tuple(map(space.grid.config, order.tolist()))
                self._ranked[scene] = Ranked(configs=configs, best_s=float(step_time_s[order[0]]))
        return self._ranked[scene]

    def scene_of(self, trace: Trace, interval: Interval, hosts: Hosts) -> Scene:
        """What some hosts make in an interval."""
        return self.base(hosts), cluster_of(self.nominal, trace, interval.from_s, hosts)

    def host_sets(self, trace: Trace, interval: Interval) -> tuple[Hosts, ...]:
        """The sets of hosts on which setups are looked for in an interval, the fastest first."""
        if len(interval.hosts) == len(self.all_hosts) and not has_slow_hosts(interval, self.nominal):
            return (self.all_hosts,)
        nominal_s = self.ranked((self.nominal, self.nominal)).best_s
        least_work = LEAST_WORK if len(self.nominal.devices) == 1 else LEAST_WORK_MIXED
        device_s = least_work * nominal_s * self.nominal.num_devices if math.isfinite(nominal_s) else 0.0
        found: list[tuple[float, Hosts]] = []
        for count in range(len(interval.hosts), 0, -1):
            hosts = fastest_hosts(interval, count)
            if found and device_s / self.base(hosts).num_devices >= min(found)[0]:
                break
            memory = self.space_on(self.base(hosts)).memory
            if memory.fits(self.config.options.memory_headroom).any():
                found.append((self.ranked(self.scene_of(trace, interval, hosts)).best_s, hosts))
        return tuple(hosts for _, hosts in sorted(found)[:MOST_SIZES])

    def smaller(self, config: ParallelConfig, interval: Interval) -> Setup | None:
        """The same degrees with less data parallelism, on as many hosts of an interval as that can occupy.

        None if there is no such configuration that can be launched and fits.
        """
        rest = config.num_devices // config.dp
        for count in range(len(interval.hosts), 0, -1):
            hosts = fastest_hosts(interval, count)
            setting = replace(self.config.setting, cluster=self.base(hosts))
            devices = setting.cluster.num_devices
            if devices % rest or devices >= self.nominal.num_devices or (devices // rest) % config.ep:
                continue
            chosen = replace(config, dp=devices // rest)
            if not launchable(setting, chosen):
                continue
            grid = ConfigGrid.from_configs([chosen], self.config.options.opened)
            memory = estimate_memory(setting.job, setting.cluster, setting.runtime, grid)
            if memory.fits(self.config.options.memory_headroom)[0]:
                return Setup(hosts=hosts, config=chosen)
        return None


def options_over(
    pricing: Pricing,
    courses: Sequence[Course],
    besides: Sequence[Setup],
    study: Study | None,
    *,
    on_progress: Callable[[str], None] = ignore_progress,
) -> Options:
    """The setups that may run in some interval, and what is expected of them in each.

    Args:
        pricing: The study's.
        courses: How the cluster may change.
        besides: Setups to price beside those predicted to be fast.
        study: What the study has measured; None before its first trial.
        on_progress: Called with a line of text before what takes seconds.
    """
    scene_in: dict[tuple[int, int, Hosts], Scene] = {}
    seen: set[Scene] = set()
    asked = {setup.hosts for setup in besides}
    for number, course in enumerate(courses):
        for at, sets in enumerate(_available(pricing, course, besides)):
            there = {hosts: pricing.scene_of(course.trace, course.intervals[at], hosts) for hosts in sets}
            best_s = {hosts: pricing.ranked(scene).best_s for hosts, scene in there.items()}
            limit_s = FARTHEST * min(best_s.values(), default=math.inf)
            scene_in |= {
                (number, at, hosts): scene
                for hosts, scene in there.items()
                if hosts in asked or best_s[hosts] < limit_s
            }
            if len(seen) // 100 < len(seen | {*there.values()}) // 100:
                on_progress(f"looked at {len(seen | {*there.values()}):,} states of the cluster")
            seen |= {*there.values()}
    scenes = list(dict.fromkeys(scene_in.values()))
    pool: dict[Cluster, dict[ParallelConfig, None]] = {}
    for setup in besides:
        pool.setdefault(pricing.base(setup.hosts), {})[setup.config] = None
    for scene in scenes:
        pool.setdefault(scene[0], {}).update(dict.fromkeys(pricing.ranked(scene).configs))
    found, num_trials = _priced(pricing, scenes, pool, study, on_progress)
    place: dict[Setup, int] = {}
    figures: list[list[dict[int, Figures]]] = [[{} for _ in course.intervals] for course in courses]
    for (number, at, hosts), scene in scene_in.items():
        for config, one in found[scene].items():
            figures[number][at][place.setdefault(Setup(hosts=hosts, config=config), len(place))] = one
    return Options(
        setups=tuple(place),
        figures=tuple(tuple(course) for course in figures),
        num_scenes=len(scenes),
        num_trials=num_trials,
    )


def _available(pricing: Pricing, course: Course, besides: Sequence[Setup]) -> list[list[Hosts]]:
    """The sets of hosts with setups in every interval: those of its own, of `besides`, and of its neighbours."""
    own = [list(pricing.host_sets(course.trace, interval)) for interval in course.intervals]
    there = [set(interval.hosts) for interval in course.intervals]
    for order in (range(1, len(own)), range(len(own) - 2, -1, -1)):
        for at in order:
            neighbour = own[at - 1 if order.step > 0 else at + 1]
            more = [hosts for hosts in neighbour if hosts not in own[at] and there[at] >= {*hosts}]
            own[at] += more[: max(MOST_SETS - len(own[at]), 0)]
    for at, sets in enumerate(own):
        wanted = dict.fromkeys(setup.hosts for setup in besides)
        sets += [hosts for hosts in wanted if hosts not in sets and there[at] >= {*hosts}]
    return own


def _priced(
    pricing: Pricing,
    scenes: Sequence[Scene],
    pool: Mapping[Cluster, Mapping[ParallelConfig, None]],
    study: Study | None,
    on_progress: Callable[[str], None],
) -> tuple[dict[Scene, dict[ParallelConfig, Figures]], int]:
    """What is expected of the configurations of the pool that can run in each scene, and after how many trials."""
    config, setting = pricing.config, pricing.config.setting
    opened, headroom = config.options.opened, config.options.memory_headroom
    trials = [] if study is None else study.get_trials(deepcopy=False)
    dimensions = set(config.dimensions)
    tried = dict.fromkeys(config.config_of(values_of(trial)) for trial in trials if dimensions <= trial.params.keys())
    # the study's own candidates come first; where nothing has changed, they are those of the scene
    own = list(dict.fromkeys([*pool.get(pricing.nominal, {}), *tried]))
    own_grid = ConfigGrid.from_configs(own, opened)
    grids = [ConfigGrid.from_configs(list(pool[base]), opened) for base, _ in scenes]
    memories = [
        estimate_memory(setting.job, cluster, setting.runtime, grid)
        for (_, cluster), grid in zip(scenes, grids, strict=True)
    ]
    observations = _observations(trials, own_grid)
    knows = bool(own) and (observations.num_decisions > 0 or bool(config.history))
    if not knows:
        return {
            scene: _figures(
                scene[1],
                list(pool[scene[0]]),
                estimate_step(setting.job, scene[1], setting.runtime, grid, memory=memory).step_time_s,
                memory.fits(headroom),
                memory,
            )
            for scene, grid, memory in zip(scenes, grids, memories, strict=True)
        }, 0
    # what the prior says of each scene, to tell how alike they are and for what is taken over
    log_prior_s = [
        np.log(estimate_step(setting.job, cluster, setting.runtime, grid, memory=memory).step_time_s)
        for (_, cluster), grid, memory in zip(scenes, grids, memories, strict=True)
    ]
    stands_for = _representatives([base for base, _ in scenes], log_prior_s)
    corrected = sorted(set(stands_for))
    starts, end = {}, len(own)
    for at in corrected:
        is_own = scenes[at] == (pricing.nominal, pricing.nominal)
        starts[at] = 0 if is_own else end
        end += 0 if is_own else len(grids[at])
    trials_told = f"{observations.num_decisions:,} trials correct the predictions"
    on_progress(f"{trials_told} on {len(corrected):,} of {len(scenes):,} states of the cluster")
    changed = [at for at, start in starts.items() if start]
    same_as = np.arange(end)
    for at in changed:
        if scenes[at][0] == pricing.nominal:
            same_as[starts[at] : starts[at] + len(grids[at])] = np.arange(len(grids[at]))
    measured = config.measured_setting
    posterior = initial_posterior(
        [(measured, np.arange(len(own)))],
        concatenate([own_grid, *(grids[at] for at in changed)]),
        past_of(config),
        other_clusters=[
            (replace(measured, cluster=scenes[at][1]), np.arange(starts[at], starts[at] + len(grids[at])))
            for at in changed
        ],
        on_progress=on_progress,
    )
    expected = posterior.expected(observations, same_as)
    ran = np.isin(same_as, sorted(observations.explored))
    found = {}
    for at, (scene, memory) in enumerate(zip(scenes, memories, strict=True)):
        of = stands_for[at]
        rows = slice(starts[of], starts[of] + len(grids[of]))
        room = np.log((1 - headroom) * memory.capacity_bytes)
        can_run = ((expected.log_needed[rows] <= room) | ran[rows]) & ~expected.is_broken[rows]
        step_time_s = np.exp(expected.log_step_s[rows] + log_prior_s[at] - log_prior_s[of])
        found[scene] = _figures(scene[1], list(pool[scene[0]]), step_time_s, can_run, memory)
    return found, observations.num_decisions


def _representatives(bases: Sequence[Cluster], values: Sequence[FloatArray]) -> list[int]:
    """For each scene one with the same base that stands for it; itself, if there are at most MOST_CORRECTED.

    Scenes with one base have values of one shape. The first of each base stands for itself; then, one by one, the scene
    that is the farthest from those that were chosen.
    """
    first = {base: at for at, base in reversed(list(enumerate(bases)))}
    stands_for = [first[base] for base in bases]
    away = np.array([_distance(values[at], values[of]) for at, of in enumerate(stands_for)])
    num_chosen = len(first)
    while num_chosen < max(min(MOST_CORRECTED, len(bases)), len(first)):
        new = int(np.argmax(away))
        if away[new] == 0:  # none is unlike those that were chosen
            break
        for at, base in enumerate(bases):
            if base == bases[new] and (distance := _distance(values[at], values[new])) < away[at]:
                stands_for[at], away[at] = new, distance
        num_chosen += 1
    return stands_for


def _distance(one: FloatArray, other: FloatArray) -> float:
    """The largest difference of two rows of values."""
    return float(np.max(np.abs(one - other), initial=0.0))


def _observations(trials: Sequence[FrozenTrial], grid: ConfigGrid) -> Observations:
    """What the trials tell of the configurations of a grid."""
    positions = {
        tuple(params_of(dict(zip(grid.dimensions, key, strict=True))).values()): at
        for key, at in grid.positions().items()
    }
    return observations_of(
        [(trial, trial.state, trial.values) for trial in trials],
        lambda params: positions.get(tuple(params.get(name) for name in grid.dimensions)),
    )


def _figures(
    cluster: Cluster,
    configs: Sequence[ParallelConfig],
    step_time_s: FloatArray,
    can_run: NDArray[np.bool_],
    memory: MemoryEstimate,
) -> dict[ParallelConfig, Figures]:
    """What is expected of those configurations of a scene that can run."""
    state_bytes = memory.parts_bytes["weights"] + memory.parts_bytes["optimizer"]
    nic_bytes_per_s = min(sum(link.bandwidth_bytes_per_s for link in group.nic_links) for group in cluster.groups)
    return {
        one: Figures(
            step_time_s=float(step_time_s[at]),
            state_bytes=float(state_bytes[at]),
            devices_per_host=max(group.devices_per_host for group in cluster.groups),
            nic_bytes_per_s=nic_bytes_per_s,
        )
        for at, one in enumerate(configs)
        if can_run[at]
    }
