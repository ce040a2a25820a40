"""Mean power during an optimizer step, from the parts of its predicted time and the power of the cluster's hosts.

Devices compute during the parts `compute` and `optimizer` of a step, and wait during all others: exposed communication,
bubbles, launches of the host. On unlike devices the parts are those of the whole step, so that all devices have one
share (assumed).
"""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.step.step_time import StepEstimate
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.power import cluster_power_w, idle_power_w

BUSY_PARTS = ("compute", "optimizer")
"""Parts of a step during which devices compute."""


def busy_share(estimate: StepEstimate) -> FloatArray:
    """Return the share of each step in which devices compute [n]."""
    busy_s = np.sum([estimate.breakdown_s[part] for part in BUSY_PARTS], axis=0)
    return np.asarray(np.clip(busy_s / estimate.step_time_s, 0.0, 1.0))


def mean_power_w(
    cluster: Cluster, grid: ConfigGrid, estimate: StepEstimate, *, counts_idle: bool = True
) -> FloatArray | None:
    """Return the power that a cluster draws on average in each step [W], [n]; None where a limit is unknown.

    Args:
        cluster: Cluster of the study.
        grid: Configurations [n].
        estimate: Their predicted steps.
        counts_idle: Whether hosts that a configuration leaves idle stay powered on.
    """
    # the power is linear in the share, so two evaluations give it for all configurations
    share, power_w = busy_share(estimate), np.zeros(len(grid))
    for hosts, at in grid.by_host_order():
        used = cluster.reordered(hosts)
        waiting_w, busy_w = cluster_power_w(used, 0.0), cluster_power_w(used, 1.0)
        rest = [host for host in range(cluster.num_hosts) if host not in set(hosts)] if hosts else []
        idle_w = idle_power_w(cluster.reordered(rest)) if rest and counts_idle else 0.0
        if waiting_w is None or busy_w is None or idle_w is None:
            return None
        power_w[at] = waiting_w + (busy_w - waiting_w) * share[at] + idle_w
    return power_w
