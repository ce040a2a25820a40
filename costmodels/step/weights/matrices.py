"""Matrices of a model's layers as one rank keeps them, for optimizers whose updates see matrices.

Megatron-LM joins the gate and the first matrix of an MLP, other frameworks do not; Muon takes queries, keys and values
apart unless --muon-no-split-qkv says otherwise (megatron-core 0.19.2 optimizer/emerging_optimizers.py).

Letters: c kinds of stages, w rows of weights (see `placement.Pipeline`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.blocks.matrix import Cut, Matrix
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.training_job import TrainingJob
from costmodels.optimizers.contract import Part
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerMatrix:
    """Matrix of a block, in every such block of the model.

    Attributes:
        at: Position of the block in `ModelSpec.blocks`.
        block: Name of the block.
        own: The matrix.
    """

    at: int
    block: str
    own: Matrix

    @property
    def part(self) -> Part:
        """Part of the model that it belongs to."""
        return self.own.part

    @property
    def rows(self) -> int:
        """Rows of the whole matrix."""
        return self.own.rows

    @property
    def columns(self) -> int:
        """Columns of the whole matrix."""
        return self.own.columns

    @property
    def cut(self) -> Cut:
        """Dimension that tensor parallelism cuts, or none."""
        return self.own.cut

    @property
    def ways(self) -> FloatArray:
        """Number of ranks that it is cut over [w]."""
        return self.own.ways

    @property
    def local(self) -> tuple[FloatArray, FloatArray]:
        """Rows and columns of a rank's part [w]."""
        return self.own.local

    def held(self, blocks: FloatArray) -> FloatArray:
        """Return the number of such matrices on a rank of stages that hold `blocks` [c, B], as [c, w]."""
        return np.outer(blocks[:, self.at], np.broadcast_to(self.own.each, self.own.ways.shape))


def layer_matrices(job: TrainingJob, weights: ConfigGrid, *, joins_gate: bool, splits_qkv: bool) -> list[LayerMatrix]:
    """Return the matrices of all blocks of layers; see `AbstractBlock.matrices`.

    Args:
        job: Training job.
        weights: Rows of weights [w].
        joins_gate: Whether the gate and the first matrix of an MLP are one.
        splits_qkv: Whether queries, keys and values are matrices of their own.
    """
    named = zip(job.model.block_names, job.model.blocks, strict=True)
    return [
        LayerMatrix(at=at, block=name, own=own)
        for at, (name, block) in enumerate(named)
        for own in block.matrices(weights, joins_gate=joins_gate, splits_qkv=splits_qkv)
    ]
