"""Which ranks form a group of each parallel dimension, and the share of the weights that one rank keeps.

Ranks stand in Megatron-Core's order: tp fastest, then up and cp, then dp, then pp (megatron-core parallel_state.py,
order "tp-cp-ep-dp-pp"). A dimension's stride is the product of the faster degrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import BLOCKS, Block, local_kv_size
from costmodels.step.schedules import StageLayers, assign_layers
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster, GroupLinks
from hardware.device import Device
from hardware.distinct import distinct_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """The links that each dimension's groups cross, for every configuration [n].

    `weights` is the group over which a dense weight is reduced (up, cp and dp together), or sharded where dp_shard
    splits it; `weight_copies` are the ranks that hold a copy of one shard. `expert_weights` and `expert_copies` are the
    same for an expert, `expert_tp` is the group that splits it. `ends` are a rank of the first stage and its partner on
    the last. `all_hosts` is the number of the cluster's hosts.
    """

    all_hosts: int
    tp: GroupLinks
    expert_tp: GroupLinks
    up: GroupLinks
    cp: GroupLinks
    ep: GroupLinks
    pp: GroupLinks
    ends: GroupLinks
    weights: GroupLinks
    weight_copies: GroupLinks
    expert_weights: GroupLinks
    expert_copies: GroupLinks

    def take(self, index: IntArray) -> Groups:
        """The groups of the configurations at the positions `index`."""
        links = {f.name: getattr(self, f.name).take(index) for f in fields(self) if f.name != "all_hosts"}
        return Groups(all_hosts=self.all_hosts, **links)


def place(cluster: Cluster, grid: ConfigGrid) -> Groups:
    """The groups of every configuration on `cluster`; every configuration occupies all of its devices.

    Experts are dealt over all ranks of a stage, neighbours first, as in Megatron-Core's expert groups (order
    "tp-ep-dp", with an expert tensor degree of its own), so the same holds where `ep` divides dp alone.
    """
    strides, sizes = zip(*extents(grid).values(), strict=True)
    links = cluster.group_links(np.concatenate(strides), np.concatenate(sizes)).split(len(strides))
    ends = cluster.end_links(grid.tp * grid.up * grid.cp * grid.dp)
    return Groups(all_hosts=cluster.num_hosts, ends=ends, **dict(zip(extents(grid), links, strict=True)))


def place_on(cluster: Cluster, device: Device, grid: ConfigGrid) -> Groups:
    """The same as the ranks on one kind of device see them.

    Groups inside a stage cross the links of their own hosts alone, where they can all be on such hosts.
    """
    whole, part = place(cluster, grid), cluster.only(device)
    found = {}
    for name in ("tp", "expert_tp", "up", "cp", "ep"):
        stride, size = extents(grid)[name]
        fits = part.num_devices % (stride * size) == 0
        own = part.group_links(np.where(fits, stride, 1), np.where(fits, size, 1))
        found[name] = getattr(whole, name).where(fits, own)
    return replace(whole, **found)


def place_replica(cluster: Cluster, grid: ConfigGrid, stage: int, replica: int) -> Groups:
    """The groups of the one configuration in `grid` as one replica of one stage sees them.

    Args:
        cluster: Where.
        grid: One configuration.
        stage: Number of the stage.
        replica: Number of the data parallel replica.
    """
    ranks = np.arange(cluster.num_devices)
    of_stage = ranks.reshape(int(grid.pp[0]), -1)[stage]
    of_replica = of_stage.reshape(int(grid.dp[0]), -1)[replica]
    of_pipeline = ranks.reshape(int(grid.pp[0]), int(grid.dp[0]), -1)[:, replica].ravel()
    inside = dict.fromkeys(("tp", "expert_tp", "up", "cp"), of_replica)
    entries = []
    for name, (stride, size) in extents(grid).items():
        members = inside.get(name, of_stage)
        if name == "pp":
            entries.append(of_pipeline.reshape(int(grid.pp[0]), -1).T)
        else:
            entries.append(members.reshape(-1, int(size[0]), int(stride[0])).swapaxes(1, 2).reshape(-1, int(size[0])))
    stages = ranks.reshape(int(grid.pp[0]), -1)
    entries.append(np.stack([stages[0], stages[-1]], axis=1)[:, : len(stages)])
    links = cluster.links_among(entries, of_stage).split(len(entries))
    return Groups(all_hosts=cluster.num_hosts, **dict(zip((*extents(grid), "ends"), links, strict=True)))


def extents(grid: ConfigGrid) -> dict[str, tuple[IntArray, IntArray]]:
    """The distance of neighbours in each dimension's groups, and their sizes [n]; all of `Groups` but its `ends`."""
    ones = np.ones_like(grid.tp)
    inner = grid.tp * grid.up * grid.cp
    shared = grid.up * grid.cp * grid.dp
    experts = grid.expert_tensor * grid.ep
    shards = expert_shards(grid)
    return {
        "tp": (ones, grid.tp),
        "expert_tp": (ones, grid.expert_tensor),
        "up": (grid.tp, grid.up),
        "cp": (grid.tp * grid.up, grid.cp),
        "ep": (grid.expert_tensor, grid.ep),
        "pp": (inner * grid.dp, grid.pp),
        "weights": (grid.tp, shared // grid.copies),
        "weight_copies": (grid.tp * shared // grid.copies, grid.copies),
        "expert_weights": (experts, shards),
        "expert_copies": (experts * shards, np.maximum(grid.tp * shared // (experts * shards), 1)),
    }


def expert_shards(grid: ConfigGrid) -> IntArray:
    """Ranks over which ZeRO shards an expert's states [n]: those that hold it, less the copies of the states."""
    replicas = grid.tp * grid.dp * grid.cp * grid.up // (grid.expert_tensor * grid.ep)
    return np.maximum(replicas // grid.copies, 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageKinds:
    """The kinds of stages of one pipeline [c]; stages of one kind hold the same layers on the same kinds of devices.

    Kinds stand in the order of their first stages. A pipeline of many stages has few: the first, the last, and one or
    two between them.

    Attributes:
        blocks: Blocks that a stage of each kind holds [c, len(BLOCKS)].
        again: Those of them that run again in full, whatever the configuration recomputes [c, len(BLOCKS)].
        has_device: Whether some of its ranks stand on each of `cluster.devices` [c, d].
        count: Stages of each kind [c].
        first: Number of the first of them [c].
        before: Stages of each kind that come before the first of another [c, c], the other's row.
        kind_of_stage: The kind of every stage [pp].
    """

    blocks: FloatArray
    again: FloatArray
    has_device: NDArray[np.bool_]
    count: IntArray
    first: IntArray
    before: IntArray
    kind_of_stage: IntArray

    def apart(self) -> StageKinds:
        """The same pipeline with every stage as a kind of its own [pp]."""
        kind, num_stages = self.kind_of_stage, len(self.kind_of_stage)
        return StageKinds(
            blocks=self.blocks[kind],
            again=self.again[kind],
            has_device=self.has_device[kind],
            count=np.ones(num_stages, dtype=np.int64),
            first=np.arange(num_stages),
            before=np.tri(num_stages, k=-1, dtype=np.int64),
            kind_of_stage=np.arange(num_stages),
        )

    def held(self, block: Block) -> FloatArray:
        """How many such blocks a stage of each kind holds [c, 1]."""
        return self.blocks[:, [BLOCKS.index(block)]]

    def held_again(self, block: Block) -> FloatArray:
        """How many of these run again in full [c, 1]."""
        return self.again[:, [BLOCKS.index(block)]]

    def total(self, costs: FloatArray) -> FloatArray:
        """What costs of single blocks make of each kind of stage [..., c, k].

        Args:
            costs: Of every block [..., len(BLOCKS), k], and where some run again, then of those that do
                [..., 2 * len(BLOCKS), k].
        """
        if costs.shape[-2] == len(BLOCKS):
            return np.asarray(self.blocks @ costs)
        return np.asarray(np.concatenate([self.blocks - self.again, self.again], axis=1) @ costs)

    def slowest(self, seconds: FloatArray) -> FloatArray:
        """The parts of its time [p, c, k] on the device that makes each kind of stage slowest, from those of each [d].

        Ranks of a stage wait for each other in every micro-batch, in collectives or at its end.
        """
        if len(seconds) == 1:
            return np.asarray(seconds[0])
        is_on = self.has_device.T[:, :, None]
        slowest = np.where(is_on, seconds.sum(axis=1), -np.inf).argmax(axis=0)
        return np.asarray(np.take_along_axis(seconds, slowest[None, None], axis=0)[0])

    def smallest(self, figures: Sequence[float]) -> FloatArray:
        """The smallest of a figure of `cluster.devices` among the devices of each kind of stage [c]."""
        return np.asarray(np.where(self.has_device, figures, np.inf).min(axis=1))


def stage_kinds(blocks: FloatArray, again: FloatArray, has_device: NDArray[np.bool_]) -> StageKinds:
    """The kinds of stages that hold those blocks, some of which run again [pp, len(BLOCKS)], on devices [pp, d]."""
    numbers: dict[tuple[float, ...], int] = {}
    rows = np.concatenate([blocks, again, has_device], axis=1).tolist()
    kind = np.array([numbers.setdefault(tuple(row), len(numbers)) for row in rows])
    is_kind = kind[:, None] == np.arange(len(numbers))
    first = is_kind.argmax(axis=0)
    return StageKinds(
        blocks=blocks[first],
        again=again[first],
        has_device=has_device[first],
        count=is_kind.sum(axis=0),
        first=first,
        before=(np.cumsum(is_kind, axis=0) - is_kind)[first],
        kind_of_stage=kind,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipeline:
    """Configurations [k] whose stages hold the same layers.

    Attributes:
        pp: Number of stages.
        stages: Their kinds.
        at: Positions of the configurations in their grid [k].
        weights: Rows of the grid that differ in how weights are kept and reduced [w].
        weights_at: Positions of these among those of all pipelines [w].
        weights_of: The row of `weights` that each configuration has [k].
    """

    pp: int
    stages: StageKinds
    at: IntArray
    weights: ConfigGrid
    weights_at: IntArray
    weights_of: IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipelines:
    """A grid [n] by the layout of its stages.

    Attributes:
        each: The layouts.
        weights: Rows of the grid that differ in how weights are kept and reduced [w].
        weights_of: The row of `weights` that each configuration has [n].
    """

    each: tuple[Pipeline, ...]
    weights: ConfigGrid
    weights_of: IntArray


def pipelines(
    setting: Setting,
    grid: ConfigGrid,
    has_device: NDArray[np.bool_] | None = None,
) -> Pipelines:
    """The configurations of each layout; chunks per stage make another layout only where layers fall differently.

    Args:
        setting: Job, cluster and runtime. The cluster's hosts stand in the order of the ranks.
        grid: The configurations.
        has_device: The devices of the stages [pp, d] where the configurations, all of one pp, do not use all of them.
    """
    layouts, layout = _layouts(setting.job, setting.runtime, grid)
    replicas = grid.dp * grid.cp * grid.up
    # the layout comes first, so that the rows of one layout stand side by side
    columns = [layout, grid.tp, replicas, grid.ep, grid.expert_tp, grid.zero_stage, grid.copies]
    kept, weights_of = distinct_rows(columns)
    weights = grid.take(kept)
    each = []
    for stages, at, weights_at in zip(layouts, _positions(layout), _positions(layout[kept]), strict=True):
        devices = stage_devices(setting.cluster, len(stages.dense)) if has_device is None else has_device
        each.append(
            Pipeline(
                pp=len(stages.dense),
                stages=stage_kinds(stages.blocks, stages.again, devices),
                at=at,
                weights=weights.take(weights_at),
                weights_at=weights_at,
                weights_of=weights_of[at] - weights_at[0],
            )
        )
    return Pipelines(each=tuple(each), weights=weights, weights_of=weights_of)


def _layouts(job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid) -> tuple[list[StageLayers], IntArray]:
    """What layers the stages hold, each way once, and the number of each configuration's [n]."""
    first, cut = distinct_rows([grid.pp, grid.vpp, grid.assignment])
    found = []
    for at in first.tolist():
        assignment = grid.assignments[grid.assignment[at]]
        found.append(assign_layers(job.model, runtime, int(grid.pp[at]), int(grid.vpp[at]), assignment))
    numbers: dict[bytes, int] = {}
    keys = [np.stack([own.dense, own.moe, own.dense_again, own.moe_again]).tobytes() for own in found]
    number = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    return list(dict(zip(number.tolist(), found, strict=True)).values()), number[cut]


def _positions(number: IntArray) -> list[IntArray]:
    """The positions of every number from 0 on [n]."""
    counts = np.bincount(number)
    order = np.argsort(number.astype(np.min_scalar_type(len(counts))), kind="stable")  # fast for short integers
    return np.split(order, np.cumsum(counts)[:-1]) if len(counts) else []


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalParameters:
    """Parameters that one rank of each stage keeps before ZeRO shards them [s, k].

    Attributes:
        dense: Weights that all ranks of the `weights` group share.
        expert: Weights that the `expert_weights` group shares.
        tied: Those of the dense that the stage has a copy of, and the stage at the pipeline's other end another.
    """

    dense: FloatArray
    expert: FloatArray
    tied: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerParameters:
    """Parameters of the parts of a model that one rank keeps before ZeRO shards them [n].

    Attributes:
        attention: Attention of one layer, with the layer's norms.
        dense_mlp: MLP of a dense layer.
        shared: What a layer with experts has in place of that, without its routed experts.
        expert: All routed experts of one layer that the rank keeps.
        table: The embedding, or the output head.
    """

    attention: FloatArray
    dense_mlp: FloatArray
    shared: FloatArray
    expert: FloatArray
    table: FloatArray

    @property
    def dense(self) -> FloatArray:
        """A dense layer."""
        return self.attention + self.dense_mlp

    @property
    def moe(self) -> FloatArray:
        """A layer with experts, without the routed experts."""
        return self.attention + self.shared


def layer_parameters(job: TrainingJob, grid: ConfigGrid) -> LayerParameters:
    """Parameters per rank of each part.

    Matrices are divided by tp (experts by a degree of their own and by ep), norms, routers and MLA's down projections
    are copied (Megatron-LM, Shoeybi et al. 2019, section 3; megatron-core multi_latent_attention.py).
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
    return LayerParameters(
        attention=attention,
        dense_mlp=model.dense_mlp_parameters / tp,
        shared=model.shared_expert_parameters / tp + model.router_parameters,
        expert=model.num_experts * model.expert_parameters / (grid.expert_tensor * grid.ep),
        table=model.embedding_parameters / tp,
    )


def local_parameters(job: TrainingJob, grid: ConfigGrid, blocks: FloatArray) -> LocalParameters:
    """Parameters per rank of stages that hold so many `blocks` [s, len(BLOCKS)], for configurations [k].

    A tied head is a copy of the embedding on the last stage.
    """
    model, each = job.model, layer_parameters(job, grid)
    has_own_head = (grid.pp > 1) | (not model.tied_embeddings)
    held = {
        Block.ATTENTION: each.attention,
        Block.DENSE_MLP: each.dense_mlp,
        Block.MOE_MLP: each.shared,
        Block.EMBEDDING: each.table + model.position_parameters,
        Block.HEAD: each.table * has_own_head + model.final_norm_parameters,
    }
    return LocalParameters(
        dense=blocks @ np.stack([held[block] for block in BLOCKS]),
        expert=np.outer(blocks[:, BLOCKS.index(Block.MOE_MLP)], each.expert),
        tied=np.outer(
            blocks[:, BLOCKS.index(Block.EMBEDDING)] + blocks[:, BLOCKS.index(Block.HEAD)],
            each.table * ((grid.pp > 1) & model.tied_embeddings),
        ),
    )


def sharded_parameters(grid: ConfigGrid, local: LocalParameters) -> FloatArray:
    """Parameters of each stage whose states one rank keeps where ZeRO shards them [s, k]."""
    dense = local.dense / (grid.dp * grid.cp * grid.up // grid.copies)
    return np.asarray(dense + local.expert / expert_shards(grid))


def stage_devices(cluster: Cluster, pp: int) -> NDArray[np.bool_]:
    """Whether some ranks of each stage stand on each of `cluster.devices` [pp, d]."""
    ends = np.cumsum([group.num_devices for group in cluster.groups])
    last = np.arange(1, pp + 1)[:, None] * (cluster.num_devices // pp)
    first = last - cluster.num_devices // pp
    on_group = (first < ends) & (last > np.concatenate([[0], ends[:-1]]))
    is_device = np.array([[group.device == device for device in cluster.devices] for group in cluster.groups])
    return np.asarray(on_group @ is_device)
