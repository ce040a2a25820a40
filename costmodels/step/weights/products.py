"""Time of the matrix products of an update, such as Muon's Newton-Schulz iterations, and of what they exchange over tp.

Each rank multiplies the matrices whose states it keeps. Of a matrix that tp cuts, a rank has a part (megatron-core
0.19.2 --muon-tp-mode; Emerging-Optimizers muon_utils.py, newton_schulz_tp): `blockwise` takes the part for a matrix of
its own, `duplicated` gathers the fp32 parts and multiplies the whole matrix on every rank, and `distributed` adds up
the 16-bit products of the parts along the dim that is cut, once per iteration.

Letters: c kinds of stages, w rows of weights (see `placement.Pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from costmodels.blocks.operator import Operator, OpKind, Phase
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, kernel_s
from costmodels.operators.layer_operators import Collective
from costmodels.optimizers.contract import MATRICES, Product
from costmodels.optimizers.registry import OPTIMIZERS
from costmodels.step.placement import Groups
from costmodels.step.weights.kept_parts import JOINING_RULE_SETS, fullest, shards_of
from costmodels.step.weights.matrices import LayerMatrix, layer_matrices
from hardware.arrays import FloatArray
from hardware.device import Device
from hardware.group_links import GroupLinks

ELEMENT_BYTES = 2
"""Size of the elements that are multiplied: bf16, or fp16 in DeepSpeed's `gram` method [bytes]."""
GATHERED_BYTES = 4
"""Size of the elements that `duplicated` gathers: the fp32 momentum [bytes]."""


def update_products_s(
    job: TrainingJob,
    runtime: RuntimeProfile,
    device: Device,
    weights: ConfigGrid,
    pieces: FloatArray,
    groups: Groups,
    collective_time: CollectiveTime,
) -> FloatArray | float:
    """Compute the time of the products and their exchanges on the rank with the most of each stage [s], [c, w].

    Args:
        job: Training job.
        runtime: Runtime profile.
        device: Device of the stages.
        weights: Rows of weights [w].
        pieces: Pieces that each stage holds [c, P].
        groups: Groups of the rows of weights.
        collective_time: Time of a collective.
    """
    if not OPTIMIZERS[job.optimizer].needs_matrices:
        return 0.0
    joins_gate = runtime.rule_set in JOINING_RULE_SETS
    blocks = pieces @ job.model.blocks_of_piece
    found = np.zeros((len(pieces), len(weights)))
    matrices = layer_matrices(job, weights, joins_gate=joins_gate, splits_qkv=runtime.muon_splits_qkv)
    for part in MATRICES:
        links = groups.expert_tp if part == "expert" else groups.tp
        own = [matrix for matrix in matrices if matrix.part == part]
        costs = [
            (
                _compute_s(job, runtime, device, matrix) + _exchange_s(job, runtime, matrix, links, collective_time),
                matrix.held(blocks),
            )
            for matrix in own
        ]
        if costs:
            found = found + fullest(costs, np.where(weights.zero_stage >= 1, shards_of(part, weights), 1))
    return found


def update_products(job: TrainingJob, runtime: RuntimeProfile, matrix: LayerMatrix) -> Iterator[Product]:
    """Yield the products of one update of one matrix on one rank, sizes [w]."""
    optimizer, how = OPTIMIZERS[job.optimizer], runtime.muon_tp_mode
    multiply = partial(optimizer.products, steps=runtime.newton_schulz_steps, method=runtime.newton_schulz)
    rows, columns = matrix.local
    if matrix.cut == "none" or how == "blockwise":
        yield from multiply(rows, columns)
        return
    whole = np.full_like(rows, matrix.rows), np.full_like(rows, matrix.columns)
    if how == "duplicated":
        yield from multiply(*whole)
        return
    # the dim that is not cut is the short one, also where it is longer
    short, long = (whole[1], rows) if matrix.cut == "rows" else (whole[0], columns)
    steps = runtime.newton_schulz_steps
    yield Product(short, long, short, steps)
    yield Product(short, short, short, steps)
    yield Product(short, short, long, steps)


def _compute_s(job: TrainingJob, runtime: RuntimeProfile, device: Device, matrix: LayerMatrix) -> FloatArray:
    """Compute the time of the products of one matrix [s], [w]."""
    seconds = np.zeros(1)
    for product in update_products(job, runtime, matrix):
        m, k, n = (np.asarray(size, dtype=np.float64) for size in product[:3])
        operator = Operator(
            name=f"{matrix.block}.update",
            kind=OpKind.MATMUL,
            block=matrix.block,
            family=job.model.blocks[matrix.at].family,
            phase=Phase.FORWARD,
            precision="fp16" if job.precision == "fp16" else "bf16",
            shape=np.stack([m, k, n], axis=1),
            flop=2 * m * k * n,
            moved_bytes=ELEMENT_BYTES * (m * k + k * n + m * n),
        )
        own_s = kernel_s(operator, device, job, runtime) / runtime.speed_of(device.name)
        seconds = seconds + product.times * own_s
    return seconds


def _exchange_s(
    job: TrainingJob, runtime: RuntimeProfile, matrix: LayerMatrix, links: GroupLinks, collective_time: CollectiveTime
) -> FloatArray:
    """Compute the time of the collectives over tp of one matrix [s], [w]; nothing hides them."""
    if matrix.cut == "none" or runtime.muon_tp_mode == "blockwise" or not (matrix.ways > 1).any():
        return np.zeros(1)
    if runtime.muon_tp_mode == "duplicated":
        sent = np.full_like(matrix.ways, GATHERED_BYTES * matrix.rows * matrix.columns)
        kind, count = OpKind.ALL_GATHER, 1
    else:
        short = matrix.columns if matrix.cut == "rows" else matrix.rows
        sent = np.full_like(matrix.ways, ELEMENT_BYTES * short**2)
        kind, count = OpKind.ALL_REDUCE, runtime.newton_schulz_steps
    collective = Collective(
        name=f"tp.{job.optimizer}",
        kind=kind,
        wire_bytes=sent / runtime.network_efficiency,
        network_efficiency=runtime.network_efficiency,
        group=links,
    )
    return np.where(matrix.ways > 1, count * collective_time(collective), 0.0)
