"""Buckets in which gradients leave and weights come, where a framework fills them with whole parameters.

Megatron-LM closes a bucket with the parameter that fills it, and gives a bucket max(40 million, 1 million times the
ranks) parameters unless --ddp-bucket-size says otherwise; experts have buckets of their own. Only the first chunk of
the first stage has several: all else is one bucket (megatron-core 0.19.2, param_and_grad_buffer.py,
_compute_default_per_buffer_param_layout; training.py, resolve_ddp_bucket_size and `pp_rank > 0`).

Letters: c kinds of stages, w rows of weights (see `placement.Pipeline`).
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np

from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.training_job import TrainingJob
from costmodels.step.placement import LocalParameters, local_table
from costmodels.step.weights.matrices import layer_matrices
from hardware.arrays import FloatArray, IntArray

WHOLE_RULE_SETS = ("megatron", "mindspeed")
"""Rule sets of frameworks that fill buckets so."""
DEFAULT = 40_000_000
PER_RANK = 1_000_000


def num_buckets(
    job: TrainingJob,
    weights: ConfigGrid,
    local: LocalParameters,
    part: Literal["matrix", "expert"],
    bucket: int,
    ranks: IntArray,
) -> FloatArray:
    """Return the number of buckets of each stage [c, w]; at least 1.

    Args:
        job: Training job.
        weights: Rows of weights [w].
        local: Parameters on one rank.
        part: Experts, or all else.
        bucket: Parameters that fill a bucket.
        ranks: Number of ranks over which the part is sharded [w].
    """
    filled = np.where(bucket == DEFAULT, np.maximum(bucket, PER_RANK * ranks), bucket).astype(np.float64)
    held, buckets, counts = np.zeros(len(weights)), np.zeros(len(weights)), _block_counts(job.model)
    for matrix in layer_matrices(job, weights, joins_gate=True, splits_qkv=False):
        if matrix.part == part:
            rows, columns = matrix.local
            number = np.broadcast_to(matrix.own.each, held.shape) * counts[matrix.at]
            held += number * rows * columns
            buckets += number / np.ceil(filled / (rows * columns))
    each = np.divide(held, buckets, out=filled.copy(), where=buckets > 0)
    if part == "expert":
        whole = local.expert / each
    else:
        table = local_table(job.model, weights)
        in_tables = local.tables * table
        each_table = np.ceil(filled / np.maximum(table, 1.0))
        whole = np.maximum(local.dense - in_tables, 0.0) / each + local.tables / each_table
    return np.where(local.is_first, np.maximum(np.ceil(whole - 1e-9), 1.0), 1.0)


@cache
def _block_counts(model: ModelSpec) -> tuple[int, ...]:
    """Return how many layers of the model have each of its blocks [B]."""
    return tuple(sum(layer.count(block) for layer in model.layers) for block in model.blocks)
