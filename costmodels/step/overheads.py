"""What a step takes beside its passes, its traffic and its optimizer: stalls, stragglers, data and logging.

Letters: n configurations.
"""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.step.memory import MemoryEstimate
from costmodels.step.normal_distribution import normal_cdf
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster


def overhead_s(
    job: TrainingJob,
    cluster: Cluster,
    runtime: RuntimeProfile,
    grid: ConfigGrid,
    pipeline_hosts: IntArray,
    memory: MemoryEstimate | None,
    passes_s: FloatArray,
) -> FloatArray:
    """Overheads of every configuration [n].

    Args:
        job: What is trained.
        cluster: The more hosts, the longer is the wait for the slowest of them.
        runtime: Its constants.
        grid: The configurations.
        pipeline_hosts: Hosts that a pipeline spans [n].
        memory: Memory of the same configurations, where it is known.
        passes_s: All other parts of the step [n].
    """
    num_micro_batches = job.global_batch_size // (grid.dp * grid.mbs)
    ways = np.where(grid.pp == 2, 1.0, 2.0)  # of two stages each receives only one way
    stalled = _stalled_share(cluster, runtime, pipeline_hosts, memory)
    stalls_s = ways * runtime.stall_s * (num_micro_batches + grid.pp - 1) * stalled
    waits = runtime.straggler_share * np.log2(max(cluster.num_hosts, 1))
    return np.asarray(stalls_s + runtime.step_overhead_s + waits * passes_s)


def _stalled_share(
    cluster: Cluster, runtime: RuntimeProfile, pipeline_hosts: IntArray, memory: MemoryEstimate | None
) -> FloatArray:
    """Share of the micro-batches that stall [n].

    Where the peak with its fragmentation exceeds the device, PyTorch's allocator gives cached blocks back and asks the
    driver again, which waits for the device (PyTorch CUDA notes, memory management, num_alloc_retries). Whether it does
    is as uncertain as the memory. Of the Ultra-Scale Playbook's runs whose peak was predicted above the device, 31 of
    37 lost a second per micro-batch; pipelines over 64 hosts, 108 of 110, for a reason that its source does not tell.
    """
    stalled = np.zeros(len(pipeline_hosts))
    if memory is not None:
        stalled = normal_cdf(np.log(memory.peak_bytes / memory.capacity_bytes) / runtime.memory_error)
    if runtime.stalled_hosts:
        stalled = np.maximum(stalled, (pipeline_hosts > 1) & (cluster.num_hosts >= runtime.stalled_hosts))
    return np.asarray(stalled, dtype=np.float64)
