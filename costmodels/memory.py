"""Peak device memory: weights, gradients, optimizer states and activations of every stage; the worst stage decides.

Sources: ZeRO (Rajbhandari et al. 2020, section 3 and 5) for training states; Korthikanti et al. 2022, section 4, for
activations: 34 s*b*h per layer without attention scores, tallied here operator by operator so that grouped-query
attention, gated MLPs and experts come out too; flash attention keeps q, k, v, its output and one fp32 number per query
and head (Dao 2023) instead of 5 a s / h.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.job import TrainingJob
from costmodels.operators import FloatArray, local_kv_size, local_tokens, residual_tokens, unique_shapes
from costmodels.parallel import RECOMPUTE_MODES, ConfigGrid
from costmodels.placement import local_parameters, pipelines, stage_devices
from costmodels.runtime import RuntimeProfile
from costmodels.schedules import assign_layers, micro_batches_in_flight
from hardware.cluster import Cluster

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryEstimate:
    """Memory of n configurations.

    Attributes:
        peak_bytes: Peak of the stage that is fullest relative to its devices [n].
        parts_bytes: The same peak by MEMORY_PARTS, each [n].
        capacity_bytes: Memory of the smallest device of that stage [n].
    """

    peak_bytes: FloatArray
    parts_bytes: dict[str, FloatArray]
    capacity_bytes: FloatArray

    def fits(self, headroom: float) -> np.ndarray:
        """Whether the peak leaves the share `headroom` of the device free [n]."""
        return np.asarray(self.peak_bytes <= (1 - headroom) * self.capacity_bytes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerActivations:
    """Bytes that one micro-batch keeps per layer until its backward pass [u], and while a layer is recomputed.

    `dense` and `moe` are what is kept; `dense_working` and `moe_working` what one layer needs while it is recomputed.
    """

    dense: FloatArray
    moe: FloatArray
    dense_working: FloatArray
    moe_working: FloatArray


def layer_activations(job: TrainingJob, shapes: ConfigGrid) -> LayerActivations:
    """Activation bytes of one layer and micro-batch for every shape row [u] (Korthikanti et al. 2022, section 4.1)."""
    model, width = job.model, job.element_bytes
    tokens, residual = local_tokens(job, shapes), residual_tokens(job, shapes)
    tp = shapes.tp
    hidden = width * residual * model.hidden_size
    heads = model.num_heads / tp
    if model.kv_lora_rank:
        qk_size = model.qk_nope_head_dim + model.qk_rope_head_dim
        latent = width * residual * (model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim)
        qkv = width * tokens * heads * (2 * qk_size + model.v_head_dim) + latent
        core_output = width * tokens * heads * model.v_head_dim
    else:
        qkv = width * tokens * (heads * model.head_dim + 2 * local_kv_size(job, shapes))
        core_output = width * tokens * heads * model.head_dim
    log_sum_exp = 4 * tokens * heads
    attention = 2 * hidden + qkv + core_output + log_sum_exp
    gate = 1 + model.gated_ffn
    dense_mlp = 2 * hidden + width * tokens * model.ffn_size / tp * (gate + 1)
    routed = tokens * model.top_k
    moe_mlp = (
        2 * hidden
        + 4 * residual * model.num_experts
        + width * routed * model.hidden_size * (1 + 1 / tp)
        + width * routed * model.expert_ffn_size / tp * (gate + 1)
        + width * tokens * model.shared_expert_ffn_size / tp * (gate + 1)
    )
    full = shapes.recompute == RECOMPUTE_MODES.index("full")
    selective = shapes.recompute == RECOMPUTE_MODES.index("selective")
    dense, moe = attention + dense_mlp, attention + moe_mlp
    dropped = np.where(selective, log_sum_exp, 0.0)
    return LayerActivations(
        dense=np.where(full, hidden, dense - dropped),
        moe=np.where(full, hidden, moe - dropped),
        dense_working=np.where(full, dense, dropped),
        moe_working=np.where(full, moe, dropped),
    )


def estimate_memory(job: TrainingJob, cluster: Cluster, runtime: RuntimeProfile, grid: ConfigGrid) -> MemoryEstimate:
    """Peak memory of every configuration, by part, on the stage that is fullest."""
    shapes, shape_of = unique_shapes(grid)
    layers = layer_activations(job, shapes)
    tokens, residual = local_tokens(job, grid), residual_tokens(job, grid)
    logits = tokens * job.model.vocab_size / grid.tp * (job.element_bytes + 8)
    hand_over = np.where((grid.pp > 1) | (grid.tp > 1), 2 * job.element_bytes * tokens * job.model.hidden_size, 0.0)
    num_micro_batches = job.global_batch_size // (grid.dp * grid.mbs)
    parts = {part: np.zeros(len(grid)) for part in MEMORY_PARTS}
    capacity = np.zeros(len(grid))
    for pp, vpp, at in pipelines(grid):
        stages = assign_layers(job.model, runtime, pp, vpp)
        chosen = grid.take(at)
        row = shape_of[at]
        local = local_parameters(job, chosen, stages)
        replicas = (chosen.dp * chosen.cp * chosen.up).astype(np.float64)[:, None]
        whole = local.dense + local.expert
        shard = local.dense / replicas + local.expert / np.maximum(replicas / chosen.ep[:, None], 1.0)
        weights, gradients, optimizer = (
            np.where((chosen.zero_stage >= from_stage)[:, None], shard, whole) for from_stage in (3, 2, 1)
        )
        in_flight = micro_batches_in_flight(pp, vpp, num_micro_batches[at])
        held = layers.dense[row][:, None] * stages.dense + layers.moe[row][:, None] * stages.moe
        working = np.maximum(
            np.where(stages.dense > 0, layers.dense_working[row][:, None], 0.0),
            np.where(stages.moe > 0, layers.moe_working[row][:, None], 0.0),
        )
        activations = (held * in_flight + working) * (1 + runtime.activation_slack)
        head = np.zeros((len(at), pp))
        head[:, -1] = logits[at] + job.element_bytes * residual[at] * job.model.hidden_size
        num_layers = np.maximum(stages.dense + stages.moe, 1)
        gathered = np.where((chosen.zero_stage == 3)[:, None], 2 * job.element_bytes * whole / num_layers, 0.0)
        stage_parts = {
            "weights": job.element_bytes * weights,
            "gradients": runtime.gradient_bytes * gradients,
            "optimizer": job.optimizer_state_bytes * optimizer,
            "activations": activations,
            "logits": head,
            "buffers": gathered + hand_over[at][:, None],
            "overhead": np.full((len(at), pp), float(runtime.memory_overhead_bytes)),
        }
        total = np.sum(list(stage_parts.values()), axis=0)
        stage_capacity = np.array(
            [min(cluster.devices[kind].memory_bytes for kind in kinds) for kinds in stage_devices(cluster, pp)],
            dtype=np.float64,
        )
        worst = np.argmax(total / stage_capacity, axis=1)
        rows = np.arange(len(at))
        for part in MEMORY_PARTS:
            parts[part][at] = stage_parts[part][rows, worst]
        capacity[at] = stage_capacity[worst]
    return MemoryEstimate(peak_bytes=np.sum(list(parts.values()), axis=0), parts_bytes=parts, capacity_bytes=capacity)
