"""Overheads of a step beside its passes, traffic and optimizer: stalls, stragglers, data loading and logging.

Letters: n configurations.
"""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.normal_distribution import normal_cdf
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster


def overhead_s(
    setting: Setting, grid: ConfigGrid, pipeline_domains: IntArray, memory: MemoryEstimate | None, passes_s: FloatArray
) -> FloatArray:
    """Compute the overheads of every configuration [n].

    Args:
        setting: Job, cluster and runtime. A cluster of more domains waits longer for its slowest.
        grid: Configurations [n].
        pipeline_domains: Number of domains that a pipeline spans [n].
        memory: Memory of the same configurations, if it is known.
        passes_s: Sum of all other parts of the step [n].
    """
    runtime = setting.runtime
    num_micro_batches = setting.job.global_batch_size // (grid.dp * grid.mbs)
    ways = np.where(grid.pp == 2, 1.0, 2.0)  # each of two stages receives only one way
    stalled = stalled_share(setting.cluster, runtime, pipeline_domains, memory)
    stalls_s = ways * runtime.stall_s * (num_micro_batches + grid.pp - 1) * stalled
    # The slowest of many domains sets the pace: its delay grows with the logarithm of their number (fitted to domains).
    waits = runtime.straggler_share * np.log2(setting.cluster.num_domains)
    return np.asarray(stalls_s + runtime.step_overhead_s + waits * passes_s)


def stalled_share(
    cluster: Cluster, runtime: RuntimeProfile, pipeline_domains: IntArray, memory: MemoryEstimate | None
) -> FloatArray:
    """Estimate the share of micro-batches that stall [n].

    If the peak with its fragmentation exceeds the device, PyTorch's allocator gives cached blocks back and asks the
    driver again, which waits for the device (PyTorch CUDA notes, memory management, num_alloc_retries). Whether that
    happens is as uncertain as the memory. In the Ultra-Scale Playbook, 31 of the 37 runs whose peak was predicted above
    the device lost a second per micro-batch. So did 108 of the 110 pipelines over 64 hosts, for a reason that their
    source does not give.
    """
    # P(peak > capacity) under a lognormal error of the predicted memory.
    stalled = np.zeros(len(pipeline_domains))
    if memory is not None:
        stalled = normal_cdf(np.log(memory.peak_bytes / memory.capacity_bytes) / runtime.memory_error)
    if runtime.stalled_hosts:
        stalled = np.maximum(stalled, (pipeline_domains > 1) & (cluster.num_domains >= runtime.stalled_hosts))
    return np.asarray(stalled, dtype=np.float64)
