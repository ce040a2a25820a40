"""Features of a configuration for the step-time surrogate: quantities whose prediction errors are likely to be shared.

All columns are scaled so that a distance of one is a change that an engineer would call large.
"""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import residual_tokens
from costmodels.step.placement import spanned_domains
from costmodels.step.step_time import StepEstimate
from hardware.arrays import FloatArray
from hardware.cluster import Cluster

FEATURES = (
    "log_pp",
    "log_tp",
    "log_replicas",
    "log_cp_up",
    "log_vpp",
    "log_ep",
    "log_mbs",
    "log_micro_batches",
    "log_tokens",
    "tp_spans_hosts",
    "recompute",
    "place_of_states",
    "exposed_share",
    "bubble_share",
)


def configuration_features(job: TrainingJob, cluster: Cluster, grid: ConfigGrid, estimate: StepEstimate) -> FloatArray:
    """Compute the features of every configuration [n, len(FEATURES)]."""
    octaves = 3.0  # a factor of eight is a large change
    log = {name: np.log2(getattr(grid, name)) / octaves for name in ("pp", "tp", "cp", "up", "vpp", "ep", "mbs")}
    replicas = grid.dp * grid.cp * grid.up
    micro_batches = job.global_batch_size / (grid.dp * grid.mbs)
    # communication that is not hidden, whatever its dimension
    exposed = sum(estimate.breakdown_s[part] for part in ("tp", "cp", "up", "ep", "dp", "pp"))
    # ZeRO: the change from no sharding to stage 1 counts more than each further stage, and as much as one to the host
    columns = (
        log["pp"],
        log["tp"],
        np.log2(replicas) / octaves,
        log["cp"] + log["up"],
        log["vpp"],
        log["ep"],
        log["mbs"],
        np.log2(micro_batches) / octaves,
        np.log2(residual_tokens(job, grid)) / octaves,
        (spanned_domains(cluster, grid, "tp") > 1).astype(np.float64),
        grid.recompute / 2.0,
        np.minimum(grid.zero_stage, 1) + grid.zero_stage / 6.0 + grid.is_offloaded,
        2.0 * exposed / estimate.step_time_s,
        2.0 * estimate.breakdown_s["bubble"] / estimate.step_time_s,
    )
    return np.stack(columns, axis=1)
