"""Simulated step times of several configurations, quickly enough to check the leaders of a ranking.

A long step repeats itself: once the pipeline is full, each further micro-batch takes as long as the one before. Of a
step of many micro-batches two short ones are simulated, and the rest is what the longer one takes more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.setting import Setting
from costmodels.operators.kernels import CollectiveTime, KernelTime, collective_s, kernel_s
from costmodels.simulator.simulated_step import PricedStep, price_step
from costmodels.simulator.stage_work import price_operators
from costmodels.simulator.steady_state import repetition_s
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
    configs = [grid.config(position) for position in at.tolist()]
    prices = price_operators(setting, configs, kernel_time)
    for number, config in enumerate(configs):
        step = price_step(setting, config, prices=prices, collective_time=collective_time)
        makespan_s = _makespan_s(step)
        overhead_s = step.overhead_s(makespan_s, memory.take(at[[number]]))
        found[number] = (makespan_s + overhead_s) * step.unexplained
        on_done(number + 1)
    return found


def _makespan_s(step: PricedStep) -> float:
    """Return the time of a step's tasks, from one or two short steps if these suffice [s]."""
    config, numbers = step.config, [kind.micro_batches for kind in step.replicas]
    whole, num_kinds = numbers[0], len(numbers)
    size = config.pp if config.vpp == 1 else int(of_round(np.array(whole), config.pp))
    short, longer = (rounds * size for rounds in SHORT_ROUNDS)
    is_long = not config.assignment.micro_batches and short + longer < whole

    def run_s(number: int) -> float:
        return step.run(step.orders([number] * num_kinds))[1].makespan_s

    if config.vpp == 1:
        # Nearly all pipelines without chunks repeat themselves, micro-batch by micro-batch, from the second round on.
        least, each, is_tried = max(2 * size, 3), 1, num_kinds == 1
    else:
        # Every other pipeline with chunks repeats itself by the third round; a try must not cost more than it saves.
        least, each, is_tried = short, size, num_kinds == 1 and is_long
    known_s = {}
    if is_tried and whole > least:
        tasks, timeline = step.run(step.orders([least]))
        each_s = repetition_s(tasks, timeline, each)
        if each_s is not None:
            return timeline.makespan_s + each_s / each * (whole - least)
        known_s[least] = timeline.makespan_s
    if not is_long:
        return step.run(step.orders(numbers))[1].makespan_s
    short_s, longer_s = (known_s[number] if number in known_s else run_s(number) for number in (short, longer))
    return longer_s + (longer_s - short_s) / (longer - short) * (whole - longer)
