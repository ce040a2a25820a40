"""Matrices of a model's layers as one rank keeps them: whose updates multiply them, and of which Adafactor keeps lines.

Megatron-LM joins the gate and the first matrix of an MLP, other frameworks do not; Muon takes queries, keys and values
apart unless --muon-no-split-qkv says otherwise (megatron-core 0.19.2 optimizer/emerging_optimizers.py).

Letters: c kinds of stages, w rows of weights (see `placement.Pipeline`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import BLOCKS, Block, local_kv_size
from costmodels.optimizers.contract import Part
from hardware.arrays import FloatArray

Cut = Literal["rows", "columns", "none"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerMatrix:
    """Matrix of a block, in every such block of the model.

    Attributes:
        block: Block that holds it.
        part: Part of the model that it belongs to.
        rows: Rows of the whole matrix.
        columns: Columns of the whole matrix.
        cut: What tensor parallelism cuts.
        ways: Number of ranks that it is cut over [w].
        each: Number of such matrices that one rank keeps of a block [w].
    """

    block: Block
    part: Part
    rows: int
    columns: int
    cut: Cut
    ways: FloatArray
    each: FloatArray

    @property
    def local(self) -> tuple[FloatArray, FloatArray]:
        """Rows and columns of a rank's part [w]."""
        rows, columns = np.full_like(self.ways, self.rows), np.full_like(self.ways, self.columns)
        return (
            rows / self.ways if self.cut == "rows" else rows,
            columns / self.ways if self.cut == "columns" else columns,
        )

    def held(self, blocks: FloatArray) -> FloatArray:
        """Return the number of such matrices on a rank of stages that hold `blocks` [c, w]."""
        return np.outer(blocks[:, BLOCKS.index(self.block)], self.each)


def layer_matrices(job: TrainingJob, weights: ConfigGrid, *, joins_gate: bool, splits_qkv: bool) -> list[LayerMatrix]:
    """Return the matrices of all blocks of layers.

    Args:
        job: Training job.
        weights: Rows of weights [w].
        joins_gate: Whether the gate and the first matrix of an MLP are one.
        splits_qkv: Whether queries, keys and values are matrices of their own.
    """
    model, h = job.model, job.model.hidden_size
    tp, once = weights.tp.astype(np.float64), np.ones(len(weights))
    found: list[LayerMatrix] = []

    def add(
        block: Block,
        rows: int,
        columns: int,
        cut: Cut,
        ways: FloatArray = tp,
        each: FloatArray = once,
        part: Part = "matrix",
    ) -> None:
        found.append(LayerMatrix(block=block, part=part, rows=rows, columns=columns, cut=cut, ways=ways, each=each))

    def add_mlp(
        block: Block, inner: int, ways: FloatArray = tp, each: FloatArray = once, part: Part = "matrix"
    ) -> None:
        firsts = (2 if model.gated_ffn else 1) if inner else 0
        if firsts:
            joined = firsts if joins_gate else 1
            add(block, joined * inner, h, "rows", ways, each * (firsts // joined), part)
            add(block, h, inner, "columns", ways, each, part)

    if model.uses_mla:
        if model.q_lora_rank:
            add(Block.ATTENTION, model.q_lora_rank, h, "none")
        add(Block.ATTENTION, model.q_size, model.q_lora_rank or h, "rows")
        add(Block.ATTENTION, model.kv_lora_rank + model.qk_rope_head_dim, h, "none")
        up = model.num_heads * (model.qk_nope_head_dim + model.v_head_dim)
        add(Block.ATTENTION, up, model.kv_lora_rank, "rows")
    else:
        # a rank has whole key-value heads, which are copied where tp exceeds their number
        kv_ways = model.kv_size / local_kv_size(job, weights)
        if splits_qkv:
            add(Block.ATTENTION, model.q_size, h, "rows")
            add(Block.ATTENTION, model.kv_size, h, "rows", kv_ways, 2 * once)
        else:
            whole = model.q_size + 2 * model.kv_size
            add(Block.ATTENTION, whole, h, "rows", whole / (model.q_size / tp + 2 * model.kv_size / kv_ways))
    add(Block.ATTENTION, h, model.context_size, "columns")
    add_mlp(Block.DENSE_MLP, model.ffn_size)
    if model.is_moe:
        add(Block.MOE_MLP, model.num_experts, h, "none")
        add_mlp(Block.MOE_MLP, model.shared_expert_ffn_size)
        ways = weights.expert_tensor.astype(np.float64)
        add_mlp(Block.MOE_MLP, model.expert_ffn_size, ways, model.num_experts / weights.ep, "expert")
    return found
