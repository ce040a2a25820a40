"""Best prediction for each size of a cluster, or of others: how far a job scales, and how few hosts hold it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.step.energy import mean_power_w
from costmodels.step.error_models import memory_error_of
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.step_time import StepEstimate, estimate_step
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.cluster_file import MAX_DEVICES
from hardware.io.errors import ConfigError
from hardware.named_cluster import name_cluster
from tuner.forecast.planned_candidates import plan_problem
from tuner.search.objectives import ENERGY
from tuner.space.enumeration import Space, build_space
from tuner.study_file.request import StudyRequest
from tuner.subject.ability import Ability
from tuner.subject.model import tokens_per_s_per_device
from tuner.subject.problem import Problem

LEARNED, PREDICTED = "learned", "predicted"
"""Sources of a step time that no trial of its own has: trials of others, or the cost model."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judged:
    """Configurations of one cluster, as the cost model predicts them or as trials have taught.

    Attributes:
        step_time_s: Step times [s], [n].
        peak_bytes: Peak memory of the fullest device [bytes], [n].
        fits: Whether each is expected to fit and run [n].
        fit_probability: Probability that it fits, given the errors of memory [n].
        is_measured: Whether a trial of it has completed [n].
        is_learned: Whether trials have taught the figures.
        origin: Source of the step times of completed trials: `measured` or `synthetic`.
    """

    step_time_s: FloatArray
    peak_bytes: FloatArray
    fits: NDArray[np.bool_]
    fit_probability: FloatArray
    is_measured: NDArray[np.bool_]
    is_learned: bool = True
    origin: str = "measured"


Judge = Callable[[Setting, ConfigGrid, MemoryEstimate], Judged | None]
"""Function that returns configurations in a setting by what trials taught; None where they say nothing of it."""


def judge_nothing(_setting: Setting, _grid: ConfigGrid, _memory: MemoryEstimate) -> None:
    """Return None, for studies without trials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Prediction of a study's job on a number of hosts.

    Attributes:
        setting: Setting of the prediction: the study's job on this cluster.
        hosts: Number of hosts.
        devices: Number of devices of all hosts.
        config: Configuration with the shortest step, or of least energy if the study minimizes that; None if none fits.
        source: Source of its figures: `measured`, `synthetic`, `learned` from trials of others, or `predicted`.
        step_time_s: Step time of it [s]; inf without one.
        tokens_per_s_per_device: Predicted throughput of one device; 0 without one.
        peak_memory_bytes: Predicted peak of memory [bytes]; 0 without one.
        fit_probability: Probability that it fits, given the errors of predicted memory; 0 without one.
        power_w: Mean power of the cluster during the step [W]; None without one, and where no power is known.
        reason: Reason why there is no configuration; empty otherwise.
    """

    setting: Setting
    hosts: int
    devices: int
    config: ParallelConfig | None = None
    source: str = PREDICTED
    step_time_s: float = np.inf
    tokens_per_s_per_device: float = 0.0
    peak_memory_bytes: int = 0
    fit_probability: float = 0.0
    power_w: float | None = None
    reason: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether its step time is that of its own trials."""
        return self.source not in (LEARNED, PREDICTED)

    def as_json(self, dimensions: Sequence[str]) -> dict[str, Any]:
        """Return the size as an object; null stands for values that were not predicted."""
        found = self.config is not None
        return {
            "hosts": self.hosts,
            "devices": self.devices,
            "config": self.config.values(dimensions) if self.config is not None else None,
            "source": self.source if found else None,
            "step_time_s": self.step_time_s if found else None,
            "tokens_per_s_per_device": self.tokens_per_s_per_device if found else None,
            "peak_memory_bytes": self.peak_memory_bytes if found else None,
            "reason": self.reason or None,
        }


def parse_sizes(request: StudyRequest, text: str, clusters: Sequence[Cluster] = ()) -> tuple[int, ...]:
    """Return the numbers of hosts that `--hosts 2,4,8` lists, in its order.

    `4..64` stands for both ends and the powers of two between them.

    Args:
        request: Study.
        text: Text of the option.
        clusters: Clusters of equal hosts that are asked about in place of the study's own.

    Raises:
        ConfigError: An entry is no possible number of hosts, or comes twice, or a cluster has no one number.
    """
    cluster = request.problem.setting.cluster
    if rule := request.problem.subject.refusal(Ability.SIZES):
        raise ConfigError(
            rule, file=request.file, key="--hosts", value=text, nearest="use a study with a model and a job"
        )
    groups = cluster.groups
    if len(groups) > 1 and not clusters:
        raise ConfigError(
            f"needs a cluster of equal hosts, and this one has {len(groups)} groups",
            file=request.file,
            key="--hosts",
            value=text,
        )
    largest = max(each.devices_per_host for each in clusters or (cluster,))
    most = MAX_DEVICES // largest
    hosts = tuple(number for entry in text.split(",") for number in _numbers_in(entry.strip(), most))
    if len(set(hosts)) < len(hosts):
        raise ConfigError("must list each number of hosts once", key="--hosts", value=text)
    return hosts


def _numbers_in(entry: str, most: int) -> list[int]:
    """Return the numbers of hosts that one entry of a list stands for."""
    ends = entry.split("..")
    are_numbers = all(re.fullmatch(rf"[0-9]{{1,{len(str(most))}}}", end) for end in ends)
    if len(ends) > 2 or not are_numbers or not all(1 <= int(end) <= most for end in ends):
        raise ConfigError(
            f"must list numbers of hosts from 1 to {most}",
            key="--hosts",
            value=entry,
            nearest="for example 2,4,8 or 4..64",
        )
    first, last = int(ends[0]), int(ends[-1])
    if first > last:
        raise ConfigError("must ascend", key="--hosts", value=entry, nearest=f"{last}..{first}")
    powers = (1 << exponent for exponent in range(most.bit_length()))
    return sorted({first, last, *(power for power in powers if first < power < last)})


def parse_clusters(text: str) -> tuple[Cluster, ...]:
    """Return the clusters that `--clusters dgx-h100,gb200` lists, one host each: clusters of the catalog, or devices.

    Raises:
        ConfigError: An entry names neither, or comes twice.
    """
    found = tuple(_find_hosts(entry.strip()) for entry in text.split(","))
    if len(set(found)) < len(found):
        raise ConfigError("must list each cluster once", key="--clusters", value=text)
    return found


def _find_hosts(name: str) -> Cluster:
    """Return one host of the cluster of this name or, if there is none, one with devices of this name."""
    try:
        named = name_cluster(name)
    except ConfigError as error:
        if error.file:
            raise
        raise ConfigError(error.rule, key="--clusters", value=name, nearest=error.nearest) from None
    if named.devices or named.hosts:
        raise ConfigError("states a number", key="--clusters", value=name, nearest="numbers of hosts by --hosts")
    return named.with_hosts()


def best_by_size(
    problem: Problem, sizes: Sequence[int], clusters: Sequence[Cluster] = (), *, file: str, judge: Judge = judge_nothing
) -> Iterator[Size]:
    """Yield the best configuration on each number of hosts, with everything else as the study says.

    Args:
        problem: Problem of the study.
        sizes: Numbers of hosts.
        clusters: Clusters of equal hosts, on each of which every size is predicted; empty for the study's own.
        file: File of the study, for messages.
        judge: What trials taught of configurations; without trials they are predicted.

    Raises:
        ConfigError: A size has too many configurations to predict.
    """
    for each in clusters or (problem.cluster,):
        for hosts in sizes:
            cluster = each if hosts == each.num_hosts else each.with_hosts(hosts)
            try:
                found = _find_best(_problem_on(problem, cluster), cluster, judge)
            except ConfigError as error:
                raise error.in_file(file) from None
            yield found


def _problem_on(problem: Problem, cluster: Cluster) -> Problem:
    """Return the problem on a cluster of equal hosts; what was fitted to the study's own is not known of others."""
    own = problem.setting
    if not set(cluster.devices) <= set(own.cluster.devices):
        runtime = replace(own.runtime, knows_cluster=False, knows_memory=False)
        own = replace(own, runtime=runtime)
    options = problem.options
    if problem.cluster.is_mixed:  # work is uneven because hosts are unlike, and here they are alike
        opened = tuple(name for name in options.opened if name != "assignment")
        options = replace(options, uneven=(), opened=opened)
    current = problem.current
    if current is not None and current.num_devices != cluster.num_devices:
        current = None
    subject = problem.subject.with_setting(replace(own, cluster=cluster))
    return replace(problem, subject=subject, options=options, current=current)


def _find_best(problem: Problem, cluster: Cluster, judge: Judge) -> Size:
    setting, devices = problem.setting, cluster.num_devices
    try:
        cluster.devices[0].peak_flop_per_s(setting.job.precision)
    except ConfigError as error:
        reason = f"{error.key} {error.value} {error.rule}"
        return Size(setting=setting, hosts=cluster.num_hosts, devices=devices, reason=reason)
    space = build_space(setting, problem.options, current=problem.current)
    # layers are planned for candidates that fit only, because planning takes long
    fitting = np.flatnonzero(space.memory.fits(problem.options.memory_headroom))
    if len(fitting) and problem.planning.name != "megatron" and not problem.planning.is_auto:
        planned = plan_problem(problem, space.grid.take(fitting))
        setting = planned.setting
        space = build_space(setting, planned.options, current=problem.current)
    estimate = estimate_step(setting, space.grid, memory=space.memory)
    judged = judge(setting, space.grid, space.memory) if len(space.grid) else None
    if judged is None:
        judged = _predicted(problem, setting, estimate, space)
    # the space may hold configurations that do not fit, such as the current one
    fitting = np.flatnonzero(judged.fits)
    if not len(fitting):
        reason = explain_none(space, is_learned=judged.is_learned)
        return Size(setting=setting, hosts=cluster.num_hosts, devices=devices, reason=reason)
    power_w = mean_power_w(cluster, space.grid, estimate)
    # on like hosts the fastest is also the cheapest, but not always that of least energy
    value = judged.step_time_s
    if problem.objective == (ENERGY,) and power_w is not None:
        value = value * power_w
    best = int(fitting[np.argmin(value[fitting])])
    step_time_s = float(judged.step_time_s[best])
    return Size(
        setting=setting,
        hosts=cluster.num_hosts,
        devices=devices,
        config=space.grid.config(best),
        source=judged.origin if judged.is_measured[best] else LEARNED if judged.is_learned else PREDICTED,
        step_time_s=step_time_s,
        tokens_per_s_per_device=tokens_per_s_per_device(setting, step_time_s),
        peak_memory_bytes=int(judged.peak_bytes[best]),
        fit_probability=float(judged.fit_probability[best]),
        power_w=None if power_w is None else float(power_w[best]),
    )


def _predicted(problem: Problem, setting: Setting, estimate: StepEstimate, space: Space) -> Judged:
    """Return the configurations of a space as the cost model predicts them."""
    headroom, error = problem.options.memory_headroom, memory_error_of(setting.runtime)
    return Judged(
        step_time_s=estimate.step_time_s,
        peak_bytes=space.memory.peak_bytes,
        fits=space.memory.fits(headroom),
        fit_probability=space.memory.probability_of_fit(headroom, error),
        is_measured=np.zeros(len(space.grid), dtype=np.bool_),
        is_learned=False,
    )


def explain_none(space: Space, *, is_learned: bool = False) -> str:
    """Return the reason why no configuration fits."""
    if is_learned:
        return (
            f"none of the {len(space.grid):,} configurations that obey every rule is expected to fit, after the trials"
        )
    if space.num_before_memory:
        return f"none of the {space.num_before_memory:,} configurations that obey every rule fits in memory"
    rule = max(space.removed, key=lambda name: space.removed[name], default=None)
    return "no configuration obeys every rule" + (f"; {rule} removed the most" if rule else "")
