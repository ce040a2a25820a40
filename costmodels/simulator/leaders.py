"""Simulated step times of several configurations, quickly enough to check the leaders of a ranking.

Once a pipeline is full, most repeat themselves exactly (steady_state.py): a short step and the time of one repetition
give the time of the whole step. Where one does not, few micro-batches are simulated whole. Of many, two short steps are
simulated, and the rest is what the longer one takes more.
"""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.simulator.simulated_step import PricedStep, imbalance_s, price_step
from costmodels.simulator.stage_prices import price_operators
from costmodels.simulator.steady_state import repetition_s
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.pipeline.schedules import of_round
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster

LEADERS = 30
"""Number of leaders of a ranking that are worth simulating: it takes 0.2 to 1.4 s on one busy core."""

SHORT_ROUNDS = (5, 7)
"""Rounds of micro-batches of the two short steps. Filling and emptying the pipeline take less than two rounds each."""


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
    """Return the time of a step's tasks, from one or two short steps if these suffice [s]."""
    config, numbers = step.config, [kind.micro_batches for kind in step.replicas]
    whole, num_kinds = numbers[0], len(numbers)
    size = config.pp if config.vpp == 1 else int(of_round(np.array(whole), config.pp))
    short, longer = (rounds * size for rounds in SHORT_ROUNDS)
    is_long = not config.assignment.micro_batches and short + longer < whole
    known_s: dict[int, float] = {}
    least, repeats = _first_try(config, whole, size, is_long=is_long)
    if num_kinds == 1 and least < whole:
        tasks, timeline = step.run(step.orders([least]))
        each_s = repetition_s(tasks, timeline, repeats)
        if each_s is not None:
            return timeline.makespan_s + each_s / repeats * (whole - least)
        known_s[least] = timeline.makespan_s
    if not is_long:
        return step.run(step.orders(numbers))[1].makespan_s
    for number in (short, longer):
        if number not in known_s:
            known_s[number] = step.run(step.orders([number] * num_kinds))[1].makespan_s
    return known_s[longer] + (known_s[longer] - known_s[short]) / (longer - short) * (whole - longer)


def _first_try(config: ParallelConfig, whole: int, size: int, *, is_long: bool) -> tuple[int, int]:
    """Return the micro-batches of the step that may repeat itself, and those of one repetition.

    As many micro-batches as the whole step has mean that a try would cost more than it saves. Of the leaders of
    benchmarks/judges/two_fidelities, 94% of those without chunks repeat themselves in their second round, after every
    micro-batch. With chunks 45% do in the third round, and 58% in the fourth, after every round.
    """
    if config.vpp == 1:
        return max(2 * size, 3), 1
    if is_long:
        return SHORT_ROUNDS[0] * size, size
    return (4 * size if whole >= 8 * size else whole), size
