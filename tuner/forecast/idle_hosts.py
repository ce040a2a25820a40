"""Cost of hosts that a configuration leaves idle, in words and as JSON."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ParallelConfig
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from tuner.forecast.candidates import Candidates, candidates_of, predict_candidate
from tuner.forecast.ranked import Ranked
from tuner.space.fewer_hosts import is_on_fewer, leaves_hosts_idle
from tuner.subject.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleHosts:
    """Hosts that a configuration leaves idle.

    Attributes:
        hosts: Numbers of the idle hosts, ascending.
        of_groups: Names of the groups with idle hosts, each with its number of idle hosts and of all its hosts.
        device_share: Share of the cluster's devices that are idle.
        gain: Ratio of the shortest step on all hosts to the configuration's step; None if nothing fits on all hosts.
        is_predicted: Whether the gain is that of the predictions, whatever trials measured.
    """

    hosts: tuple[int, ...]
    of_groups: tuple[tuple[str, int, int], ...]
    device_share: float
    gain: float | None
    is_predicted: bool

    @property
    def in_words(self) -> str:
        """Sentence that names the idle hosts, their gain and their share of the devices."""
        idle = " and ".join(f"{count} of {of} {name} hosts" for name, count, of in self.of_groups)
        gain = "no layout that uses all hosts fits"
        if self.gain is not None:
            source = "predicted to be " if self.is_predicted else ""
            gain = f"{source}{self.gain:.2f} times as fast as the best layout that uses all"
        return f"leaves {idle} idle: {gain}; idle devices {self.device_share:.0%} of the cluster"

    def as_json(self) -> dict[str, Any]:
        """Return the figures by the keys of JSON."""
        return {"hosts": list(self.hosts), "device_share": self.device_share, "gain": self.gain}


def idle_hosts_of(problem: Problem, chosen: ParallelConfig) -> IdleHosts | None:
    """Return the hosts that a configuration leaves idle and what that gains by the predictions; None if it uses all."""
    if not is_on_fewer(problem.cluster, chosen.assignment.hosts):
        return None
    found = candidates_of(problem)
    fits = found.space.memory.fits(problem.options.memory_headroom)
    step_time_s = float(predict_candidate(problem, chosen)["step_time_s"])
    best_s = best_on_all_s(problem, found, found.estimate.step_time_s, fits)
    return _idle_hosts(problem, chosen, step_time_s, best_s, is_predicted=True)


def idle_hosts_of_first(problem: Problem, candidates: Candidates, ranked: Ranked) -> IdleHosts | None:
    """Return the hosts that the first candidate of a ranking leaves idle and what that gains; None if it uses all."""
    first = int(ranked.order[0])
    chosen = candidates.space.grid.config(first)
    if not is_on_fewer(problem.cluster, chosen.assignment.hosts):
        return None
    # a simulated step is compared with simulated ones only
    comparable = ranked.fits & (ranked.is_simulated | ~ranked.is_simulated[first])
    best_s = best_on_all_s(problem, candidates, ranked.step_time_s, comparable)
    if not math.isfinite(best_s):
        return idle_hosts_of(problem, chosen)
    return _idle_hosts(problem, chosen, float(ranked.step_time_s[first]), best_s, is_predicted=False)


def best_on_all_s(problem: Problem, candidates: Candidates, step_time_s: FloatArray, fits: NDArray[np.bool_]) -> float:
    """Return the shortest step time of the candidates that fit and use all hosts [s]; inf without any."""
    is_on_all = ~leaves_hosts_idle(problem.cluster, candidates.space.grid)
    return float(step_time_s[is_on_all & fits].min(initial=math.inf))


def notes_on_idle_hosts(problem: Problem, chosen: ParallelConfig) -> tuple[str, ...]:
    """Return the sentence on the hosts that a configuration leaves idle, as a note on its flags."""
    found = idle_hosts_of(problem, chosen)
    return () if found is None else (f"hosts: this layout {found.in_words}",)


def _idle_hosts(
    problem: Problem, chosen: ParallelConfig, step_time_s: float, on_all_s: float, *, is_predicted: bool
) -> IdleHosts:
    cluster = problem.cluster
    used = set(chosen.assignment.hosts)
    idle = tuple(host for host in range(cluster.num_hosts) if host not in used)
    return IdleHosts(
        hosts=idle,
        of_groups=_by_group(cluster, idle),
        device_share=1 - chosen.num_devices / cluster.num_devices,
        gain=on_all_s / step_time_s if math.isfinite(on_all_s) else None,
        is_predicted=is_predicted,
    )


def _by_group(cluster: Cluster, idle: tuple[int, ...]) -> tuple[tuple[str, int, int], ...]:
    """Return the number of idle hosts of each group that has some, and of all its hosts; equal names are joined."""
    found: dict[str, list[int]] = {}
    number = itertools.count()
    for group in cluster.groups:
        hosts = list(itertools.islice(number, group.hosts))
        counts = found.setdefault(group.name, [0, 0])
        counts[0] += len(set(hosts) & set(idle))
        counts[1] += len(hosts)
    return tuple((name, count, of) for name, (count, of) in found.items() if count)
