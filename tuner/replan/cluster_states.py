"""Configurations that can run on a cluster while it changes, and the expected step time of each in each of its states.

Words of this module:
- A setup is a set of hosts of the nominal cluster and a configuration that occupies all devices of these hosts.
- A cluster state is a pair of clusters formed by the same hosts: the nominal one, and the one in some state of the
  network. The cost model prices it like any cluster. Sets of hosts that form equal clusters are priced once.
- A study's trials ran on the nominal cluster. The study's own posterior transfers their corrections to every cluster
  state: one surrogate holds the candidates of the study, followed by those of all states.

Few even layouts divide 56 devices. If hosts are lost or slow, setups may therefore leave some hosts idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from optuna import Study

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig, concatenate
from costmodels.step.memory.peak import MemoryEstimate, estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.dynamics import HostEvent, Interval, Trace, cluster_at, lost_hosts
from hardware.host_choice import choose_hosts
from hardware.io.errors import ConfigError
from tuner.forecast.prepared import Prepared
from tuner.search.observations import observations_on
from tuner.search.parameters import PLAN, values_of
from tuner.search.prior import ignore_progress, initial_posterior
from tuner.space.enumeration import Space, build_space, launchable
from tuner.space.fewer_hosts import IDLE_HOSTS
from tuner.storage.history import past_of

MOST_KEPT = 64
"""Number of configurations considered in a cluster state: those predicted to be fastest before any trial."""

MOST_SIZES = 2
"""Number of host counts for which an interval has its own setups if hosts are missing or slow: those predicted to be
fastest.
"""

LEAST_WORK, LEAST_WORK_MIXED = 0.8, 0.4
"""Lower bounds on a step's device seconds on fewer hosts, relative to the fastest step on the nominal cluster; the
second is for unlike devices. Numbers of hosts that could not be faster even so are not considered (assumed).
"""

MOST_SETS = 6
"""Largest number of host sets with setups in one interval: its own, then those of its neighbours in time."""

MOST_CORRECTED = 24
"""Number of cluster states in which trials correct the predictions individually. If there are more, the most dissimilar
ones are corrected; each other state takes the corrections of the most similar one with the same hosts.
"""

FARTHEST = 1.6
"""Factor over the fastest setup of an interval; sets of hosts whose fastest setup is predicted slower are dropped.
Trials rarely correct a ratio of predictions by as much, and changing the configuration saves only minutes.
"""

Hosts = tuple[int, ...]
"""Numbers of hosts of the nominal cluster, ascending."""

ClusterState = tuple[Cluster, Cluster]
"""Cluster that some hosts form nominally, and the cluster that they form in a state of the network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Configuration on some hosts.

    Attributes:
        hosts: Hosts that the configuration occupies.
        config: Configuration that runs on all devices of the hosts.
    """

    hosts: Hosts
    config: ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """Sequence of changes of the cluster.

    Attributes:
        trace: Events that change the cluster.
        intervals: Time intervals between the events.
    """

    trace: Trace
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Expected figures of a setup in an interval.

    Attributes:
        step_time_s: Expected time of one step [s].
        state_bytes: Weights and optimizer states of one device [bytes].
        devices_per_host: Number of devices that share a host's bandwidth to the storage.
        nic_bytes_per_s: Bandwidth of one device to other hosts, of the slowest group [bytes/s].
    """

    step_time_s: float
    state_bytes: float
    devices_per_host: int
    nic_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Options:
    """Setups that may run, with their expected figures.

    Attributes:
        setups: Setups in a fixed order [o].
        figures: Figures for every course and interval of the setups that can run there, by their index in `setups`.
        num_states: Number of cluster states that were priced.
        num_trials: Number of the study's trials that corrected the prices.
    """

    setups: tuple[Setup, ...]
    figures: tuple[tuple[Mapping[int, Figures], ...], ...]
    num_states: int
    num_trials: int


def cluster_of(nominal: Cluster, trace: Trace, time_s: float, hosts: Hosts) -> Cluster:
    """Return some hosts of the cluster at a time as a cluster of their own; none of them may be lost then."""
    # Hosts that are not wanted are treated as lost, on top of the trace's own losses.
    before = tuple(event for event in trace.events if event.time_s <= time_s)
    lost = set(lost_hosts(trace, time_s))
    left_out = [host for host in range(nominal.num_hosts) if host not in hosts and host not in lost]
    absent = tuple(HostEvent(time_s=time_s, host=host, is_lost=True) for host in left_out)
    return cluster_at(nominal, Trace(events=before + absent), time_s)


def fastest_hosts(interval: Interval, count: int) -> Hosts:
    """Choose `count` hosts of an interval by repeatedly removing the host with the slowest network.

    Among equally slow hosts those are kept that are equally many of few domains; else the last one is removed.
    """
    cluster = interval.cluster
    # Bandwidth of each host's NICs; a slow pair limits both of its hosts while both remain.
    nic = np.repeat(
        [sum(link.bandwidth_bytes_per_s for link in group.nic_links) for group in cluster.groups],
        [group.hosts for group in cluster.groups],
    )
    left = list(range(len(interval.hosts)))
    kept = {*choose_hosts(left, [0] * len(left), cluster.host_domain().tolist(), count)}
    while len(left) > count:
        worst = {host: float(nic[host]) for host in left}
        for pair in cluster.slow_pairs:
            ends = (pair.first_host, pair.second_host)
            if worst.keys() >= {*ends}:
                for host in ends:
                    worst[host] = min(worst[host], pair.share * float(min(nic[list(ends)])))
        left.remove(min(left, key=lambda host: (worst[host], host in kept, -host)))
    return tuple(interval.hosts[host] for host in left)


def has_slow_hosts(interval: Interval, nominal: Cluster) -> bool:
    """Check whether some hosts have a slower network than others, unlike in the nominal cluster."""
    return bool(interval.cluster.slow_pairs) or len(interval.cluster.groups) > len(nominal.groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """Configurations of a cluster state that are predicted to be fastest before any trial.

    Attributes:
        configs: At most MOST_KEPT configurations, fastest first; those that do not fit in memory come last.
        best_s: Step time of the first configuration [s]; inf without one.
    """

    configs: tuple[ParallelConfig, ...]
    best_s: float


class Pricing:
    """Enumeration and pricing of one study's setups; repeated queries are computed once."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.nominal = prepared, prepared.problem.cluster
        self.all_hosts: Hosts = tuple(range(self.nominal.num_hosts))
        self._spaces: dict[Cluster, Space] = {}
        self._ranked: dict[ClusterState, Ranked] = {}

    def base(self, hosts: Hosts) -> Cluster:
        """Return the cluster that some hosts form nominally."""
        return cluster_of(self.nominal, Trace(events=()), 0.0, hosts)

    def space_on(self, cluster: Cluster) -> Space:
        """Enumerate the study's candidates on a nominal cluster of some hosts."""
        if cluster not in self._spaces:
            if cluster == self.nominal:
                self._spaces[cluster] = self.prepared.space
            else:
                setting, options = (
                    replace(self.prepared.problem.setting, cluster=cluster),
                    self.prepared.problem.options,
                )
                # the sets of hosts are chosen here already
                options = replace(options, uneven=tuple(part for part in options.uneven if part != IDLE_HOSTS))
                try:
                    self._spaces[cluster] = build_space(setting, options, current=None)
                except ConfigError as error:
                    raise error.in_file(self.prepared.request.file) from None
        return self._spaces[cluster]

    def ranked(self, state: ClusterState) -> Ranked:
        """Rank the configurations of a cluster state by predicted step time."""
        if state not in self._ranked:
            base, cluster = state
            space, setting = self.space_on(base), self.prepared.problem.setting
            self._ranked[state] = Ranked(configs=(), best_s=math.inf)
            if len(space.grid):
                changed = replace(setting, cluster=cluster)
                step_time_s = estimate_step(changed, space.grid, memory=space.memory).step_time_s
                misfit = ~space.memory.fits(self.prepared.problem.options.memory_headroom)
                # Configurations that are predicted not to fit are kept, last: trials may have shown that they do fit.
                order = np.lexsort((step_time_s, misfit))[:MOST_KEPT]
                configs = tuple(map(space.grid.config, order.tolist()))
                self._ranked[state] = Ranked(configs=configs, best_s=float(step_time_s[order[0]]))
        return self._ranked[state]

    def state_of(self, trace: Trace, interval: Interval, hosts: Hosts) -> ClusterState:
        """Return the cluster state that some hosts form in an interval."""
        return self.base(hosts), cluster_of(self.nominal, trace, interval.from_s, hosts)

    def host_sets(self, trace: Trace, interval: Interval) -> tuple[Hosts, ...]:
        """Choose the sets of hosts on which setups are searched in an interval, fastest first."""
        if len(interval.hosts) == len(self.all_hosts) and not has_slow_hosts(interval, self.nominal):
            return (self.all_hosts,)
        nominal_s = self.ranked((self.nominal, self.nominal)).best_s
        least_work = LEAST_WORK if len(self.nominal.devices) == 1 else LEAST_WORK_MIXED
        # Lower bound on a step's device seconds, from the nominal cluster: once it exceeds the best step time on
        # more hosts, fewer hosts cannot be faster.
        device_s = least_work * nominal_s * self.nominal.num_devices if math.isfinite(nominal_s) else 0.0
        found: list[tuple[float, Hosts]] = []
        for count in range(len(interval.hosts), 0, -1):
            hosts = fastest_hosts(interval, count)
            if found and device_s / self.base(hosts).num_devices >= min(found)[0]:
                break
            # Sets of hosts on which no configuration fits have no setups.
            memory = self.space_on(self.base(hosts)).memory
            if memory.fits(self.prepared.problem.options.memory_headroom).any():
                found.append((self.ranked(self.state_of(trace, interval, hosts)).best_s, hosts))
        return tuple(hosts for _, hosts in sorted(found)[:MOST_SIZES])

    def smaller(self, config: ParallelConfig, interval: Interval) -> Setup | None:
        """Reduce data parallelism so that a configuration runs on as many hosts of an interval as it can occupy.

        Returns:
            Setup with the same degrees except dp; None if no such configuration can be launched and fits in memory.
        """
        rest = config.num_devices // config.dp
        for count in range(len(interval.hosts), 0, -1):
            hosts = fastest_hosts(interval, count)
            setting = replace(self.prepared.problem.setting, cluster=self.base(hosts))
            devices = setting.cluster.num_devices
            # The degrees except dp must divide the devices, and the expert-parallel groups must divide the new dp.
            if devices % rest or devices >= self.nominal.num_devices or (devices // rest) % config.ep:
                continue
            # an order of hosts numbers those of the nominal cluster
            chosen = replace(config, dp=devices // rest, assignment=replace(config.assignment, hosts=()))
            if not launchable(setting, chosen):
                continue
            grid = ConfigGrid.from_configs([chosen], self.prepared.problem.options.opened)
            memory = estimate_memory(setting, grid)
            if memory.fits(self.prepared.problem.options.memory_headroom)[0]:
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
    """Collect the setups that may run in some interval, with their expected figures in each interval.

    Args:
        pricing: Pricing of the study.
        courses: Possible sequences of cluster changes.
        besides: Setups to price in addition to those predicted to be fast.
        study: Study with its trials; None before its first trial.
        on_progress: Function called with a line of text before each step that takes seconds.
    """
    state_in: dict[tuple[int, int, Hosts], ClusterState] = {}
    seen: set[ClusterState] = set()
    # Cluster states of every interval: sets that are too slow there are dropped, unless they are asked for.
    asked = {setup.hosts for setup in besides}
    for number, course in enumerate(courses):
        for at, sets in enumerate(_available_host_sets(pricing, course, besides)):
            there = {hosts: pricing.state_of(course.trace, course.intervals[at], hosts) for hosts in sets}
            best_s = {hosts: pricing.ranked(state).best_s for hosts, state in there.items()}
            limit_s = FARTHEST * min(best_s.values(), default=math.inf)
            state_in |= {
                (number, at, hosts): state
                for hosts, state in there.items()
                if hosts in asked or best_s[hosts] < limit_s
            }
            if len(seen) // 100 < len(seen | {*there.values()}) // 100:
                on_progress(f"priced {len(seen | {*there.values()}):,} states of the cluster")
            seen |= {*there.values()}
    states = list(dict.fromkeys(state_in.values()))
    # Configurations to price on each nominal cluster: all its states share them, so that they can be compared.
    pool: dict[Cluster, dict[ParallelConfig, None]] = {}
    for setup in besides:
        pool.setdefault(pricing.base(setup.hosts), {})[setup.config] = None
    for state in states:
        pool.setdefault(state[0], {}).update(dict.fromkeys(pricing.ranked(state).configs))
    found, num_trials = _price_states(pricing, states, pool, study, on_progress)
    place: dict[Setup, int] = {}
    figures: list[list[dict[int, Figures]]] = [[{} for _ in course.intervals] for course in courses]
    for (number, at, hosts), state in state_in.items():
        for config, one in found[state].items():
            figures[number][at][place.setdefault(Setup(hosts=hosts, config=config), len(place))] = one
    return Options(
        setups=tuple(place),
        figures=tuple(tuple(course) for course in figures),
        num_states=len(states),
        num_trials=num_trials,
    )


def _available_host_sets(pricing: Pricing, course: Course, besides: Sequence[Setup]) -> list[list[Hosts]]:
    """List the sets of hosts with setups in every interval: its own, its neighbours', and those of `besides`."""
    own = [list(pricing.host_sets(course.trace, interval)) for interval in course.intervals]
    there = [set(interval.hosts) for interval in course.intervals]
    # Forward, then backward in time: a setup that runs in a neighbouring interval may continue without a change.
    for order in (range(1, len(own)), range(len(own) - 2, -1, -1)):
        for at in order:
            neighbour = own[at - 1 if order.step > 0 else at + 1]
            more = [hosts for hosts in neighbour if hosts not in own[at] and there[at] >= {*hosts}]
            own[at] += more[: max(MOST_SETS - len(own[at]), 0)]
    for at, sets in enumerate(own):
        wanted = dict.fromkeys(setup.hosts for setup in besides)
        sets += [hosts for hosts in wanted if hosts not in sets and there[at] >= {*hosts}]
    return own


def _price_states(
    pricing: Pricing,
    states: Sequence[ClusterState],
    pool: Mapping[Cluster, Mapping[ParallelConfig, None]],
    study: Study | None,
    on_progress: Callable[[str], None],
) -> tuple[dict[ClusterState, dict[ParallelConfig, Figures]], int]:
    """Compute the figures of the pool's configurations that can run in each state, and the number of trials used."""
    prepared, setting = pricing.prepared, pricing.prepared.problem.setting
    opened, headroom = prepared.problem.options.opened, prepared.problem.options.memory_headroom
    trials = [] if study is None else study.get_trials(deepcopy=False)
    dimensions = {*prepared.problem.dimensions} - {PLAN}  # a trial without it ran the plan by hand
    tried = dict.fromkeys(
        prepared.problem.config_of(values_of(trial)) for trial in trials if dimensions <= trial.params.keys()
    )
    # The study's own candidates come first; in the nominal state they serve as the state's candidates.
    own = list(dict.fromkeys([*pool.get(pricing.nominal, {}), *tried]))
    own_grid = ConfigGrid.from_configs(own, opened)
    grids = [ConfigGrid.from_configs(list(pool[base]), opened) for base, _ in states]
    memories = [
        estimate_memory(replace(setting, cluster=cluster), grid)
        for (_, cluster), grid in zip(states, grids, strict=True)
    ]
    observations = observations_on(own_grid, trials)
    # Without observations or history the posterior equals the predictions, so pricing skips the surrogate.
    knows = bool(own) and (observations.num_decisions > 0 or bool(prepared.request.history.entries))
    predicted_s = [
        estimate_step(replace(setting, cluster=cluster), grid, memory=memory).step_time_s
        for (_, cluster), grid, memory in zip(states, grids, memories, strict=True)
    ]
    if not knows:
        return {
            state: _figures(state[1], list(pool[state[0]]), step_time_s, memory.fits(headroom), memory)
            for state, step_time_s, memory in zip(states, predicted_s, memories, strict=True)
        }, 0
    # The logarithms compare states, and transfer corrections from a representative.
    log_prior_s = list(map(np.log, predicted_s))
    stands_for = _representatives([base for base, _ in states], log_prior_s)
    corrected = sorted(set(stands_for))
    # Rows of the surrogate: the study's own candidates, then those of each corrected state but the nominal one.
    starts, end = {}, len(own)
    for at in corrected:
        is_own = states[at] == (pricing.nominal, pricing.nominal)
        starts[at] = 0 if is_own else end
        end += 0 if is_own else len(grids[at])
    trials_told = f"{observations.num_decisions:,} trials correct the predictions"
    on_progress(f"{trials_told} on {len(corrected):,} of {len(states):,} states of the cluster")
    changed = [at for at, start in starts.items() if start]
    # A configuration on degraded but complete hosts shares its independent residual with the nominal one.
    same_as = np.arange(end)
    for at in changed:
        if states[at][0] == pricing.nominal:
            same_as[starts[at] : starts[at] + len(grids[at])] = np.arange(len(grids[at]))
    measured = prepared.problem.subject.measured_setting
    posterior = initial_posterior(
        [(measured, np.arange(len(own)))],
        concatenate([own_grid, *(grids[at] for at in changed)]),
        past_of(prepared.request),
        other_clusters=[
            (
                replace(measured, setting=replace(measured.setting, cluster=states[at][1])),
                np.arange(starts[at], starts[at] + len(grids[at])),
            )
            for at in changed
        ],
        on_progress=on_progress,
    )
    expected = posterior.expected(observations, same_as)
    ran = np.isin(same_as, sorted(observations.explored))
    found = {}
    for at, (state, memory) in enumerate(zip(states, memories, strict=True)):
        of = stands_for[at]
        rows = slice(starts[of], starts[of] + len(grids[of]))
        # A configuration can run if its expected memory fits or a trial of it has run. Its step time is the
        # posterior mean of its representative, shifted by the difference of the predictions (in logarithms).
        room = np.log((1 - headroom) * memory.capacity_bytes)
        can_run = ((expected.log_needed[rows] <= room) | ran[rows]) & ~expected.is_broken[rows]
        step_time_s = np.exp(expected.log_step_s[rows] + log_prior_s[at] - log_prior_s[of])
        found[state] = _figures(state[1], list(pool[state[0]]), step_time_s, can_run, memory)
    return found, observations.num_decisions


def _representatives(bases: Sequence[Cluster], values: Sequence[FloatArray]) -> list[int]:
    """Assign each cluster state a representative with the same base; itself if there are at most MOST_CORRECTED states.

    The values of states with the same base have the same shape. The first state of each base represents itself. Further
    representatives are chosen one by one: always the state that is farthest from its representative (farthest-point
    clustering).
    """
    # The list is reversed so that the first state of each base wins.
    first = {base: at for at, base in reversed(list(enumerate(bases)))}
    stands_for = [first[base] for base in bases]
    away = np.array([_distance(values[at], values[of]) for at, of in enumerate(stands_for)])
    num_chosen = len(first)
    while num_chosen < max(min(MOST_CORRECTED, len(bases)), len(first)):
        new = int(np.argmax(away))
        if away[new] == 0:  # every other state equals its representative
            break
        for at, base in enumerate(bases):
            if base == bases[new] and (distance := _distance(values[at], values[new])) < away[at]:
                stands_for[at], away[at] = new, distance
        num_chosen += 1
    return stands_for


def _distance(one: FloatArray, other: FloatArray) -> float:
    """Compute the largest absolute difference of two rows of values."""
    return float(np.max(np.abs(one - other), initial=0.0))


def _figures(
    cluster: Cluster,
    configs: Sequence[ParallelConfig],
    step_time_s: FloatArray,
    can_run: NDArray[np.bool_],
    memory: MemoryEstimate,
) -> dict[ParallelConfig, Figures]:
    """Collect the figures of the configurations that can run in a cluster state."""
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
