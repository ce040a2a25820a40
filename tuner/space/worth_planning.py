"""Configurations that are worth planning: uneven work costs far more than a prediction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster


def worth_planning(setting: Setting, grid: ConfigGrid, most: int, *, memory_headroom: float) -> IntArray:
    """Return the positions of the configurations that are worth planning, ascending.

    They are the `most` fastest with even work that fit and, on unlike hosts, half as many with perfectly balanced work:
    even work is as slow as the slow hosts, and so says little of what divides well. Work can be balanced between stages
    that are each on one kind of hosts; what needs more than the largest devices have, even in equal shares, cannot fit.
    On unlike hosts even work that does not fit may fit when it is uneven.
    """
    if len(grid) <= most:
        return np.arange(len(grid))
    seconds = estimate_step(setting, grid).step_time_s
    if not setting.cluster.is_mixed:
        fits = estimate_memory(setting, grid).fits(memory_headroom)
        by_even = np.argsort(np.where(fits, seconds, np.inf))[:most]
        return np.sort(by_even[fits[by_even]])
    by_even = np.argsort(seconds)[:most]
    can_balance = _has_plain_stages(setting.cluster, grid)
    can_balance &= estimate_memory(setting, grid).needed_bytes <= max(d.memory_bytes for d in setting.cluster.devices)
    by_balanced = np.argsort(np.where(can_balance, balanced_s(setting, grid), np.inf))[: most // 2]
    return np.union1d(by_even, by_balanced)


def _has_plain_stages(cluster: Cluster, grid: ConfigGrid) -> NDArray[np.bool_]:
    """Return whether there are several stages, each on hosts of one kind if these stand together [n]."""
    length = cluster.num_devices // grid.pp
    of_kind = [
        sum(group.num_devices for group, own in zip(cluster.groups, cluster.host_kinds, strict=True) if own == kind)
        for kind in set(cluster.host_kinds)
    ]
    return np.asarray((grid.pp > 1) & np.all([devices % length == 0 for devices in of_kind], axis=0))


def balanced_s(setting: Setting, grid: ConfigGrid) -> FloatArray:
    """Predict the steps of configurations if unlike hosts shared the work in proportion to their speed [s], [n].

    The speed of a kind of hosts is that of a cluster whose hosts are all of this kind.
    """
    cluster, pace = setting.cluster, np.zeros(len(grid))
    for kind in dict.fromkeys(cluster.host_kinds):
        of_kind = cluster.groups[kind]
        like = [
            replace(group, device=of_kind.device, intra_links=of_kind.intra_links, nic_links=of_kind.nic_links)
            for group in cluster.groups
        ]
        alone = replace(setting, cluster=replace(cluster, groups=tuple(like)))
        devices = sum(
            group.num_devices for group, own in zip(cluster.groups, cluster.host_kinds, strict=True) if own == kind
        )
        pace += devices / cluster.num_devices / estimate_step(alone, grid).step_time_s
    return np.asarray(1.0 / pace)
