"""Simulated step times of several configurations, quickly enough to check the leaders of a ranking.

A long step repeats itself: once the pipeline is full, each further micro-batch takes as long as the one before. Of a
step of many micro-batches two short ones are simulated, and the rest is what the longer one takes more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.operators.kernels import CollectiveTime, KernelTime, collective_s, kernel_s
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory import MemoryEstimate
from costmodels.step.schedules import of_round
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster

LEADERS = 30
"""Number of leaders of a ranking that are worth simulating: it takes a second or two."""

SHORT_ROUNDS = (3, 5)
"""Rounds of micro-batches of the two short steps. Filling and emptying the pipeline take less than two rounds each."""


def is_worth_simulating(cluster: Cluster) -> bool:
    """Return whether stages may be unlike on this cluster, or share links: the closed form is then rough."""
    shares_adapters = any(link.sharers > 1 for group in cluster.groups for link in group.nic_links)
    return cluster.has_unlike_links or shares_adapters


def simulated_times_s(
    setting: Setting,
    grid: ConfigGrid,
    at: IntArray,
    *,
    memory: MemoryEstimate,
    kernel_time: KernelTime = kernel_s,
    collective_time: CollectiveTime = collective_s,
    on_done: Callable[[int], object] = lambda _: None,
) -> FloatArray:
    """Simulate a step of each chosen configuration; return the step times [s], [k].

    Args:
        setting: Job, cluster and runtime.
        grid: Configurations [n].
        at: Positions of the configurations to simulate [k].
        memory: Memory of all configurations [n].
        kernel_time: Model of a kernel's time.
        collective_time: Model of a collective's time.
        on_done: Function that is told how many configurations are done.
    """
    found = np.empty(len(at))
    for number, position in enumerate(at.tolist()):
        own = memory.take(np.array([position]))

        def step_s(setting: Setting, config: ParallelConfig, own: MemoryEstimate = own) -> float:
            simulation = simulate_step(
                setting, config, kernel_time=kernel_time, collective_time=collective_time, memory=own
            )
            return simulation.step_time_s

        found[number] = _quick_step_s(setting, grid.config(position), step_s)
        on_done(number + 1)
    return found


def _quick_step_s(
    setting: Setting, config: ParallelConfig, step_s: Callable[[Setting, ParallelConfig], float]
) -> float:
    """Return a step's time, from two short steps if these have fewer micro-batches together."""
    job, replicas = setting.job, config.dp * config.mbs
    micro_batches = job.global_batch_size // replicas
    size = config.pp if config.vpp == 1 else int(of_round(np.array(micro_batches), config.pp))
    short, longer = (rounds * size for rounds in SHORT_ROUNDS)
    if config.assignment.micro_batches or short + longer >= micro_batches:
        return step_s(setting, config)
    times_s = [
        step_s(replace(setting, job=replace(job, global_batch_size=number * replicas)), config)
        for number in (short, longer)
    ]
    return times_s[1] + (times_s[1] - times_s[0]) / (longer - short) * (micro_batches - longer)
