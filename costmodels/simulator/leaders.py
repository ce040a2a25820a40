"""Simulated step times of several configurations, quickly enough to check the leaders of a ranking.

Once a pipeline is full, most repeat themselves exactly (steady_state.py): a short step and the time of one repetition
give the time of the whole step. Where one does not, few micro-batches are simulated whole. Of many, a short step is
simulated, and each further round takes as long as its last one.
"""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.simulator.simulated_step import PricedStep, imbalance_s, price_step
from costmodels.simulator.stage_prices import price_operators
from costmodels.simulator.steady_state import last_round_s, repetition_s
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.pipeline.schedules import of_round
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster

LEADERS = 30
"""Number of leaders of a ranking that are worth simulating."""

SHORT_ROUNDS, LONG_ROUNDS = 5, 8
"""Rounds of micro-batches of a short step, and those from which on a step is long. Pipelines that do not repeat
themselves exactly keep their rate from the fourth round on."""


def is_worth_simulating(cluster: Cluster) -> bool:
    """Return whether stages may be unlike on this cluster, or share links: the closed form is then rough."""
    shares_adapters = any(link.sharers > 1 for group in cluster.groups for link in group.nic_links)
    return cluster.has_unlike_links or shares_adapters


def simulated_times_s(setting: Setting, grid: ConfigGrid, at: IntArray, *, memory: MemoryEstimate) -> FloatArray:
    """Simulate a step of each chosen configuration; return the step times [s], [k].

    Args:
        setting: Job, cluster and runtime.
        grid: Configurations [n].
        at: Positions of the configurations to simulate [k].
        memory: Memory of all configurations [n].
    """
    found = np.empty(len(at))
    configs = [grid.config(position) for position in at.tolist()]
    prices = price_operators(setting, configs)
    waits_s = imbalance_s(setting, grid.take(at))
    for number, config in enumerate(configs):
        step = price_step(setting, config, prices=prices)
        makespan_s = _makespan_s(step)
        overhead_s = step.overhead_s(makespan_s, memory.take(at[[number]]))
        found[number] = (makespan_s + overhead_s) * step.unexplained + waits_s[number]
    return found


def _makespan_s(step: PricedStep) -> float:
    """Return the time of a step's tasks, from a short step if it suffices [s]."""
    config, numbers = step.config, [kind.micro_batches for kind in step.replicas]
    whole, num_kinds = numbers[0], len(numbers)
    size = config.pp if config.vpp == 1 else int(of_round(np.array(whole), config.pp))
    is_long = not config.assignment.micro_batches and whole > LONG_ROUNDS * size
    least, repeats = _first_try(config, whole, size, is_long=is_long)
    if num_kinds == 1 and least < whole:
        tasks, timeline = step.run(step.orders([least]))
        each_s = repetition_s(tasks, timeline, repeats)
        if each_s is not None:
            return timeline.makespan_s + each_s / repeats * (whole - least)
    if not is_long:
        return step.run(step.orders(numbers))[1].makespan_s
    short = SHORT_ROUNDS * size
    if num_kinds > 1 or least != short:
        tasks, timeline = step.run(step.orders([short] * num_kinds))
    return timeline.makespan_s + last_round_s(tasks, timeline, size) / size * (whole - short)


def _first_try(config: ParallelConfig, whole: int, size: int, *, is_long: bool) -> tuple[int, int]:
    """Return the micro-batches of the step that may repeat itself, and those of one repetition.

    As many micro-batches as the whole step has mean that a try would cost more than it saves. Of the leaders of
    benchmarks/judges/two_fidelities, 94% of those without chunks repeat themselves in their second round, after every
    micro-batch. With chunks 45% do in the third round, and 58% in the fourth, after every round.
    """
    if config.vpp == 1:
        return max(2 * size, 3), 1
    if is_long:
        return SHORT_ROUNDS * size, size
    return (4 * size if whole >= 8 * size else whole), size
