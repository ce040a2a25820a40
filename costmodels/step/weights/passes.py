"""Passes over gradients and optimizer states whose time is set by memory bandwidth.

Letters: c kinds of stages, w rows of weights (see `placement.Pipeline`).
"""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.optimizers.contract import Widths
from costmodels.optimizers.registry import OPTIMIZERS
from costmodels.step.placement import LocalParameters, sharded_parameters
from costmodels.step.weights.kept_parts import KeptParts
from hardware.arrays import FloatArray

GRADIENT_PASS_BYTES = 10
"""Bytes that an optimizer's step moves per parameter it owns beside its states: the fp32 gradient read (4), and once
more for its norm (4), and the 16-bit weight written (2)."""


def accumulation_s(
    runtime: RuntimeProfile, weights: ConfigGrid, local: LocalParameters, memory_bandwidth: FloatArray
) -> FloatArray:
    """Compute the time to add up the gradients of one micro-batch, beyond its products [s], [c, w].

    Args:
        runtime: Runtime profile; it says how gradients are kept.
        weights: Rows of weights [w].
        local: Parameters on one rank.
        memory_bandwidth: Memory bandwidth of the slowest device of each kind of stage [bytes/s], [c].
    """
    reached = runtime.memory_efficiency * memory_bandwidth[:, None]
    return np.asarray(_accumulated_bytes(runtime, weights) * (local.dense + local.expert) / reached)


def optimizer_pass_s(
    job: TrainingJob,
    runtime: RuntimeProfile,
    weights: ConfigGrid,
    local: LocalParameters,
    kept: KeptParts | None,
    memory_bandwidth: FloatArray,
) -> FloatArray:
    """Compute the time of the passes of the optimizer's step on each stage [s], [c, w].

    Args:
        job: Training job.
        runtime: Runtime profile; it says how wide states are.
        weights: Rows of weights [w].
        local: Parameters on one rank.
        kept: The parameters whose states it keeps, by parts; None if the optimizer treats all parts alike.
        memory_bandwidth: Memory bandwidth of the slowest device of each kind of stage [bytes/s], [c].
    """
    widths = Widths(runtime.main_weight_bytes, runtime.first_moment_bytes, runtime.second_moment_bytes)
    if kept is None:
        optimizer = OPTIMIZERS[job.optimizer]
        # From ZeRO 1 on each rank updates its shard alone.
        owned = np.where(weights.zero_stage >= 1, sharded_parameters(weights, local), local.dense + local.expert)
        # the optimizer's own weight and its states are read and written
        states = widths.weight + optimizer.state_bytes("matrix", widths)
        moved = (GRADIENT_PASS_BYTES + optimizer.further_bytes("matrix") + 2 * states) * owned
    else:
        moved = kept.moved_bytes(job, widths, GRADIENT_PASS_BYTES)
    return np.asarray(moved / (runtime.memory_efficiency * memory_bandwidth[:, None]))


def _accumulated_bytes(runtime: RuntimeProfile, weights: ConfigGrid) -> FloatArray:
    """Return the bytes per parameter that one micro-batch moves beyond its products to add up gradients [w].

    Inside the product, the fp32 (or 16-bit) sum is read and written where a bare product writes 2 bytes. In a pass of
    its own the product's result is read once more. Under ZeRO 3 nothing is added up: the gathered weights and the whole
    gradients are copied into and out of the collectives' buffers, forward and backward (FSDP2, copy-in and copy-out).
    """
    sum_bytes = runtime.gradient_message_bytes
    own = 2.0 * sum_bytes - 2.0 if runtime.fused_accumulation else 2.0 + 2.0 * sum_bytes
    copies = 2 * 4.0 + 2.0 + sum_bytes
    return np.where(weights.zero_stage == 3, copies, own)
