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
from costmodels.operators import Block, FloatArray, local_kv_size, local_tokens, residual_tokens, routed_tokens
from costmodels.parallel import RECOMPUTE_MODES, ConfigGrid
from costmodels.placement import Groups
from costmodels.runtime import RuntimeProfile
from hardware.cluster import GroupLinks
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Beside:
    """Compute time of one block and micro-batch beside which communication may run [n].

    Attributes:
        products: Matrix products of both passes, by block.
        weight_gradients: Products that give the weights' gradients, by block.
        attention_core: Attention of both passes.
    """

    products: dict[Block, FloatArray]
    weight_gradients: dict[Block, FloatArray]
    attention_core: FloatArray


def exposed_s(runtime: RuntimeProfile, seconds: FloatArray, beside: FloatArray | float) -> FloatArray:
    """What communication of `seconds` still costs where it runs beside compute of `beside` seconds [n].

    A part of the hidden time is paid all the same: kernels that share the device slow each other down.
    """
    return np.asarray(seconds - runtime.overlap_efficiency * np.minimum(seconds, beside))


def block_communication(
    job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid, groups: Groups, beside: Beside
) -> BlockCommunication:
    """Exposed communication of every configuration [n]."""
    model = job.model
    width = job.element_bytes / runtime.network_efficiency
    tokens = local_tokens(job, grid)
    forward_passes = 1.0 + (grid.recompute == RECOMPUTE_MODES.index("full"))
    passes = forward_passes + 1.0
    hidden = width * tokens * model.hidden_size
    gather_scatter = all_gather_s(hidden, groups.tp) + reduce_scatter_s(hidden, groups.tp)
    per_pass = np.where(grid.sequence_parallel, gather_scatter, all_reduce_s(hidden, groups.tp))
    # the backward pass gathers a block's input once more for its weights' gradients
    backward = per_pass + np.where(grid.sequence_parallel, all_gather_s(hidden, groups.tp), 0.0)

    def tensor_s(block: Block) -> FloatArray:
        if runtime.overlaps_tensor:
            return exposed_s(runtime, forward_passes * per_pass + backward, beside.products[block])
        if runtime.overlaps_tensor_gradients:
            exposed = exposed_s(runtime, backward, beside.weight_gradients[block])
            return np.asarray(forward_passes * per_pass + exposed)
        return np.asarray(forward_passes * per_pass + backward)

    # The head gathers its input and scatters that gradient; three fp32 numbers per token make the parallel softmax.
    head = per_pass + 3 * all_reduce_s(4 * tokens / runtime.network_efficiency, groups.tp)
    tp = {
        Block.ATTENTION: tensor_s(Block.ATTENTION),
        Block.DENSE_MLP: tensor_s(Block.DENSE_MLP),
        Block.MOE_MLP: np.zeros(len(grid)),
        Block.EMBEDDING: per_pass,
        Block.HEAD: head,
    }
    ep = np.zeros(len(grid))
    if model.is_moe:
        gathered = width * routed_tokens(job, grid) * model.hidden_size
        experts = all_gather_s(gathered, groups.expert_tp) + reduce_scatter_s(gathered, groups.expert_tp)
        shared = per_pass if model.shared_expert_ffn_size else 0.0
        tp[Block.MOE_MLP] = passes * (experts + shared)
        dispatched = width * residual_tokens(job, grid) * model.hidden_size * model.top_k
        if runtime.deduplicates_tokens:
            dispatched = dispatched * _distinct_share(model.top_k, groups.ep)
        ep = passes * 2 * all_to_all_s((1 + runtime.expert_imbalance) * dispatched, groups.ep)
        if runtime.overlaps_experts:
            ep = exposed_s(runtime, ep, beside.products[Block.MOE_MLP] + beside.products[Block.ATTENTION])
    return BlockCommunication(
        tp=tp,
        cp=_ring_s(job, runtime, grid, groups, beside.attention_core, passes),
        up=_ulysses_s(job, runtime, grid, groups, passes),
        ep=ep,
        collectives=_collectives(job, grid, passes),
    )


def _distinct_share(top_k: int, group: GroupLinks) -> FloatArray:
    """Share of a token's top_k copies that leave it where each host, or each rank of one host, gets one [n].

    For experts drawn at random, H (1 - (1 - 1/H)^k) of H places are hit (DeepEP's dispatch sends to a host once and
    forwards inside it; DeepSeek-V3, arXiv 2412.19437, section 3.2.2).
    """
    places = np.where(group.hosts > 1, group.hosts, group.size).astype(np.float64)
    return np.asarray(places * (1 - (1 - 1 / places) ** top_k) / top_k)


def _collectives(job: TrainingJob, grid: ConfigGrid, passes: FloatArray) -> dict[Block, FloatArray]:
    """Collectives that one micro-batch issues per block [n], both passes and recomputation together."""
    split = (grid.tp > 1).astype(np.float64)
    per_pass = split * np.where(grid.sequence_parallel, 2.0, 1.0)
    again = split * grid.sequence_parallel  # the backward pass gathers a block's input once more
    ring = (passes + 1) * (grid.cp - 1)
    ulysses = 4 * passes * (grid.up > 1)
    routed = per_pass * (job.model.shared_expert_ffn_size > 0) + 2.0 * (grid.expert_tensor > 1) + 2.0 * (grid.ep > 1)
    return {
        Block.ATTENTION: passes * per_pass + again + ring + ulysses,
        Block.DENSE_MLP: passes * per_pass + again,
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
    return np.maximum(exposed_s(runtime, exchanges, attention_core_s * (grid.cp - 1) / grid.cp), latency)


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
