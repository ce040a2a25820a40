"""Training states of every stage: weights, gradients and optimizer states, and buffers of single layers; see `peak.py`.

Source: ZeRO (Rajbhandari et al. 2020, sections 3 and 5).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.optimizers.contract import Widths
from costmodels.optimizers.registry import OPTIMIZERS
from costmodels.step.placement import (
    BlockParameters,
    StageKinds,
    block_parameters,
    local_parameters,
    local_table,
    sharded_parameters,
)
from costmodels.step.weights.kept_parts import KeptParts
from hardware.arrays import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldWeights:
    """Parameters that one rank of every kind of stage holds, whatever the runtime, each array [c, w].

    Attributes:
        zero_stage: ZeRO stage [w].
        is_offloaded: Whether the optimizer states are kept on the host [w].
        whole: Parameters before ZeRO shards them.
        shard: Parameters whose states the rank keeps if ZeRO shards them.
        layer: Parameters of the largest layer.
        embedding: Parameters of the embedding.
        head: Parameters of the output head, which may be the embedding.
        is_piped: Whether there are several stages.
        shapes: Parameters of one weight of each shape in the layers.
        frozen: Further parameters that no step changes, as the rank keeps them.
        kept: Parameters whose states the rank keeps, by parts; None if the optimizer treats all parts alike.
    """

    zero_stage: IntArray
    is_offloaded: NDArray[np.bool_]
    whole: FloatArray
    shard: FloatArray
    layer: FloatArray
    embedding: FloatArray
    head: FloatArray
    is_piped: bool
    shapes: FloatArray
    frozen: FloatArray | float
    kept: KeptParts | None

    @classmethod
    def of(
        cls, job: TrainingJob, weights: ConfigGrid, stages: StageKinds, each: BlockParameters | None = None
    ) -> HeldWeights:
        """Count the parameters of rows that differ in the way weights are kept [w]; `each` are those of every block."""
        model = job.model
        each = block_parameters(model, weights) if each is None else each
        local = local_parameters(job, weights, stages.pieces, each)
        in_layers = model.is_layer_block
        # A stage with several kinds of layers needs room for the largest one.
        of_piece = (model.blocks_of_piece * in_layers) @ (each.dense + each.expert)
        layer = np.max(of_piece * (stages.pieces > 0)[:, :, None], axis=1)
        # Of each shape of weight one counts, and one expert of many.
        has_block = (stages.pieces @ (model.blocks_of_piece * in_layers)) > 0
        return cls(
            zero_stage=weights.zero_stage,
            is_offloaded=weights.is_offloaded,
            whole=local.dense + local.expert,
            shard=sharded_parameters(weights, local),
            layer=layer,
            embedding=local_table(model, weights) * stages.embeddings,
            head=local_table(model, weights) * stages.heads,
            is_piped=bool(stages.count.sum() > 1),
            shapes=has_block @ (each.dense + each.one_expert),
            frozen=local.frozen / np.where(weights.zero_stage == 3, weights.dp * weights.cp * weights.up, 1),
            kept=KeptParts.of(job, weights, stages.pieces, local),
        )

    @property
    def gathered(self) -> FloatArray:
        """Parameters of single layers that stand beside those that ZeRO-3 shards.

        They are the weights of the current layer and of the next, a layer's gradient before it is scattered, and the
        tables.
        """
        return 3 * self.layer + self.embedding + self.head


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitBuffers:
    """Weights and gradients of single layers and tables that stand beside the shards at three moments [bytes], [c, k].

    Attributes:
        in_layer: In a layer in the middle of the backward pass.
        at_head: At the beginning of the backward pass.
        at_end: At its end.
    """

    in_layer: FloatArray
    at_head: FloatArray
    at_end: FloatArray

    @classmethod
    def of(cls, job: TrainingJob, runtime: RuntimeProfile, held: HeldWeights) -> UnitBuffers | None:
        """Compute those of FSDP2's mixed precision; other runtimes have constant ones (`training_states`).

        A unit is gathered in the width of the products, and the next one with it. Its gradient is copied into fp32,
        and reduced; that copy lasts until the next unit is reduced. A pipeline keeps its gradients to the last
        micro-batch, so that they are no buffers (torch/distributed/fsdp/_fully_shard, _fsdp_param_group.py and
        _fsdp_collectives.py, foreach_reduce). A loss in parts reduces the head for each of them all the same, while the
        copy of the one before is still there (torchtitan components/loss.py, ChunkedLossWrapper).
        """
        if not runtime.fsdp2_mixed:
            return None
        width, again = job.element_bytes, held.zero_stage == 3
        reduced = 0 if held.is_piped else runtime.gradient_bytes
        is_pending = held.is_piped and runtime.loss_chunks > 1
        return cls(
            in_layer=(width * (1 + 2 * again) + reduced) * held.layer,
            at_head=(width * again + runtime.gradient_bytes * is_pending) * held.head,
            at_end=(width * again + reduced) * held.embedding + reduced * held.layer * (held.embedding > 0),
        )

    def take(self, row: IntArray) -> UnitBuffers:
        """Select the buffers of configurations by their rows of weights."""
        return UnitBuffers(**{f.name: getattr(self, f.name).take(row, axis=1) for f in fields(self)})


def training_states(job: TrainingJob, runtime: RuntimeProfile, held: HeldWeights) -> dict[str, FloatArray]:
    """Compute weights, gradients, optimizer states and the buffers of single layers, each [c, w].

    ZeRO shards the states one after the other (ZeRO, section 5). Where weight gradients are added up inside the matrix
    product, Transformer Engine hands autograd an empty gradient of each shape of weight, that of the head too, and
    keeps it (transformer_engine module/base.py, get_dummy_wgrad; megatron-core tensor_parallel/layers.py since 0.14).
    """
    # ZeRO stages from which weights, gradients and optimizer states are sharded.
    sharded_from = (3, 1 if runtime.shards_gradients else 2, 1)
    kept, gradients, optimizer = (np.where(held.zero_stage >= first, held.shard, held.whole) for first in sharded_from)
    weight_bytes = 4 if runtime.fp32_weights else job.element_bytes
    # The bf16 weights may be halves of the fp32 copies of the states that a rank keeps (MindSpeed
    # docs/features/reuse-fp32-param.md: saves 2 bytes per parameter, over dp with the distributed optimizer).
    shared = job.element_bytes if job.shared_master_weights and not runtime.fp32_weights else 0
    shapes = held.shapes + held.head * (runtime.keeps_empty_gradients is True)
    empty = shapes * bool(runtime.fused_accumulation and runtime.keeps_empty_gradients)
    single_layers = np.where(held.zero_stage == 3, held.gathered, empty)
    if runtime.fsdp2_mixed:
        # fp32 shards, and beside them the gathered weights that stay until the backward pass; without a pipeline the
        # gradients of each micro-batch are reduced, in a pipeline they add up in fp32 (torch/distributed/pipelining
        # stage.py, backward_maybe_with_nosync)
        kept = np.where(held.zero_stage >= 1, held.shard, held.whole)
        kept = kept + np.where(held.zero_stage == 3, 0.0, job.element_bytes / weight_bytes) * held.whole
        single_layers = np.zeros_like(single_layers)
        if held.is_piped:
            gradients = held.whole - held.head * (runtime.loss_chunks > 1)
    # Offloaded states leave nothing on the device: tensors are converted on the host and copied into the weights.
    optimizer = np.where(held.is_offloaded, 1.0 - runtime.offload_share, 1.0) * optimizer
    return {
        "weights": weight_bytes * (kept + held.frozen),
        "gradients": max(runtime.gradient_bytes, job.element_bytes) * gradients,
        "optimizer": (_state_bytes(job, runtime, held.kept, optimizer) - shared + runtime.step_bytes) * optimizer,
        "buffers": job.element_bytes * single_layers,
    }


def _state_bytes(
    job: TrainingJob, runtime: RuntimeProfile, kept: KeptParts | None, parameters: FloatArray
) -> FloatArray | float:
    """Return the bytes of the optimizer's states per parameter, or the mean over those that a rank keeps [c, w].

    A runtime that trains in 16 bits keeps a copy of the weights among them. If it keeps fp32 weights instead, that copy
    is the weight itself. Source: ZeRO (Rajbhandari et al. 2020), section 3.1: K = 12 for mixed-precision Adam.
    """
    copy = 0 if job.is_single or runtime.fp32_weights else runtime.main_weight_bytes
    widths = Widths(copy, runtime.first_moment_bytes, runtime.second_moment_bytes)
    if kept is None:
        return widths.weight + OPTIMIZERS[job.optimizer].state_bytes("matrix", widths)
    return np.asarray(kept.state_bytes(job, runtime, widths) / np.maximum(parameters, 1.0))
