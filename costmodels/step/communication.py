"""Communication inside the layers: time of one micro-batch that tp, cp, up and ep expose, per block.

Sources: tensor parallelism has two all-reduces per layer and pass (Shoeybi et al. 2019, section 3), each a
reduce-scatter and an all-gather under sequence parallelism (Korthikanti et al. 2022, section 4.2.2). Ring attention
passes keys and values cp-1 times, and on the way back their gradients too (Liu et al. 2023, section 3). Ulysses
exchanges q, k, v and the output all to all (Jacobs et al. 2023, section 3.2). Experts dispatch and combine tokens all
to all (GShard, Lepikhin et al. 2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, collective_s
from costmodels.operators.layer_operators import (
    Block,
    Collective,
    OpKind,
    Phase,
    core_recomputed,
    exchanged_kv_size,
    local_tokens,
    residual_tokens,
    routed_tokens,
)
from costmodels.step.launches import captures_block
from costmodels.step.placement import Groups
from hardware.arrays import FloatArray
from hardware.group_links import GroupLinks

_ISSUED = {"up.all_to_all": 4.0}
"""Number of collectives that the host issues for one collective of this model: queries, keys, values and the output are
exchanged one by one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerUse:
    """Number of times that one micro-batch executes a collective for one block, in one pass.

    Attributes:
        site: Name of the collective.
        block: Block that executes the collective.
        phase: Forward or backward pass. Forward collectives that recomputation repeats count as forward again.
        count: Number of executions [n].
    """

    site: str
    block: Block
    phase: Phase
    count: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockCommunication:
    """Exposed communication time of one micro-batch [s], both passes and recomputation together.

    Attributes:
        tp: Time of tensor parallelism by block, each [n].
        cp: Time of ring attention per attention block [n].
        up: Time of Ulysses exchanges per attention block [n].
        ep: Time of expert parallelism per MoE block [n].
        hidden: Further time of the collectives, beside compute, by dimension and block, each [n].
        collectives: Number of collectives that the host issues per block, each [n].
    """

    tp: dict[Block, FloatArray]
    cp: FloatArray
    up: FloatArray
    ep: FloatArray
    hidden: dict[str, dict[Block, FloatArray]]
    collectives: dict[Block, FloatArray]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Beside:
    """Compute time of one block and micro-batch beside which communication may run [s], each array [n].

    Attributes:
        products: Time of the matrix products of both passes, by block.
        weight_gradients: Time of the products that compute the weights' gradients, by block.
        attention_core: Time of the attention core in both passes.
    """

    products: dict[Block, FloatArray]
    weight_gradients: dict[Block, FloatArray]
    attention_core: FloatArray


def exposed_s(runtime: RuntimeProfile, seconds: FloatArray, beside: FloatArray | float) -> FloatArray:
    """Return the cost of communication of `seconds` that runs beside compute of `beside` seconds [n].

    A share of the hidden time is paid all the same, because kernels that share the device slow each other down.
    """
    return np.asarray(seconds - runtime.overlap_efficiency * np.minimum(seconds, beside))


def layer_collectives(
    job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid, groups: Groups
) -> dict[str, Collective]:
    """Return every collective that layers may call, by its name, for every configuration [n]."""
    efficiency = runtime.network_efficiency
    width = job.element_bytes / efficiency
    tokens = local_tokens(job, grid)
    found: dict[str, Collective] = {}

    def add(name: str, kind: OpKind, wire_bytes: FloatArray, group: GroupLinks) -> None:
        found[name] = Collective(
            name=name, kind=kind, wire_bytes=wire_bytes, network_efficiency=efficiency, group=group
        )

    # Messages are divided by the network's efficiency: fewer useful bytes per second are as slow as more bytes.
    hidden = width * tokens * job.model.hidden_size
    add("tp.all_gather", OpKind.ALL_GATHER, hidden, groups.tp)
    add("tp.reduce_scatter", OpKind.REDUCE_SCATTER, hidden, groups.tp)
    add("tp.all_reduce", OpKind.ALL_REDUCE, hidden, groups.tp)
    # The softmax over a split vocabulary reduces three fp32 numbers per token.
    add("tp.softmax", OpKind.ALL_REDUCE, 4 * tokens / efficiency, groups.tp)
    if job.model.is_moe:
        # Experts with a tensor degree of their own gather the routed tokens before their products and scatter the
        # results. The all-to-all exchange moves top_k copies of every token instead.
        gathered = width * routed_tokens(job, grid) * job.model.hidden_size
        add("expert_tp.all_gather", OpKind.ALL_GATHER, gathered, groups.expert_tp)
        add("expert_tp.reduce_scatter", OpKind.REDUCE_SCATTER, gathered, groups.expert_tp)
        own = width * residual_tokens(job, grid) * job.model.hidden_size
        if runtime.gathers_tokens:
            # all ranks gather the tokens of the group, and sum up what their experts made of them (megatron-core
            # moe/token_dispatcher.py, MoEAllGatherTokenDispatcher)
            add("ep.all_gather", OpKind.ALL_GATHER, grid.ep * own, groups.ep)
            add("ep.reduce_scatter", OpKind.REDUCE_SCATTER, grid.ep * own, groups.ep)
        else:
            dispatched = own * job.model.top_k
            if runtime.deduplicates_tokens:
                dispatched = dispatched * _distinct_share(job.model.top_k, groups.ep)
            add("ep.all_to_all", OpKind.ALL_TO_ALL, (1 + runtime.expert_imbalance) * dispatched, groups.ep)
    # One hop of the ring carries the keys and the values of a rank's share of the sequence.
    block = 2 * tokens * exchanged_kv_size(job, grid) / efficiency
    add("cp.send_recv", OpKind.SEND_RECV, job.element_bytes * block, groups.cp)
    # Some runtimes accumulate the gradients of keys and values in fp32 on their way round the ring.
    if runtime.fp32_ring_gradients:
        add("cp.gradients", OpKind.SEND_RECV, 4 * block, groups.cp)
    if runtime.overlaps_ring:
        add("cp.start", OpKind.SEND_RECV, np.zeros(1), groups.cp)
    add("up.all_to_all", OpKind.ALL_TO_ALL, _exchanged_bytes(job, grid) / efficiency, groups.up)
    return found


def layer_uses(job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid) -> tuple[LayerUse, ...]:
    """Count the executions of the layers' collectives by one micro-batch, for every configuration [n].

    Nothing is hidden here. `cp.start` is no execution of its own: it is the remaining cost of a hidden exchange.
    """
    none, once = np.zeros(len(grid)), np.ones(len(grid))
    again = once + (grid.recompute == RECOMPUTE_MODES.index("full"))
    core_again = once + core_recomputed(job, runtime, grid)
    split = grid.sequence_parallel.astype(np.float64)
    whole = 1.0 - split
    # Sequence parallelism replaces every all-reduce by an all-gather and a reduce-scatter; `split` is 1 where it is on.
    ring = grid.cp - once
    uses: list[LayerUse] = []

    def add(block: Block, phase: Phase, counts: Mapping[str, FloatArray]) -> None:
        uses.extend(LayerUse(site=site, block=block, phase=phase, count=count) for site, count in counts.items())

    def tensor(gathers: FloatArray, scatters: FloatArray, reductions: FloatArray) -> dict[str, FloatArray]:
        return {
            "tp.all_gather": gathers * split,
            "tp.reduce_scatter": scatters * split,
            "tp.all_reduce": reductions * whole,
        }

    # Attention and the MLP each gather their input and scatter their output once per pass, and do so again where full
    # recomputation repeats the forward pass. The embedding and the head have one side only.
    for block in (Block.ATTENTION, Block.DENSE_MLP):
        add(block, Phase.FORWARD, tensor(again, again, again))
        add(block, Phase.BACKWARD, tensor((1 + runtime.gathers_inputs_again) * once, once, once))
    add(Block.EMBEDDING, Phase.FORWARD, tensor(none, once, once))
    add(Block.EMBEDDING, Phase.BACKWARD, tensor(once, none, none))
    add(Block.HEAD, Phase.FORWARD, tensor(once, none, none) | {"tp.softmax": 3 * once})
    add(Block.HEAD, Phase.BACKWARD, tensor(none, once, once))
    add(Block.ATTENTION, Phase.FORWARD, {"cp.send_recv": core_again * ring, "up.all_to_all": core_again})
    # On the way back the ring passes the keys and values and their gradients.
    passed = {"cp.send_recv": ring, "cp.gradients": ring} if runtime.fp32_ring_gradients else {"cp.send_recv": 2 * ring}
    add(Block.ATTENTION, Phase.BACKWARD, passed | {"up.all_to_all": once})
    if job.model.is_moe:
        for phase, passes in ((Phase.FORWARD, again), (Phase.BACKWARD, once)):
            experts = {"expert_tp.all_gather": passes, "expert_tp.reduce_scatter": passes}
            experts |= {site: count * passes for site, count in expert_exchanges(runtime).items()}
            shared = tensor(passes, passes, passes) if job.model.shared_expert_ffn_size else {}
            add(Block.MOE_MLP, phase, experts | shared)
    return tuple(uses)


def expert_exchanges(runtime: RuntimeProfile) -> dict[str, int]:
    """Return the collectives of one pass through the experts of a layer: dispatch and combine."""
    return {"ep.all_gather": 1, "ep.reduce_scatter": 1} if runtime.gathers_tokens else {"ep.all_to_all": 2}


def block_communication(
    job: TrainingJob,
    runtime: RuntimeProfile,
    grid: ConfigGrid,
    groups: Groups,
    beside: Beside,
    collective_time: CollectiveTime = collective_s,
) -> BlockCommunication:
    """Compute the exposed communication of every configuration [n]."""
    collectives = layer_collectives(job, runtime, grid, groups)
    alone_s = {site: collective_time(collective) for site, collective in collectives.items()}
    forward_passes = 1.0 + (grid.recompute == RECOMPUTE_MODES.index("full"))
    # Passes of a layer: the forward pass, its repetition under full recomputation, and the backward pass.
    passes = forward_passes + 1.0
    core_passes = np.where(core_recomputed(job, runtime, grid), 3.0, 2.0)
    # Tensor parallelism communicates once per pass in each block. Megatron-LM gathers the inputs again in the backward
    # pass instead of keeping them.
    gather_scatter = alone_s["tp.all_gather"] + alone_s["tp.reduce_scatter"]
    per_pass = np.where(grid.sequence_parallel, gather_scatter, alone_s["tp.all_reduce"])
    gathers_again = grid.sequence_parallel & runtime.gathers_inputs_again
    backward = per_pass + np.where(gathers_again, alone_s["tp.all_gather"], 0.0)

    tensor_s = forward_passes * per_pass + backward

    # A runtime hides all traffic beside the products, or only the backward traffic beside weight gradients, or nothing.
    def exposed_tensor_s(block: Block) -> FloatArray:
        if runtime.overlaps_tensor:
            return exposed_s(runtime, tensor_s, beside.products[block])
        if runtime.overlaps_tensor_gradients:
            exposed = exposed_s(runtime, backward, beside.weight_gradients[block])
            return np.asarray(forward_passes * per_pass + exposed)
        return np.asarray(tensor_s)

    tp = {
        Block.ATTENTION: exposed_tensor_s(Block.ATTENTION),
        Block.DENSE_MLP: exposed_tensor_s(Block.DENSE_MLP),
        Block.MOE_MLP: np.zeros(len(grid)),
        Block.EMBEDDING: per_pass,
        Block.HEAD: per_pass + 3 * alone_s["tp.softmax"],  # the head gathers its input and scatters that gradient
    }
    hidden = {"tp": {block: tensor_s - tp[block] for block in (Block.ATTENTION, Block.DENSE_MLP)}}
    ep = np.zeros(len(grid))
    if job.model.is_moe:
        # Experts gather and scatter in every pass; shared experts communicate like a dense MLP in addition.
        experts = alone_s["expert_tp.all_gather"] + alone_s["expert_tp.reduce_scatter"]
        shared = per_pass if job.model.shared_expert_ffn_size else 0.0
        tp[Block.MOE_MLP] = passes * (experts + shared)
        ep = exchanged_s = passes * sum(count * alone_s[site] for site, count in expert_exchanges(runtime).items())
        if runtime.overlaps_experts:
            ep = exposed_s(runtime, ep, beside.products[Block.MOE_MLP] + beside.products[Block.ATTENTION])
        hidden["ep"] = {Block.MOE_MLP: exchanged_s - ep}
    return BlockCommunication(
        tp=tp,
        cp=_ring_s(runtime, grid, alone_s, beside.attention_core, core_passes),
        up=np.asarray(core_passes * alone_s["up.all_to_all"]),
        ep=ep,
        hidden=hidden,
        collectives=issued_collectives(job, runtime, grid),
    )


def _distinct_share(top_k: int, group: GroupLinks) -> FloatArray:
    """Return the share of a token's top_k copies that leave it if each host, or each rank of one host, gets one [n].

    For experts drawn at random, H (1 - (1 - 1/H)^k) of H places are hit (DeepEP's dispatch sends to a host once and
    forwards inside it; DeepSeek-V3, arXiv 2412.19437, section 3.2.2).
    """
    places = np.where(group.domains > 1, group.domains, group.size).astype(np.float64)
    return np.asarray(places * (1 - (1 - 1 / places) ** top_k) / top_k)


def issued_collectives(job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid) -> dict[Block, FloatArray]:
    """Count the collectives that one micro-batch issues per block [n], both passes and recomputation together."""
    is_split = {
        "tp": grid.tp > 1,
        "expert_tp": grid.expert_tensor > 1,
        "ep": grid.ep > 1,
        "cp": grid.cp > 1,
        "up": grid.up > 1,
    }
    issued = {block: np.zeros(len(grid)) for block in Block}
    for use in layer_uses(job, runtime, grid):
        if captures_block(runtime, use.block):
            continue
        issued[use.block] += use.count * _ISSUED.get(use.site, 1.0) * is_split[use.site.split(".")[0]]
    return issued


def _ring_s(
    runtime: RuntimeProfile,
    grid: ConfigGrid,
    alone_s: Mapping[str, FloatArray],
    attention_core_s: FloatArray,
    passes: FloatArray,
) -> FloatArray:
    """Compute the exposed ring exchanges of one attention block [s], [n].

    Keys and values go round forward, and with their gradients backward.

    In one exchange every member's share visits all members, in cp-1 steps that wait for the slowest hop (Liu et al.
    2023).
    """
    # The blocks go round once forward (again if recomputed). Backward, the blocks and their gradients go round.
    gradients_s = alone_s.get("cp.gradients", alone_s["cp.send_recv"])
    exchanges = (grid.cp - 1) * (passes * alone_s["cp.send_recv"] + gradients_s)
    if not runtime.overlaps_ring:
        return np.asarray(exchanges)
    # The first of the cp steps works on local keys. The other cp-1 steps can hide an exchange, but each waits for the
    # one before.
    latency = (passes + 1) * ((grid.cp - 1) * alone_s["cp.start"])
    return np.maximum(exposed_s(runtime, exchanges, attention_core_s * (grid.cp - 1) / grid.cp), latency)


def _exchanged_bytes(job: TrainingJob, grid: ConfigGrid) -> FloatArray:
    """Return the bytes that Ulysses exchanges for one attention block in one pass [n]: q, k, v and the output."""
    model = job.model
    if model.kv_lora_rank:
        per_token = model.num_heads * (2 * (model.qk_nope_head_dim + model.qk_rope_head_dim) + 2 * model.v_head_dim)
        elements = local_tokens(job, grid) * per_token / grid.tp
    else:
        query = model.num_heads * model.head_dim / grid.tp
        elements = local_tokens(job, grid) * 2 * (query + exchanged_kv_size(job, grid))
    return np.asarray(job.element_bytes * elements)
