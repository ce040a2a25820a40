"""Exhaustive search over subsets of hosts: the oracle of layouts that leave hosts idle, for a handful of hosts.

It enumerates and prices every subset as a cluster of its own, and shares with the search nothing but the rules and the
closed form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from costmodels.job.setting import Setting
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from tuner.space.enumeration import SpaceOptions, enumerate_space


def subsets(num_hosts: int) -> Iterator[tuple[int, ...]]:
    """Yield every set of hosts but the empty one, with ascending numbers."""
    for count in range(1, num_hosts + 1):
        yield from itertools.combinations(range(num_hosts), count)


def best_on(setting: Setting, options: SpaceOptions, hosts: tuple[int, ...]) -> float:
    """Return the shortest step with even work on some hosts [s]; inf where nothing fits."""
    part = replace(setting, cluster=setting.cluster.reordered(hosts))
    grid, _ = enumerate_space(part, options)
    if not len(grid):
        return math.inf
    memory = estimate_memory(part, grid)
    seconds = estimate_step(part, grid, memory=memory).step_time_s
    return float(seconds[memory.fits(options.memory_headroom)].min(initial=math.inf))
