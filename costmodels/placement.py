"""Which ranks form a group of each parallel dimension, and the share of the weights that one rank keeps.

Ranks stand in Megatron-Core's order: tp fastest, then up and cp, then dp, then pp (megatron-core parallel_state.py,
order "tp-cp-ep-dp-pp"). A dimension's stride is the product of the faster degrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from costmodels.job import TrainingJob
from costmodels.operators import FloatArray, local_kv_size
from costmodels.parallel import ConfigGrid, IntArray
from costmodels.schedules import StageLayers
from hardware.cluster import Cluster, GroupLinks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """The links that each dimension's groups cross, for every configuration [n].

    `weights` is the group that shares a dense weight (up, cp and dp together), `expert_weights` the one that shares an
    expert (that group without ep).
    """

    tp: GroupLinks
    up: GroupLinks
    cp: GroupLinks
    ep: GroupLinks
    pp: GroupLinks
    weights: GroupLinks
    expert_weights: GroupLinks


def place(cluster: Cluster, grid: ConfigGrid) -> Groups:
    """The groups of every configuration on `cluster`; every configuration occupies all of its devices.

    Experts are dealt over all ranks that share a dense weight, neighbours first, as in Megatron-Core's expert groups
    (order "tp-ep-dp", without cp), so the same holds where `ep` divides dp alone.
    """
    inner = grid.tp * grid.up * grid.cp
    return Groups(
        tp=cluster.group_links(np.ones_like(grid.tp), grid.tp),
        up=cluster.group_links(grid.tp, grid.up),
        cp=cluster.group_links(grid.tp * grid.up, grid.cp),
        ep=cluster.group_links(grid.tp, grid.ep),
        pp=cluster.group_links(inner * grid.dp, grid.pp),
        weights=cluster.group_links(grid.tp, grid.up * grid.cp * grid.dp),
        expert_weights=cluster.group_links(grid.tp * grid.ep, grid.up * grid.cp * grid.dp // grid.ep),
    )


def pipelines(grid: ConfigGrid) -> Iterator[tuple[int, int, IntArray]]:
    """Each (pp, vpp) of the grid with the positions that have it."""
    code = grid.pp * (int(grid.vpp.max(initial=0)) + 1) + grid.vpp
    order = np.argsort(code, kind="stable")
    for positions in np.split(order, np.flatnonzero(np.diff(code[order])) + 1):
        if len(positions):
            yield int(grid.pp[positions[0]]), int(grid.vpp[positions[0]]), positions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalParameters:
    """Parameters that one rank of each stage keeps before ZeRO shards them [k, pp].

    Attributes:
        dense: Weights that all ranks of the `weights` group share.
        expert: Weights that the `expert_weights` group shares.
    """

    dense: FloatArray
    expert: FloatArray


def local_parameters(job: TrainingJob, grid: ConfigGrid, stages: StageLayers) -> LocalParameters:
    """Parameters per rank and stage for configurations [k] that share one pipeline.

    Matrices are divided by tp, norms, routers and MLA's down projections are copied (Megatron-LM, Shoeybi et al. 2019,
    section 3; megatron-core multi_latent_attention.py). A tied head is a copy of the embedding on the last stage.
    """
    model = job.model
    tp = grid.tp.astype(np.float64)
    copied = model.norm_parameters
    if model.kv_lora_rank:
        copied += model.hidden_size * (model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim)
        attention = (model.attention_parameters - (copied - model.norm_parameters)) / tp + copied
    else:
        extra_kv = local_kv_size(job, grid) - model.num_kv_heads * model.head_dim / tp
        attention = model.attention_parameters / tp + 2 * model.hidden_size * extra_kv + copied
    dense_layer = attention + model.dense_mlp_parameters / tp
    moe_layer = attention + model.shared_expert_parameters / tp + model.router_parameters
    dense = dense_layer[:, None] * stages.dense + moe_layer[:, None] * stages.moe
    table = model.embedding_parameters / tp
    dense[:, 0] += table + model.position_parameters
    dense[:, -1] += model.final_norm_parameters
    if not model.tied_embeddings or len(stages.dense) > 1:
        dense[:, -1] += table
    expert = (model.num_experts * model.expert_parameters / (tp * grid.ep))[:, None] * stages.moe
    return LocalParameters(dense=dense, expert=expert)


def stage_devices(cluster: Cluster, pp: int) -> list[list[int]]:
    """For each stage, the indices into `cluster.devices` of the devices that its ranks stand on."""
    ranks = cluster.rank_device_index().reshape(pp, -1)
    return [sorted(set(row.tolist())) for row in ranks]
