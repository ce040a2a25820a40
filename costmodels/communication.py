"""Communication inside the layers: what one micro-batch exposes of tp, cp, up and ep, per block.

Sources: tensor parallelism has two all-reduces per layer and pass (Shoeybi et al. 2019, section 3), each a
reduce-scatter and an all-gather under sequence parallelism (Korthikanti et al. 2022, section 4.2.2); ring attention
passes keys and values cp-1 times, and their gradients too on the way back (Liu et al. 2023, section 3); Ulysses
exchanges q, k, v and the output all to all (Jacobs et al. 2023, section 3.2); experts dispatch and combine tokens all
to all (GShard, Lepikhin et al. 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.job import TrainingJob
from costmodels.operators import Block, FloatArray, local_kv_size, local_tokens, residual_tokens
from costmodels.parallel import RECOMPUTE_MODES, ConfigGrid
from costmodels.placement import Groups
from costmodels.runtime import RuntimeProfile
from hardware.collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s, ring_exchange_s


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockCommunication:
    """Exposed seconds of one micro-batch, both passes and recomputation together.

    Attributes:
        tp: By block, each [n].
        cp: Per attention block [n].
        up: Per attention block [n].
        ep: Per MoE block [n].
        collectives: Collectives that the host issues per block, each [n].
    """

    tp: dict[Block, FloatArray]
    cp: FloatArray
    up: FloatArray
    ep: FloatArray
    collectives: dict[Block, FloatArray]


def block_communication(
    job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid, groups: Groups, attention_core_s: FloatArray
) -> BlockCommunication:
    """Exposed communication of every configuration [n]; `attention_core_s` [n] may hide the ring's exchanges."""
    model = job.model
    width = job.element_bytes / runtime.network_efficiency
    tokens = local_tokens(job, grid)
    passes = 2.0 + (grid.recompute == RECOMPUTE_MODES.index("full"))
    hidden = width * tokens * model.hidden_size
    gather_scatter = all_gather_s(hidden, groups.tp) + reduce_scatter_s(hidden, groups.tp)
    per_pass = np.where(grid.sequence_parallel, gather_scatter, all_reduce_s(hidden, groups.tp))
    # The head gathers its input and scatters that gradient; three fp32 numbers per token make the parallel softmax.
    head = per_pass + 3 * all_reduce_s(4 * tokens / runtime.network_efficiency, groups.tp)
    tp = {
        Block.ATTENTION: passes * per_pass,
        Block.DENSE_MLP: passes * per_pass,
        Block.MOE_MLP: np.zeros(len(grid)),
        Block.EMBEDDING: per_pass,
        Block.HEAD: head,
    }
    ep = np.zeros(len(grid))
    if model.is_moe:
        routed = hidden * model.top_k
        experts = all_gather_s(routed, groups.tp) + reduce_scatter_s(routed, groups.tp)
        shared = per_pass if model.shared_expert_ffn_size else 0.0
        tp[Block.MOE_MLP] = passes * (experts + shared)
        dispatched = width * residual_tokens(job, grid) * model.hidden_size * model.top_k
        ep = passes * 2 * all_to_all_s(dispatched, groups.ep)
    return BlockCommunication(
        tp=tp,
        cp=_ring_s(job, runtime, grid, groups, attention_core_s, passes),
        up=_ulysses_s(job, runtime, grid, groups, passes),
        ep=ep,
        collectives=_collectives(job, grid, passes),
    )


def _collectives(job: TrainingJob, grid: ConfigGrid, passes: FloatArray) -> dict[Block, FloatArray]:
    """Collectives that one micro-batch issues per block [n], both passes and recomputation together."""
    split = (grid.tp > 1).astype(np.float64)
    per_pass = split * np.where(grid.sequence_parallel, 2.0, 1.0)
    ring = (passes + 1) * (grid.cp - 1)
    ulysses = 4 * passes * (grid.up > 1)
    routed = per_pass * (1.0 + (job.model.shared_expert_ffn_size > 0)) + 2.0 * (grid.ep > 1)
    return {
        Block.ATTENTION: passes * per_pass + ring + ulysses,
        Block.DENSE_MLP: passes * per_pass,
        Block.MOE_MLP: passes * routed,
        Block.EMBEDDING: per_pass,
        Block.HEAD: per_pass + 3 * split,
    }


def _ring_s(
    job: TrainingJob,
    runtime: RuntimeProfile,
    grid: ConfigGrid,
    groups: Groups,
    attention_core_s: FloatArray,
    passes: FloatArray,
) -> FloatArray:
    """Exposed ring exchanges of one attention block [n]: keys and values forward, and their gradients backward."""
    blocks = 2 * job.element_bytes * local_tokens(job, grid) * local_kv_size(job, grid) * grid.cp
    # forward once (again where recomputed), backward twice: the blocks themselves and their gradients
    exchanges = (passes + 1) * ring_exchange_s(blocks / runtime.network_efficiency, groups.cp)
    if not runtime.overlaps_ring:
        return exchanges
    # The first of cp steps works on local keys: cp-1 of them can hide an exchange, but each waits for the one before.
    latency = (passes + 1) * ring_exchange_s(0.0, groups.cp)
    return np.maximum(exchanges - attention_core_s * (grid.cp - 1) / grid.cp, latency)


def _ulysses_s(
    job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid, groups: Groups, passes: FloatArray
) -> FloatArray:
    """All-to-all exchanges of q, k, v and the output of one attention block [n]."""
    model = job.model
    if model.kv_lora_rank:
        per_token = model.num_heads * (2 * (model.qk_nope_head_dim + model.qk_rope_head_dim) + 2 * model.v_head_dim)
        elements = local_tokens(job, grid) * per_token / grid.tp
    else:
        query = model.num_heads * model.head_dim / grid.tp
        elements = local_tokens(job, grid) * 2 * (query + local_kv_size(job, grid))
    message = job.element_bytes * elements / runtime.network_efficiency
    return np.asarray(passes * all_to_all_s(message, groups.up))
